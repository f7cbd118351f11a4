"""LoRAs: every layout in circulation read into one form, planned, merged or run beside the base."""

from .adaln import find_grid, fit_projection, grid_from_checkpoint, grid_of, read_grid
from .applying import Applied, Lora, LoraPlan, apply, plan
from .keys import LAYOUTS
from .opening import LoraFile, LowRank, open_lora
from .presets import PRESETS, Preset, preset_for
from .side import LoraLinear

__all__ = [
    "LAYOUTS",
    "PRESETS",
    "Applied",
    "Lora",
    "LoraFile",
    "LoraLinear",
    "LoraPlan",
    "LowRank",
    "Preset",
    "apply",
    "find_grid",
    "fit_projection",
    "grid_from_checkpoint",
    "grid_of",
    "open_lora",
    "plan",
    "preset_for",
    "read_grid",
]
