"""Pixels and sound to what conditions a render: placed on the canvas, cut to fit, every cut reported.

    first keyframe ── stretched to the canvas ──┐
    last keyframe ─── cover-cropped ────────────┼─▶ Placed (pixels and samples at a frame) ─▶ VAEs ─▶ Guide
    guides ── 24 fps, cut to the frames left, ──┘
              17k+5, cover-cropped
    references ── references.py ──▶ PlacedReference ──────────────────────────────────────▶ VAEs ─▶ Reference
    source clip ── 24 fps, cut or padded to the canvas ──▶ Placed ────────────▶ posterior mean ─▶ AVLatent
    masks ── canvas pixels and seconds ───────────────────────────────────────▶ latent cells ─▶ Masks

``place`` reads media and checks everything before any weights are loaded; ``render.encode`` needs the VAEs. The recipe
comfy crops before it resizes, and stretches the first frame only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import psutil
import torch
from torch import Tensor

from . import media
from .errors import H3Error
from .geometry import (
    AUDIO_CHANNELS,
    AUDIO_HOP,
    DEFAULT_FRAMES,
    FPS,
    PIXELS_PER_TOKEN,
    SAMPLE_RATE,
    Canvas,
    audio_samples,
    floor_frames,
    ratio_value,
    snap_frames,
)
from .job import VIDEO_CHANNELS, Held, Masks, filled_frames, overlaps, pool_pixels
from .latents import PartialLatent, load_latent
from .references import PlacedReference, describe_names, place_references, read_memory
from .request import GuideRequest, Media, RenderRequest, SoundMask
from .text.conditions import MadeCondition, load_condition, refuse_other
from .text.presentation import lint_pace
from .text.shown import Shown

STRETCH_REPORTED = 0.02
READ_AHEAD = 5 * FPS  # frames read past what is used, so that a film as a guide costs neither memory nor time
COVER_LIMIT = 64  # a picture whose covering size is more than this many canvases is refused


@dataclass(frozen=True)
class Placed:
    """Media on the canvas at a frame: ``frames`` uint8 [f, H, W, 3] or None, ``audio`` float32 [2, k * 800] or None."""

    name: str
    frame_index: int
    frames: np.ndarray | None
    audio: Tensor | None
    strength: float = 1.0
    keyframe: bool = False

    @property
    def held(self) -> Held:
        picture = 0 if self.frames is None else len(self.frames)
        sound = 0 if self.audio is None else filled_frames(self.audio.shape[1], SAMPLE_RATE)
        return Held(self.name, self.frame_index, picture, sound)


@dataclass(frozen=True)
class Placement:
    """A request on its canvas: all pixels and samples ready, all checks made, nothing encoded yet."""

    canvas: Canvas
    guides: tuple[Placed, ...]
    source: Placed | PartialLatent | None
    masks: Masks | None
    state: PartialLatent | None
    notes: tuple[str, ...]
    references: tuple[PlacedReference, ...] = ()
    condition: MadeCondition | None = None

    @property
    def task(self) -> str:
        """ref2va with references, fl2va with guides, else t2va."""
        return "ref2va" if self.references else "fl2va" if self.guides else "t2va"

    @property
    def shown(self) -> tuple[Shown, ...]:
        """What the text encoder sees before the prompt: the keyframes on the canvas, then the references."""
        return (*_shown_keyframes(self.guides), *(reference.shown for reference in self.references))


def place(request: RenderRequest) -> Placement:
    """Read the request's media, choose the canvas and cut everything to it. H3Error for what does not fit."""
    notes: list[str] = []
    for medium in request.media.values():
        medium.sha256  # noqa: B018  (taken from the bytes that are read now)
    state = None if request.state is None else load_latent(request.state.path)
    source = None if request.source is None else _read_source(request.source, request.frames)
    keyframes = [
        (m, end, _read_picture(m, notes))
        for m, end in ((request.first_frame, 0), (request.last_frame, -1))
        if m is not None
    ]  # the first in this list shapes the canvas and is stretched onto it, whichever frame it stands at
    canvas = choose_canvas(request, keyframes[0][2] if keyframes else None, source, state)
    notes += canvas.notes
    check_room(canvas)
    _check_latents(request, canvas, source, state)
    cover = "crop" if request.recipe == "comfy" else "cover"
    guides = []
    for index, (medium, end, picture) in enumerate(keyframes):
        stretched = (end if request.recipe == "comfy" else index) == 0
        frames = _on_canvas(medium.name, picture[None], canvas, "stretch" if stretched else cover, notes)
        guides.append(Placed(medium.name, end % canvas.num_frames, frames, None, keyframe=True))
    middle = [(_place_guide(guide, canvas, cover, notes), guide) for guide in request.guides]
    guides += [placed for placed, _ in sorted(middle, key=_guide_order)]  # order of naming must not change the noise
    notes += overlaps([placed.held for placed in guides])
    placed_source = source
    if isinstance(source, media.Clip):
        placed_source = _place_source(request.source.name, source, canvas, notes)
    references = place_references(request.references, canvas, request.recipe, notes)
    masks = _masks(request, canvas, notes)
    condition = None if request.embeds is None else load_condition(request.embeds.path)
    placement = Placement(canvas, tuple(guides), placed_source, masks, state, (), references, condition)
    if condition is not None:
        refuse_other(condition, request.embeds.name, request.prompt, request.recipe, placement.shown)
    notes += describe_names(request.prompt, placement.shown) + lint_pace(request.prompt, canvas.seconds)
    return replace(placement, notes=tuple(notes))


