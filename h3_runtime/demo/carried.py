"""Where the small model that the package carries lies; how it was made is told by ``model/CARD.md``."""

from __future__ import annotations

from pathlib import Path

CARRIED_MODEL = Path(__file__).parent / "model"
FEW_STEP_LORA = CARRIED_MODEL / "loras" / "few_step.safetensors"
