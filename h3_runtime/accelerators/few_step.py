"""Few-step LoRAs: the forwards and shifts that the LoRA on the model was trained for, set in one word.

    --lora fl2v_turbo_4step_v1.2_768p...safetensors --accelerate few-step ─▶ 4 forwards, shifts 6 and 3

The settings are those of ``lora/presets.py`` (LightX2V, LarryVRH, TaoMate; their model cards). What a person set to
something else than the defaults stays, and is said. Nothing wraps the loop: the LoRA is on the weights already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import H3Error
from ..lora import open_lora
from ..schedule import AUDIO_SHIFT, DEFAULT_FORWARDS, VIDEO_SHIFT

NAME = "few-step"
WORDS = "Sets steps and shifts to what the few-step LoRA on the model was trained for."
PATH = "accelerator/few-step"


@dataclass(frozen=True)
class ScheduleSettings:
    """What a request says of its schedule."""

    num_forwards: int = DEFAULT_FORWARDS
    video_shift: float = VIDEO_SHIFT
    audio_shift: float = AUDIO_SHIFT


def few_step_settings(
    loras: Iterable[str | Path], asked: ScheduleSettings
) -> tuple[ScheduleSettings, str, tuple[str, ...]]:
    """(settings, name of the LoRA's preset, sentences). H3Error when no LoRA, or more than one, is a few-step one."""
    presets = [preset for preset in (open_lora(Path(path)).preset for path in loras) if preset is not None]
    if len(presets) != 1:
        found = "none of the LoRAs is known as one" if not presets else f"{len(presets)} of the LoRAs are such"
        raise H3Error(f"few-step takes its settings from one few-step LoRA, and {found}: set steps and shifts yourself")
    preset, default, notes = presets[0], ScheduleSettings(), []
    offered = ScheduleSettings(preset.forwards, preset.video_shift or VIDEO_SHIFT, preset.audio_shift or AUDIO_SHIFT)
    chosen = {}
    for name in ("num_forwards", "video_shift", "audio_shift"):
        given, wanted = getattr(asked, name), getattr(offered, name)
        chosen[name] = wanted if given == getattr(default, name) else given
        if chosen[name] != wanted:
            notes.append(f"few-step: {name} stays {given:g} as asked; {preset.name} was trained for {wanted:g}")
    settings = ScheduleSettings(**chosen)
    notes.append(
        f"few-step: {settings.num_forwards} forwards, shifts {settings.video_shift:g} and {settings.audio_shift:g}, "
        f"as {preset.name} was trained" + (f" ({preset.note})" if preset.note else "")
    )
    return settings, preset.name, tuple(notes)