def _shown_keyframes(guides: Sequence[Placed]) -> Iterator[Shown]:
    return (Shown("picture", guide.name, guide.frames, keyframe=True) for guide in guides if guide.keyframe)


def choose_canvas(
    request: RenderRequest,
    keyframe: np.ndarray | None,
    source: media.Clip | PartialLatent | None,
    state: PartialLatent | None,
) -> Canvas:
    """Size: that of a saved latent, else as asked, else the source clip's or the first keyframe's ratio, else 16:9."""
    size, ratio, frames = request.size, request.ratio, request.frames
    saved = state if state is not None else source if isinstance(source, PartialLatent) else None
    if saved is not None:
        have = saved.canvas
        if (size is not None and size != (have.width, have.height)) or (
            frames is not None and frames != have.num_frames
        ):
            raise H3Error(
                f"the saved latent is {have.width}x{have.height} with {have.num_frames} frames: leave out size and "
                "frames, or give the same ones"
            )
        return have
    if frames is None:
        frames = DEFAULT_FRAMES if source is None else source.frames.shape[0]
    if size is None and ratio is None and source is not None:
        height, width = source.frames.shape[1:3]
        if width % PIXELS_PER_TOKEN == 0 and height % PIXELS_PER_TOKEN == 0 and request.megapixels is None:
            size = (width, height)
        else:
            ratio = _clip_ratio(width, height)
    elif size is None and ratio is None and keyframe is not None:
        ratio = _clip_ratio(keyframe.shape[1], keyframe.shape[0])
    return Canvas.fit(frames, size, ratio, request.megapixels)


def check_room(canvas: Canvas) -> None:
    """H3Error for a canvas whose latents alone (noise, state, velocity and result, float32) pass the free memory."""
    cells = canvas.latent_t * canvas.latent_h * canvas.latent_w
    need, free = 4 * 4 * VIDEO_CHANNELS * cells, psutil.virtual_memory().available
    if need > free:
        raise H3Error(
            f"{canvas.width}x{canvas.height} with {canvas.num_frames} frames needs at least {need / 2**30:.1f} GiB "
            f"for its latents, and {free / 2**30:.1f} GiB are free: choose a smaller size or fewer frames"
        )


def _check_latents(
    request: RenderRequest, canvas: Canvas, source: media.Clip | PartialLatent | None, state: PartialLatent | None
) -> None:
    """What saved latents must have for this request."""
    if isinstance(source, PartialLatent) and not source.latent.fits(canvas):
        have = source.canvas
        raise H3Error(
            f"{request.source.name} is {have.width}x{have.height} with {have.num_frames} frames and the saved state "
            f"{canvas.width}x{canvas.height} with {canvas.num_frames}: give the clip that this state was made from"
        )
    masked = request.mask is not None or request.sound_mask is not None
    if masked and source is None and state.source is None:
        raise H3Error(f"a mask keeps parts of a clip, and {request.state.name} holds none: add --source FILE")


def _clip_ratio(width: int, height: int) -> tuple[int, int]:
    ratio_value((width, height))
    return width, height


def _read(medium: Media, max_frames: int | None = None) -> media.Clip:
    """A medium as a clip at 24 fps; a picture is a clip of one frame. Of a file at most ``max_frames`` are read."""
    if medium.path is None:
        frames, audio = read_memory(medium)
        return media.Clip(frames=frames, fps=float(FPS), audio=audio, notes=())
    kind = media.kind_of(medium.path)
    changes: list[str] = []
    if kind == "image":
        pixels = media.read_image(medium.path, changes)
        clip = media.Clip(frames=pixels[None], fps=float(FPS), audio=None, notes=tuple(changes))
    elif kind == "audio":
        seconds = None if max_frames is None else max_frames / FPS
        audio = media.read_audio(medium.path, max_seconds=seconds, notes=changes)
        clip = media.Clip(frames=None, fps=float(FPS), audio=audio, notes=tuple(changes))
    else:
        clip = media.read_clip(medium.path, max_frames=max_frames)
    return replace(clip, notes=tuple(f"{medium.name}: {note}" for note in clip.notes))


