"""The prompt with its guides and references that a sampler will be given, read from the widgets before it.

CONDITIONING ◀─ H3 Add Guide ◀─ H3 First and Last Frame, H3 References, H3 Encode Prompt, a saved prompt
             └▶ SeenCondition: sizes of everything, the parts that encode it, recipe, what another program encodes
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from . import host
from .condition import SUFFIX
from .upstream import FPS, Step, Upstream, is_link

PICTURES = ("LoadImage", "LoadImageOutput", "LoadImageMask")
REFERENCE_SECONDS = 5.0  # of a clip or sound whose length is not known yet


@dataclass(frozen=True)
class SeenCondition:
    """``parts`` encode it; ``infos`` are those of a prompt out of a file, whose dtype is ``kept`` ("" where it is
    encoded anew)."""

    prompt: str | None = None
    text_rows: int | None = None
    guides: tuple = ()
    references: tuple = ()
    parts: tuple = ()
    infos: tuple = ()
    recipe: str = "reference"
    foreign: tuple[str, ...] = ()
    prompt_foreign: bool = False
    kept: str = ""
    beyond: tuple[str, ...] = ()


def condition_of(up: Upstream, inputs: dict, canvas, name: str = "positive") -> SeenCondition:
    """The prompt with its guides and references that is connected to ``name``."""
    step = up.step(inputs, name)
    if step is None:
        up.assume("no prompt is connected: one of 512 rows is assumed")
        return SeenCondition()
    with up.inside(step):
        return CONDITIONS.get(step.kind, _of_another_program)(up, step, canvas)


def _encoded(up: Upstream, step: Step, canvas, *vaes: str) -> SeenCondition:
    """A prompt by the connected encoder, or by another program's CLIP."""
    given = step.inputs
    prompt = str(up.value(given, "prompt" if "prompt" in given else "text", ""))
    encoder = up.part(given, "clip")
    parts = [encoder] + [up.part(given, vae) for vae in vaes if up.linked(given, vae)]
    kept = up.step(given, "saved")
    seen = _saved(up, kept, canvas) if kept is not None and kept.kind == "H3RuntimeLoadPrompt" else SeenCondition()
    foreign = ("pictures",) if None in parts[1:] else ()
    return replace(
        seen,
        prompt=prompt,
        parts=tuple(part for part in parts[1 if seen.kept else 0 :] if part is not None),
        recipe=given.get("recipe", "reference"),
        foreign=foreign,
        prompt_foreign=encoder is None and not seen.kept,
        beyond=("prompt embeddings",) if re.search(r"\bembedding:\S", prompt) else (),
    )


def _framed(up: Upstream, step: Step, canvas) -> SeenCondition:
    from ..h3_runtime import GuideSize

    ends = (("first_frame", 0), ("last_frame", canvas.num_frames - 1))
    guides = tuple(GuideSize(at, keyframe=True) for name, at in ends if up.linked(step.inputs, name))
    return replace(_encoded(up, step, canvas, "video_vae"), guides=guides)


def _guided(up: Upstream, step: Step, canvas) -> SeenCondition:
    from ..h3_runtime import GuideSize, audio_latents, floor_frames

    given, before = step.inputs, condition_of(up, step.inputs, canvas)
    if up.value(given, "at", "frame") == "frame":
        index = int(up.value(given, "frame", 0))
        index += canvas.num_frames if index < 0 else 0
    else:
        index = round(float(up.value(given, "seconds", 0.0)) * FPS)
    index = min(max(index, 0), canvas.num_frames - 1)
    frames = frames_of(up, given, "video" if up.linked(given, "video") else "image", canvas)
    frames = floor_frames(min(frames, canvas.num_frames - index)) if frames >= 5 else min(frames, 1)
    sound = 0
    if up.linked(given, "audio") or up.linked(given, "video"):
        sound = audio_latents(canvas.num_frames) - audio_latents(index)
        up.assume("the sound of a guide is counted up to the end of the clip")
    guide = GuideSize(index, frames, sound, float(up.value(given, "strength", 1.0)))
    vaes = [up.part(given, vae) for vae in ("video_vae", "audio_vae") if up.linked(given, vae)]
    recipe = "comfy" if "comfy" in (before.recipe, given.get("recipe")) else "reference"
    foreign = (*before.foreign, *(("guide",) if None in vaes else ()))
    parts = (*before.parts, *filter(None, vaes))
    return replace(before, guides=(*before.guides, guide), recipe=recipe, foreign=foreign, parts=parts)


