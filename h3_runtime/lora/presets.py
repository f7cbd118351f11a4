"""The few-step LoRAs in circulation and the settings each was trained for.

    minimax_h3_fl2v_turbo_4step_v1.2_768p_comfyui_bf16.safetensors
               │          │     │     └─ 768p: shifts 6 and 3, else 12 and 3
               │          │     └─ version        (the naming rule of LightX2V's files; one table row per known file)
               │          └─ forwards
               └─ partition

``forwards`` are model calls, as everywhere in this package: engines and diffusers, which count the last grid point
too, say one more. A preset is an offer: nothing is changed by it, and a request that differs is warned of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePath

FROM_RANK = "rank"  # alpha = rank: scale 1
FROM_FILE = "file"  # the file has to say
TITLE_KEYS = ("modelspec.title", "ss_output_name", "name")  # where a renamed file may still tell what it was

FL2V, REF2V = ("t2va", "fl2va"), ("ref2va",)


@dataclass(frozen=True)
class Preset:
    """Settings of one few-step LoRA. ``forwards`` is offered, fewest..most are what it was made for.

    ``alpha`` is what a file without an alpha of its own gets: a number, FROM_RANK, or FROM_FILE (nothing is known).
    Shifts None: it has a sigma grid of its own. ``note`` says what sources disagree on.
    """

    name: str
    tasks: tuple[str, ...]
    forwards: int
    fewest: int
    most: int
    video_shift: float | None
    audio_shift: float | None
    alpha: float | str
    trained_at: str = ""
    note: str = ""

    @property
    def partition(self) -> str:
        return "ref2va" if self.tasks == REF2V else "fl2va"

    def to_dict(self) -> dict:
        return {**asdict(self), "tasks": list(self.tasks), "partition": self.partition}

    def differences(
        self, forwards: int | None = None, video_shift: float | None = None, audio_shift: float | None = None
    ) -> list[str]:
        """Sentences about settings that differ from those it was trained for; None is not checked."""
        said = []
        if forwards is not None and not self.fewest <= forwards <= self.most:
            span = str(self.most) if self.fewest == self.most else f"{self.fewest} to {self.most}"
            said.append(
                f"{forwards} forwards with {self.name}, which was trained for {span} (model calls, not grid points); "
                f"{self.forwards} are offered"
            )
        for kind, asked, own in (
            ("picture", video_shift, self.video_shift),
            ("sound", audio_shift, self.audio_shift),
        ):
            if asked is not None and own is not None and asked != own:
                said.append(f"{kind} shift {asked:g} with {self.name}, which was trained with {own:g}")
        return said


def _lightx2v(partition: str, steps: int, version: str, large: bool, alpha: float | str, note: str = "") -> Preset:
    name = f"{partition}_{steps}step_v{version}" + ("_768p" if large else "")
    tasks = FL2V if partition == "fl2v" else REF2V
    fewest = 4 if name == "fl2v_8step_v1.0" else steps
    return Preset(name, tasks, steps, fewest, steps, *_shifts(large), alpha, "768p" if large else "544p", note)


def _shifts(large: bool) -> tuple[float, float]:
    return (6.0, 3.0) if large else (12.0, 3.0)


PRESETS: tuple[Preset, ...] = (
    _lightx2v("fl2v", 4, "0.1", False, 8.0),
    _lightx2v("fl2v", 8, "1.0", False, 8.0),
    _lightx2v("fl2v", 4, "1.0", True, 128.0),
    _lightx2v("fl2v", 4, "1.1", True, FROM_FILE),
    _lightx2v("fl2v", 4, "1.2", True, FROM_FILE),
    _lightx2v(
        "fl2v", 8, "1.0", True, FROM_FILE, "sources disagree on its alpha (8 or 128): the file's own is what counts"
    ),
    _lightx2v("ref2v", 4, "0.1", False, 8.0),
    _lightx2v(
        "ref2v",
        8,
        "1.0",
        True,
        FROM_FILE,
        "sources disagree on its picture shift: 6 by its maker and by the naming rule, 12 in some workflows",
    ),
    Preset("larryvrh_v1", FL2V, 4, 4, 8, 12.0, 3.0, FROM_RANK),
    Preset("larryvrh_ckpt850", FL2V, 4, 4, 8, 12.0, 3.0, FROM_RANK),
    Preset("larryvrh_v4", FL2V, 6, 4, 8, 12.0, 3.0, FROM_RANK),
    Preset(
        "taomate_3step",
        FL2V,
        3,
        3,
        3,
        None,
        None,
        FROM_RANK,
        "768p",
        "it was trained for chunks with a cache and a sigma grid of its own; a whole clip at once differs",
    ),
    Preset("carried_4step", FL2V, 4, 4, 4, 12.0, 3.0, FROM_RANK),  # of the small model that the package carries
)
BY_NAME = {preset.name: preset for preset in PRESETS}

_FAMILY = re.compile(
    r"(?:minimax[_-]h3[_-])?(fl2v|ref2v)a?[_-](?:lightx2v[_-])?(?:turbo[_-])?([0-9]{1,2})step[_-]v([0-9]+\.[0-9]+)"
    r"(?P<large>[_-]768p)?"
)
_OTHERS = (
    (re.compile(r"turbo[_-]v4([._-]|$)"), "larryvrh_v4"),
    (re.compile(r"ckpt[_-]?850"), "larryvrh_ckpt850"),
    (re.compile(r"minimax[_-]h3[_-]turbo[_-]4step"), "larryvrh_v1"),
    (re.compile(r"taomate"), "taomate_3step"),
    (re.compile(r"4 forwards, of the carried dit"), "carried_4step"),
)


def preset_for(path, metadata: Mapping[str, str] | None = None) -> Preset | None:
    """The preset of a LoRA by its file name, else by a title in its metadata; None when neither tells.

    An unknown member of LightX2V's family gets the settings of the naming rule, and its note says so.
    """
    titles = [str((metadata or {}).get(key, "")) for key in TITLE_KEYS]
    for title in (PurePath(path).name, *titles):
        title = title.lower()
        if match := _FAMILY.search(title):
            partition, steps, version = match[1], int(match[2]), match[3]
            large = match["large"] is not None
            rule = _lightx2v(
                partition, steps, version, large, FROM_FILE, "not a known file: its settings are those of its name"
            )
            return BY_NAME.get(rule.name, rule if steps else None)
        for pattern, name in _OTHERS:
            if pattern.search(title):
                return BY_NAME[name]
    return None
