"""CONDITIONING both ways: the host's list and the runtime's text rows, guides and references.

    [[hidden [1, L, D], {"minimax_token_tags": [L],
                         "minimax_keyframes":  [{"resolved_frame_index", "latent", "audio_latent"}, ...],
                         "minimax_refs":       [{"kind", "latent", "latent_t", "latent_h", "latent_w",
                                                 "audio_latent", "ref_audio_t"}, ...],
                         "minimax_visual_cond_noise_aug", "minimax_audio_cond_noise_aug"}]]

Ours adds one key, ``h3_runtime``, to the dictionary, to each keyframe and to each reference: the request behind it, for
the manifest and the label. The host's nodes pass it on and do not look at it. What carries no such key, or was changed
since, was made by another program, and the label says so.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

KEY = "h3_runtime"
TAGS, KEYFRAMES, REFERENCES = "minimax_token_tags", "minimax_keyframes", "minimax_refs"
VISUAL_NOISE, SOUND_NOISE = "minimax_visual_cond_noise_aug", "minimax_audio_cond_noise_aug"
CLEAN_PICTURE, CLEAN_SOUND = 0.999, 1.0  # timesteps at which conditions are held when nothing weakens them
WITHOUT_EFFECT = ("area", "mask", "control", "gligen", "hooks", "start_percent", "end_percent", "timestep_start")
UNKNOWN_PROMPT = "(encoded by another program's node)"


@dataclass(frozen=True)
class CarriedPrompt:
    """Rides in the dictionary of a prompt that we encoded. ``hidden`` are the rows it speaks of."""

    hidden: Tensor
    made: Any  # MadeCondition
    infos: dict = field(default_factory=dict)
    recipe: str = "reference"


@dataclass(frozen=True)
class CarriedGuide:
    """Rides in a keyframe of ours: ``media`` (PastMedia), its ``strength``, whether it stands in the prompt too,
    whether another program's VAE encoded it, by which ``recipe``, and the ``infos`` of our VAEs that did."""

    media: Any
    strength: float = 1.0
    keyframe: bool = False
    foreign: bool = False
    recipe: str = "reference"
    infos: dict = field(default_factory=dict)


@dataclass(frozen=True)
class CarriedReference:
    """Rides in a reference of ours."""

    media: Any
    kind: str
    sound: bool = True
    foreign: bool = False


@dataclass(frozen=True)
class TakenCondition:
    """A CONDITIONING as the runtime takes it. ``marks`` (one per guide), ``asked_references``, ``prompt`` and
    ``recipe`` are what a RenderRequest would have asked for; ``made`` is None for another program's prompt."""

    text: Any
    guides: tuple
    references: tuple
    made: Any
    infos: dict
    foreign: tuple[str, ...]
    marks: tuple[CarriedGuide, ...]
    asked_references: tuple
    prompt: str
    recipe: str
    notes: tuple[str, ...] = ()


# --- giving ----------------------------------------------------------------------------------------------------------


def past(media) -> Any:
    """What stays of a picture, clip or sound once it is encoded: its name and hash."""
    from ..h3_runtime import PastMedia

    return PastMedia(name=media.name, digest=media.sha256)


def give_condition(made, infos: dict, job=None, request=None, foreign: bool = False) -> list:
    """Text rows, with the guides and references of ``job`` (as ``request`` asked for them), as CONDITIONING.

    ``foreign``: another program's VAE encoded those.
    """
    hidden = made.text.hidden
    values = {"pooled_output": None, TAGS: made.text.tags}
    values[KEY] = CarriedPrompt(hidden, made, dict(infos), made.record.recipe)
    conditioning = [[hidden[None], values]]
    if job is None:
        return conditioning
    keyframes = [media for media in (request.first_frame, request.last_frame) if media is not None]
    carried = [CarriedGuide(past(media), keyframe=True, foreign=foreign) for media in keyframes]
    assert len(carried) == len(job.guides), "guides of the middle are added one by one"
    if job.guides:
        values[KEYFRAMES] = [give_guide(guide, mark) for guide, mark in zip(job.guides, carried)]
    if job.references:
        values[REFERENCES] = [
            _give_reference(reference, CarriedReference(past(asked.media), asked.kind, asked.sound, foreign))
            for reference, asked in zip(job.references, request.references)
        ]
    return conditioning