def frames_of(up: Upstream, inputs: dict, name: str, canvas) -> int:
    """How many frames a picture or clip has that is connected to ``name``; 0 for none."""
    step = up.step(inputs, name)
    if step is None:
        return 0
    made = up.sample_media(step)
    if made is not None:
        return made[2] if step.output == 1 else 1
    if step.kind in PICTURES:
        return 1
    if name.startswith("video"):
        up.assume(f"the length of a clip is known when the graph runs: {REFERENCE_SECONDS:g} s are assumed")
        return min(canvas.num_frames, round(REFERENCE_SECONDS * FPS))
    up.assume("how many frames a guide has is known when the graph runs: it is counted as one picture")
    return 1


def _size_of(up: Upstream, step: Step | None, what: str) -> tuple[int, int]:
    made = None if step is None else up.sample_media(step)
    if made is not None:
        return made[:2]
    up.assume(f"the size of a {what} is known when the graph runs: 1344x768 is assumed")
    return 1344, 768


def _referenced(up: Upstream, step: Step, canvas) -> SeenCondition:
    from ..h3_runtime import clip_reference, picture_reference, sound_reference

    given = step.inputs
    names = [name for name, value in given.items() if is_link(value)]
    seen = _encoded(up, step, canvas, "video_vae", "audio_vae")
    comfy = canvas if seen.recipe == "comfy" else None
    references = []
    for name in sorted(name for name in names if name.startswith("images.")):
        references.append(picture_reference(*_size_of(up, up.step(given, name), "reference picture"), comfy))
    sounds = {name.rpartition("_")[2] for name in names if name.startswith("video_sounds.")}
    for name in sorted(name for name in names if name.startswith("videos.")):
        from_file = up.sample_media(up.step(given, name)) is None
        heard = name.rpartition("_")[2] in sounds or (from_file and up.value(given, "soundtracks", True))
        frames = frames_of(up, given, name, canvas)
        size = _size_of(up, up.step(given, name), "reference clip")
        references.append(clip_reference(*size, frames, canvas, frames / FPS if heard else None, seen.recipe))
    for _ in (name for name in names if name.startswith("sounds.")):
        up.assume(f"the length of a reference sound is known when the graph runs: {REFERENCE_SECONDS:g} s are assumed")
        references.append(sound_reference(REFERENCE_SECONDS, canvas))
    return replace(seen, references=tuple(references))


def _saved(up: Upstream, step: Step, canvas) -> SeenCondition:
    name = step.inputs.get("file")
    if not isinstance(name, str) or name not in host.saved_files(SUFFIX):
        up.assume("the saved prompt is not there: one of 512 rows is assumed")
        return SeenCondition()
    rows, dtype, info = kept_prompt(name, host.stamp(host.saved_file(name)))
    return SeenCondition(text_rows=rows, infos=(info,), kept=dtype)


@lru_cache(maxsize=16)
def kept_prompt(name: str, stamp: str):
    """(rows, dtype, info of its encoder) of a saved prompt; ``stamp`` changes when the file does."""
    from ..h3_runtime import encoder_of_record, load_condition

    path = host.saved_file(name)
    made = load_condition(path)
    return len(made.text.tags), made.record.dtype, encoder_of_record(made, path)


def _of_another_program(up: Upstream, step: Step, canvas) -> SeenCondition:
    """A node that we do not know: it passes a conditioning on, or encodes one."""
    below = next((name for name in ("conditioning", "positive") if up.linked(step.inputs, name)), None)
    if below is not None:
        up.assume("another program's node changes the conditioning: what it adds is known when the graph runs")
        return condition_of(up, step.inputs, canvas, below)
    if up.linked(step.inputs, "clip"):
        return _encoded(up, step, canvas)
    up.assume("the prompt is made by another program's node: one of 512 rows is assumed")
    return SeenCondition(prompt_foreign=True)


CONDITIONS = {
    "H3RuntimeEncodePrompt": _encoded,
    "H3RuntimeFirstLastFrame": _framed,
    "H3RuntimeAddGuide": _guided,
    "H3RuntimeReferences": _referenced,
    "H3RuntimeLoadPrompt": _saved,
}
