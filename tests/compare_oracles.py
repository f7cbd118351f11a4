"""What other libraries say of the same pictures and sounds: the values that test_compare_metrics.py holds ours against.

seeded pictures, sounds ─▶ torchmetrics (PSNR, SSIM, MS-SSIM), scikit-image (PSNR), auraloss (multi-resolution STFT)

They stand recorded in ``compare_oracles.json`` because the libraries weigh more than they test (63 MB installed,
and scipy). To make them anew, in an environment of its own:

    pip install torch torchmetrics==1.9.0 auraloss==0.4.0 scikit-image==0.26.0
    python tests/compare_oracles.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

FILE = Path(__file__).with_suffix(".json")
SIZES = {"small": (48, 64), "edge": (176, 181), "wide": (192, 256)}  # height, width


def pictures(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, 3, H, W] in steps of 1/255: waves, and the same with other waves and a darker half on them."""
    height, width = SIZES[name]
    y, x = torch.meshgrid(torch.arange(height) / 17.0, torch.arange(width) / 23.0, indexing="ij")
    colours = torch.tensor([0.0, 0.9, 2.1])[:, None, None]
    one = 0.5 + 0.25 * torch.sin(x + colours) + 0.2 * torch.cos(3.1 * y - 1.7 * x + colours)
    two = one + 0.06 * torch.sin(11.3 * x * y + colours) - 0.05 * (x > x.max() / 2)
    return tuple((255 * picture.clamp(0, 1)).round()[None] / 255 for picture in (one, two))


def sounds(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[L] each: a chord that swells, and the same quieter with a tone and hiss of its own."""
    time = torch.arange({"short": 9001, "long": 40000}[name], dtype=torch.float64) / 32000
    chord = sum(torch.sin(2 * torch.pi * hertz * time) for hertz in (220.0, 277.2, 1330.0)) / 5
    one = chord * (0.3 + 0.7 * torch.sin(torch.pi * time / time[-1]))
    hiss = torch.sin(1e4 * torch.sin(9e3 * time)) * 0.01
    return one.float(), (0.8 * one + 0.05 * torch.sin(2 * torch.pi * 4100 * time) + hiss).float()


def main() -> None:
    import auraloss
    import skimage
    import torchmetrics
    from skimage.metrics import peak_signal_noise_ratio
    from torchmetrics.functional.image import (
        multiscale_structural_similarity_index_measure,
        structural_similarity_index_measure,
    )
    from torchmetrics.functional.image import (
        peak_signal_noise_ratio as torch_psnr,
    )

    libraries = {module.__name__: module.__version__ for module in (torchmetrics, skimage)}
    made: dict = {"made_with": {**libraries, "auraloss": "0.4.0", "torch": torch.__version__.split("+")[0]}}
    for name, size in SIZES.items():
        a, b = pictures(name)
        made[name] = {
            "psnr": torch_psnr(b, a, data_range=1.0).item(),
            "psnr_skimage": float(peak_signal_noise_ratio(a.numpy(), b.numpy(), data_range=1.0)),
            "ssim": structural_similarity_index_measure(b, a, data_range=1.0).item(),
        }
        if min(size) >= 176:
            made[name]["ms_ssim"] = multiscale_structural_similarity_index_measure(b, a, data_range=1.0).item()
    for name in ("short", "long"):
        a, b = sounds(name)
        made[name] = {"mr_stft": auraloss.freq.MultiResolutionSTFTLoss()(b[None, None], a[None, None]).item()}
    FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