def give_guide(guide, carried: CarriedGuide | None = None) -> dict:
    """One entry of ``minimax_keyframes``. An absent latent is an absent key."""
    entry = {"resolved_frame_index": int(guide.frame_index)}
    if guide.video is not None:
        entry["latent"] = guide.video
    if guide.audio is not None:
        entry["audio_latent"] = guide.audio
    if carried is not None:
        entry[KEY] = carried
    return entry


def _give_reference(reference, carried: CarriedReference) -> dict:
    entry: dict[str, Any] = {"kind": reference.kind}
    if reference.video is not None:
        _, _, t, h, w = reference.video.shape
        entry |= {"latent": reference.video, "latent_h": h, "latent_w": w}
        if reference.kind != "image":
            entry |= {"latent_t": t, "ref_audio_t": 0}
    if reference.audio is not None:
        entry |= {"audio_latent": reference.audio, "ref_audio_t": reference.audio.shape[3]}
    entry[KEY] = carried
    return entry


def add_guide(conditioning: list, entry: dict) -> list:
    """The CONDITIONING with one more keyframe; the one given stays as it is."""
    added = []
    for hidden, values in conditioning:
        added.append([hidden, {**values, KEYFRAMES: [*(values.get(KEYFRAMES) or []), entry]}])
    return added


# --- taking ----------------------------------------------------------------------------------------------------------


def take_condition(conditioning: list, canvas) -> TakenCondition:
    """Text rows, guides and references of a CONDITIONING, whoever made it.

    H3Error for several prompts, a batch, or rows whose tags do not fit.
    """
    from ..h3_runtime import H3Error

    if not isinstance(conditioning, (list, tuple)) or len(conditioning) != 1:
        count = len(conditioning) if isinstance(conditioning, (list, tuple)) else 0
        raise H3Error(f"the conditioning holds {count} prompts: one render has one; do not combine conditionings")
    hidden, values = conditioning[0]
    if hidden.ndim != 3 or hidden.shape[0] != 1:
        raise H3Error(f"the conditioning has shape {list(hidden.shape)}: one prompt [1, rows, width] is needed")
    rows = _outside(hidden[0])
    notes = [f"{key} in the conditioning has no effect here" for key in WITHOUT_EFFECT if values.get(key) is not None]
    carried = values.get(KEY)
    if carried is not None and not (carried.hidden.shape == rows.shape and torch.equal(carried.hidden.cpu(), rows)):
        notes.append("the prompt's rows were changed by another node since they were encoded")
        carried = None
    text = _take_text(rows, values, carried)
    guides, marks, foreign_guides = _take_guides(values, canvas)
    references, asked_references, foreign_references = _take_references(values)
    weakened, said = _weaken(guides, references, values)
    recipes = {mark.recipe for mark in (*marks, *([] if carried is None else [carried]))}
    return TakenCondition(
        text=text,
        guides=weakened,
        references=references,
        made=None if carried is None else carried.made,
        infos=_all_infos(carried, marks),
        foreign=tuple(foreign_guides + foreign_references),
        marks=tuple(marks),
        asked_references=asked_references,
        prompt=UNKNOWN_PROMPT if carried is None else carried.made.record.prompt,
        recipe="comfy" if "comfy" in recipes else "reference",
        notes=(*notes, *said),
    )


def _all_infos(carried: CarriedPrompt | None, marks: list[CarriedGuide]) -> dict:
    """What is known of the parts that made the prompt and its guides."""
    infos: dict = {}
    for mark in (*marks, *([] if carried is None else [carried])):
        infos |= mark.infos
    return infos


def _outside(tensor: Tensor) -> Tensor:
    """On the CPU, as a tensor of its own outside the host's inference mode."""
    return tensor.detach().to("cpu", copy=True)


