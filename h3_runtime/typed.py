"""What was typed on the command line: a device, two numbers. Read here, refused with the option's name.

"cuda" ─▶ device that works         "1344x768" ─▶ (1344, 768)
"""

from __future__ import annotations

import re

from .errors import H3Error


def choose_device(asked: str | None):
    """The device to compute on: as asked, else CUDA where there is one. H3Error where it cannot be used."""
    import torch

    from .model import DEVICES

    name = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if name.split(":")[0] not in DEVICES:
            raise RuntimeError("the runtime computes on these two only")
        torch.zeros(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise H3Error(f"device {name!r} cannot be used here ({reason}): give cuda or cpu") from None


def read_pair(text: str, separator: str, kind: type, option: str, form: str) -> tuple:
    """Two numbers of ``kind`` with ``separator`` between them. H3Error names the option and its form."""
    number = r"\s*(\d{1,9})\s*" if kind is int else r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*"
    match = re.fullmatch(number + separator + number, text.lower())
    if match is None:
        raise H3Error(f"{option} {text[:40]!r} cannot be read: give {form}")
    return kind(match[1]), kind(match[2])