def _read_source(medium: Media, frames: int | None) -> media.Clip | PartialLatent:
    """The clip to edit: pixels and sound, or a finished latent, which spares it the way through pixels."""
    if medium.path is None or not str(medium.path).lower().endswith(".safetensors"):
        clip = _read(medium, None if frames is None else snap_frames(frames) + READ_AHEAD)
        if clip.frames is None:
            raise H3Error(f"{medium.name} is sound: the clip to edit must have a picture")
        return clip
    saved = load_latent(medium.path)
    if not saved.finished:
        raise H3Error(
            f"{medium.name} is a run that stopped part-way: continue it with --state, or give a finished clip"
        )
    return saved


def _read_picture(medium: Media, notes: list[str]) -> np.ndarray:
    clip = _read(medium)
    notes += clip.notes
    if clip.frames is not None and clip.audio is not None:
        notes.append(f"{medium.name}: its sound is left out, a first or last frame is a picture")
    if clip.frames is None:
        raise H3Error(f"{medium.name} is sound: a first or last frame must be a picture")
    if clip.frames.shape[0] != 1:
        raise H3Error(
            f"{medium.name} is a clip of {clip.frames.shape[0]} frames: a first or last frame is one picture; "
            f"use --guide {medium.name}@0 to hold a clip"
        )
    return clip.frames[0]


def _on_canvas(name: str, frames: np.ndarray, canvas: Canvas, how: str, notes: list[str]) -> np.ndarray:
    """uint8 [f, h, w, 3] -> [f, H, W, 3].

    ``how``: stretch; cover (resized until it covers, then cropped in the middle); crop (cropped to the ratio first, the
    recipe comfy's order).
    """
    height, width = frames.shape[1:3]
    if (width, height) == (canvas.width, canvas.height):
        return frames
    resized = f"{name} ({width}x{height}) was resized to {canvas.width}x{canvas.height}"
    if how == "stretch":
        change = (canvas.width / canvas.height) / (width / height)
        if abs(change - 1) > STRETCH_REPORTED:
            percent = (max(change, 1 / change) - 1) * 100
            notes.append(
                f"{name} ({width}x{height}) was stretched {percent:.1f} % "
                f"{'wider' if change > 1 else 'taller'} to {canvas.width}x{canvas.height}"
            )
        else:
            notes.append(resized)
        return np.stack([media.resize_stretch(frame, canvas.width, canvas.height) for frame in frames])
    scale = max(canvas.width / width, canvas.height / height)
    if width * height * scale**2 > COVER_LIMIT * canvas.width * canvas.height:
        raise H3Error(
            f"{name} ({width}x{height}) is too long and narrow for {canvas.width}x{canvas.height}: less than "
            f"1/{COVER_LIMIT} of it would be seen; crop it first"
        )
    resize = media.crop_then_resize if how == "crop" else media.resize_cover
    placed = [resize(frame, canvas.width, canvas.height) for frame in frames]
    left, top, right, bottom = placed[0][1]
    lost = 1 - (right - left) * (bottom - top) / (width * height)
    if lost > 0.001:
        notes.append(
            f"{name} ({width}x{height}) was cropped to its columns {left:.0f}-{right:.0f} and rows "
            f"{top:.0f}-{bottom:.0f} ({lost:.1%} lost) for {canvas.width}x{canvas.height}"
        )
    else:
        notes.append(resized)
    return np.stack([frame for frame, _ in placed])


def _place_guide(guide: GuideRequest, canvas: Canvas, cover: str, notes: list[str]) -> Placed:
    name = guide.media.name
    index = guide.frame_index(canvas.num_frames)
    limit = canvas.num_frames - index + READ_AHEAD
    clip = _read(guide.media, limit)
    notes += clip.notes
    frames, audio = clip.frames, clip.audio
    if audio is None and guide.media.path is not None and len(frames) > 1:
        notes.append(f"{name} has no sound: only its picture is held")
    if frames is not None:
        room, count = canvas.num_frames - index, frames.shape[0]
        more = "at least " if count == limit else ""
        kept = floor_frames(min(count, room))
        if kept < count:
            notes.append(
                f"{name}: {kept} of {more}{count} frames held from frame {index} "
                f"({kept / FPS:.3f} of {more}{count / FPS:.3f} s; {room} frames are left, clips are 17k + 5 or 1)"
            )
        frames = _on_canvas(name, frames[:kept], canvas, cover, notes)
    if audio is not None:
        room, count = canvas.audio_samples - audio_samples(index), audio.shape[1]
        more = "at least " if count >= audio_samples(limit) - 1 else ""
        if count > room:
            notes.append(
                f"{name}: sound cut from {more}{count / SAMPLE_RATE:.3f} to {room / SAMPLE_RATE:.3f} s "
                "at the clip's end"
            )
        audio = _pad_to_hop(audio[:, :room])
    return Placed(name, index, frames, audio, guide.strength)