def _take_text(rows: Tensor, values: dict, carried: CarriedPrompt | None):
    from ..h3_runtime import H3Error, TextCondition

    if carried is not None:
        return carried.made.text
    tags = values.get(TAGS)
    if tags is None:
        tags = torch.ones(rows.shape[0], dtype=torch.int64)
    tags = _outside(tags).reshape(-1).long()
    if len(tags) != rows.shape[0]:
        raise H3Error(
            f"the conditioning has {rows.shape[0]} rows and tags for {len(tags)}: another node changed its length; "
            "connect the encoder's output as it is"
        )
    return TextCondition(rows, tags, ("the prompt was encoded by another program's node",), "another program's node")


def _latent(value: Any) -> Tensor | None:
    return None if value is None else _outside(value).float()


def _digest(*tensors: Tensor | None) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            digest.update(f"{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _take_guides(values: dict, canvas):
    """(guides in the order the runtime draws noise for them, their marks, names of those that are not ours)."""
    from ..h3_runtime import Guide, H3Error, PastMedia

    found, foreign = [], []
    for number, entry in enumerate(values.get(KEYFRAMES) or [], start=1):
        index = entry.get("resolved_frame_index", entry.get("frame_index"))
        if index is None:
            raise H3Error(f"keyframe {number} of the conditioning names no frame: it was made by an unknown node")
        video, audio = _latent(entry.get("latent")), _latent(entry.get("audio_latent"))
        if video is not None and video.ndim == 4:  # [1, 24, h, w] of a node that drops the time of one picture
            video = video[:, :, None]
        mark = entry.get(KEY)
        if mark is None:
            name = f"guide at frame {index}"
            foreign.append(name)
            stands_at_an_end = video is not None and video.shape[2] == 1 and index in (0, canvas.num_frames - 1)
            mark = CarriedGuide(PastMedia(name=name, digest=_digest(video, audio)), keyframe=stands_at_an_end)
        elif mark.foreign:
            foreign.append(mark.media.name)
        found.append((Guide(index, video, audio, mark.strength, mark.keyframe, mark.media.name), mark))
    # The order of CLI and API: keyframes first, then by frame and content, so that chaining order moves no noise.
    found.sort(key=lambda pair: _order(*pair))
    return tuple(guide for guide, _ in found), [mark for _, mark in found], foreign


def _order(guide, mark: CarriedGuide) -> tuple:
    if guide.keyframe:
        return (0, guide.frame_index, False, "", 0.0)
    return (1, guide.frame_index, guide.video is None, mark.media.sha256, guide.strength)


def _take_references(values: dict):
    """(references in their order, what was asked for, names of those that are not ours)."""
    from ..h3_runtime import PastMedia, Reference, ReferenceRequest

    references, asked, foreign = [], [], []
    for number, entry in enumerate(values.get(REFERENCES) or [], start=1):
        video, audio = _latent(entry.get("latent")), _latent(entry.get("audio_latent"))
        kind = entry["kind"]
        if kind == "video_audio" and audio is None:
            kind = "video"
        mark = entry.get(KEY)
        if mark is None:
            name = f"reference {number} ({kind})"
            foreign.append(name)
            asked_kind = {"video_audio": "video"}.get(kind, kind)
            mark = CarriedReference(PastMedia(name=name, digest=_digest(video, audio)), asked_kind, audio is not None)
        elif mark.foreign:
            foreign.append(mark.media.name)
        references.append(Reference(kind, video, audio, mark.media.name))
        asked.append(ReferenceRequest(mark.kind, mark.media, mark.sound))
    return tuple(references), tuple(asked), foreign


def _weaken(guides: tuple, references: tuple, values: dict):
    """Guides under the host's conditioning-noise settings, and sentences about what they do not reach."""
    picture, sound = values.get(VISUAL_NOISE), values.get(SOUND_NOISE)
    notes, weakened = [], list(guides)
    for value, clean, stream, key in (
        (picture, CLEAN_PICTURE, "video", VISUAL_NOISE),
        (sound, CLEAN_SOUND, "audio", SOUND_NOISE),
    ):
        if value is None or float(value) >= clean:
            continue
        strength = max(1e-6, float(value) / clean)
        for index, guide in enumerate(weakened):
            if getattr(guide, stream) is not None:
                weakened[index] = replace(guide, strength=min(guide.strength, strength))
        notes.append(f"{key} {float(value):g}: guides are held at strength {strength:.3f}")
        if references:
            notes.append(f"{key} does not weaken references here")
    return tuple(weakened), notes