def _guide_order(pair: tuple[Placed, GuideRequest]) -> tuple:
    placed, guide = pair
    return placed.frame_index, placed.frames is None, guide.media.sha256, placed.strength


def _pad_to_hop(audio: Tensor) -> Tensor:
    return torch.nn.functional.pad(audio, (0, -audio.shape[1] % AUDIO_HOP))


def _place_source(name: str, clip: media.Clip, canvas: Canvas, notes: list[str]) -> Placed:
    """The clip to edit, cut or padded (last frame, silence) to the canvas."""
    notes += clip.notes
    count, wanted = clip.frames.shape[0], canvas.num_frames
    frames = clip.frames[:wanted]
    if count > wanted:
        more = "at least " if count == wanted + READ_AHEAD else ""
        notes.append(
            f"{name}: cut from {more}{count} to {wanted} frames ({more}{count / FPS:.3f} to {wanted / FPS:.3f} s)"
        )
    elif count < wanted:
        notes.append(f"{name}: its last frame is repeated {wanted - count} times to fill {wanted} frames")
        frames = np.concatenate([frames, np.repeat(frames[-1:], wanted - count, axis=0)])
    frames = _on_canvas(name, frames, canvas, "cover", notes)
    if clip.audio is None:
        notes.append(f"{name} has no sound: silence stands in its place")
        audio = torch.zeros(AUDIO_CHANNELS, canvas.audio_t * AUDIO_HOP)
    else:
        heard = min(count, wanted)
        missing = audio_samples(heard) - clip.audio.shape[1]
        if missing >= AUDIO_HOP:
            notes.append(f"{name}: its sound ends {missing / SAMPLE_RATE:.3f} s before its picture: silence follows")
        audio, _ = media.fit_audio(clip.audio, canvas.audio_t * AUDIO_HOP)
    return Placed(name, 0, frames, audio)


def _masks(request: RenderRequest, canvas: Canvas, notes: list[str]) -> Masks | None:
    cells = (canvas.latent_t, canvas.latent_h, canvas.latent_w)
    video = audio = None
    if isinstance(request.mask, Media):
        video = pool_pixels(_mask_pixels(request.mask, canvas, notes), canvas.latent_t)
    elif request.mask is not None:
        video = torch.full(cells, float(request.mask == "all"))
    if isinstance(request.sound_mask, SoundMask):
        notes += request.sound_mask.past_end(canvas.seconds)
        audio = request.sound_mask.latents(canvas.audio_t)
    elif request.sound_mask is not None:
        audio = torch.full((AUDIO_CHANNELS, canvas.audio_t), float(request.sound_mask == "all"))
    for name, mask in (("mask", video), ("sound mask", audio)):
        if mask is not None:
            share = (mask > 0).float().mean().item()
            notes.append(f"{name}: {share:.1%} of the latent grid is made anew, the rest is kept")
    if audio is None and video is not None:
        notes.append("the sound has no mask: all of it is made anew (the sound mask 'keep' keeps it)")
    if video is None and audio is not None:
        notes.append("the picture has no mask: all of it is made anew (the mask 'keep' keeps it)")
    return Masks.make(video, audio)


def _mask_pixels(mask: Media, canvas: Canvas, notes: list[str]) -> Tensor:
    changes: list[str] = []
    if mask.path is not None:
        pixels = media.read_mask(mask.path, notes=changes)
        notes += [f"mask {mask.name}: {change}" for change in changes]
    else:
        pixels = torch.as_tensor(mask.frames).float()
    want = (canvas.height, canvas.width)
    if pixels.ndim != 3 or tuple(pixels.shape[1:]) != want or pixels.shape[0] not in (1, canvas.num_frames):
        shape = "x".join(str(n) for n in reversed(pixels.shape[1:]))
        raise H3Error(
            f"mask {mask.name} has {pixels.shape[0]} picture(s) of {shape}: this clip needs 1 or {canvas.num_frames} "
            f"of {canvas.width}x{canvas.height}; resize the mask or give --size"
        )
    return pixels


def with_size(request: RenderRequest, canvas: Canvas) -> RenderRequest:
    """The request with the canvas it got, so that repeating it needs no media to choose a size."""
    return replace(request, size=(canvas.width, canvas.height), ratio=None, megapixels=None, frames=canvas.num_frames)
