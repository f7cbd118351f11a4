"""How many rows a render has, from sizes alone: before anything is read, encoded or loaded.

    canvas, prompt, keyframes, guides, references, masks ─▶ RenderSizes
        ─▶ text rows (labels, vision blocks, prompt)    and the patches the vision tower sees
        ─▶ PackedLayout                                  the layout itself, not an estimate of it
        ─▶ StepCounts                                    modulation rows of a forward and of the whole render

Counts of modulation rows come from the step planner run on one row per distinct label: the same labels, without the
rows. A picture reference at short edge 2048 adds about 7,300 rows to the DiT and as many text rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from ..errors import H3Error
from ..geometry import (
    AUDIO_HOP,
    AUDIO_LATENT_RATE,
    FPS,
    PIXELS_PER_LATENT,
    PIXELS_PER_TOKEN,
    Canvas,
    audio_latents,
    floor_frames,
    latent_frames,
    pixel_frames,
    ratio_value,
)
from ..guides import Placed, Placement
from ..job import MASK_LEVELS, MODALITY_TEXT, MODALITY_VIDEO, Masks, RenderJob
from ..layout import ConditionShape, PackedLayout, Segment
from ..references import IMAGE_SHORT_EDGE, SEEN_EVERY, PlacedReference, clip_canvas
from ..request import RenderRequest
from ..schedule import AUDIO_SHIFT, DEFAULT_FORWARDS, VIDEO_SHIFT, Schedule, plan_schedule
from ..steps import plan_steps
from ..text.presentation import sample_clip
from ..text.vision import FRAMES_PER_PATCH, MERGE, PATCH, clip_size, comfy_size, picture_size

LABEL_ROWS = 7  # "<Picture 1>: " and "<12.5 seconds>" are 6 or 7 tokens
BLOCK_MARKS = 2  # vision_start and vision_end
BYTES_PER_TOKEN = 3  # of UTF-8 text: English has more, so the estimate is on the safe side
DEFAULT_PROMPT_ROWS = 512


class Vision(NamedTuple):
    """One thing before the prompt: its rows there, and the patches of each picture or frame pair of it."""

    rows: int
    patches: tuple[int, ...] = ()


@dataclass(frozen=True)
class GuideSize:
    """A guide on the canvas: ``frames`` held from ``frame_index`` on (0: none), ``sound`` latents per channel."""

    frame_index: int = 0
    frames: int = 1
    sound: int = 0
    strength: float = 1.0
    keyframe: bool = False


@dataclass(frozen=True)
class ReferenceSize:
    """A reference as the DiT and the text encoder see it."""

    shape: ConditionShape
    vision: Vision


class StepCounts(NamedTuple):
    """Modulation rows: the most that one forward reads (``pairs``, of ``timesteps``), and those of all ``forwards``."""

    pairs: int
    timesteps: int
    all_pairs: int
    all_timesteps: int
    before_loop: bool
    forwards: int


@dataclass(frozen=True)
class RenderSizes:
    """All sizes of a render that memory and time depend on.

    ``prompt_rows``: tokens of the prompt. ``text_rows``: all text rows where they are known already (an encoded
    prompt), then ``text_vision`` says whether some stand for pictures. ``video_levels``, ``sound_levels``: distinct
    mask values, none without a mask. ``has_source``: there is a clip to edit.
    """

    canvas: Canvas
    prompt_rows: int = DEFAULT_PROMPT_ROWS
    guides: tuple[GuideSize, ...] = ()
    references: tuple[ReferenceSize, ...] = ()
    video_levels: tuple[float, ...] = ()
    sound_levels: tuple[float, ...] = ()
    has_source: bool = False
    num_forwards: int = DEFAULT_FORWARDS
    start: int = 0
    stop: int | None = None
    denoise: float = 1.0
    shifts: tuple[float, float] = (VIDEO_SHIFT, AUDIO_SHIFT)
    text_rows: int | None = None
    text_vision: bool = False
    tile_batch: int = 1

    @staticmethod
    def of_request(request: RenderRequest, placement: Placement) -> RenderSizes:
        """The sizes of a request whose media are read and placed; nothing is encoded, nothing loaded."""
        condition = None if placement.condition is None else placement.condition.text
        source = placement.source is not None or (placement.state is not None and placement.state.source is not None)
        return RenderSizes(
            canvas=placement.canvas,
            prompt_rows=prompt_rows(request.prompt),
            guides=tuple(_placed_guide(guide) for guide in placement.guides),
            references=tuple(_placed_reference(reference, request.recipe) for reference in placement.references),
            **mask_levels(placement.masks),
            has_source=source,
            num_forwards=request.num_forwards,
            start=request.start,
            stop=request.stop,
            denoise=request.denoise,
            shifts=(request.video_shift, request.audio_shift),
            text_rows=None if condition is None else len(condition.tags),
            text_vision=condition is not None and bool((condition.tags == MODALITY_VIDEO).any()),
            tile_batch=request.tile_batch,
        )

    @staticmethod
    def of_job(job: RenderJob) -> RenderSizes:
        """The sizes of a job whose prompt and media are encoded."""
        guides = tuple(
            GuideSize(
                guide.frame_index,
                0 if guide.video is None else pixel_frames(guide.video_shape[0]),
                guide.audio_length,
                guide.strength,
                guide.keyframe,
            )
            for guide in job.guides
        )
        references = tuple(
            ReferenceSize(ConditionShape(r.video_shape, r.audio_length, kind=r.kind), Vision(0)) for r in job.references
        )
        return RenderSizes(
            canvas=job.canvas,
            guides=guides,
            references=references,
            **mask_levels(job.masks),
            has_source=job.source is not None,
            num_forwards=job.num_forwards,
            start=job.start,
            stop=job.stop,
            denoise=job.denoise,
            shifts=(job.video_shift, job.audio_shift),
            text_rows=len(job.text.tags),
            text_vision=bool((job.text.tags == MODALITY_VIDEO).any()),
        )

    @property
    def shown(self) -> tuple[Vision, ...]:
        """What stands before the prompt: keyframes first, then the references."""
        canvas = self.canvas
        keyframes = [picture_vision(canvas.width, canvas.height) for guide in self.guides if guide.keyframe]
        return (*keyframes, *(reference.vision for reference in self.references))

    @property
    def rows_of_text(self) -> int:
        """Rows of the text condition."""
        if self.text_rows is not None:
            return self.text_rows
        return max(1, self.prompt_rows + sum(vision.rows for vision in self.shown))

    @property
    def conditions(self) -> tuple[ConditionShape, ...]:
        """Guides, then references, as the layout takes them."""
        canvas = self.canvas
        guides = [
            ConditionShape(
                (latent_frames(guide.frames), canvas.latent_h, canvas.latent_w) if guide.frames else None,
                guide.sound,
                min(guide.frame_index, canvas.num_frames - 1),
                guide.strength,
            )
            for guide in self.guides
        ]
        return (*guides, *(reference.shape for reference in self.references))

    def layout(self) -> PackedLayout:
        """The packed sequence of this render."""
        canvas = self.canvas
        tags = torch.full((self.rows_of_text,), MODALITY_TEXT, dtype=torch.int64)
        return PackedLayout.build(
            tags, (canvas.latent_t, canvas.latent_h, canvas.latent_w), canvas.audio_t, self.conditions
        )

    @property
    def _schedule(self) -> tuple:
        return (self.num_forwards, self.denoise, self.start, self.stop, *self.shifts)

    @property
    def schedule(self) -> Schedule:
        """The sigmas that it walks."""
        return plan_schedule(*self._schedule)

    def step_counts(self) -> StepCounts:
        """Modulation rows of this render: they do not depend on the canvas."""
        one = [replace(c, video=c.video and (1, 2, 2), audio=min(c.audio, 1), frame_index=0) for c in self.conditions]
        layout = PackedLayout.build(torch.ones(1, dtype=torch.int64), (2, 2, 2), 1, one)
        held = [(segment.kind, segment.held) for segment in layout.conditions]
        vision = self.text_vision or any(vision.patches for vision in self.shown)
        schedule = self._schedule
        return _count_steps(tuple(dict.fromkeys(held)), vision, self.video_levels, self.sound_levels, schedule)

    def on(self, canvas: Canvas) -> RenderSizes:
        """The same request on another canvas: guides are cut to what is left of the clip."""
        guides = []
        for guide in self.guides:
            index = min(guide.frame_index, canvas.num_frames - 1)
            frames = floor_frames(min(guide.frames, canvas.num_frames - index)) if guide.frames else 0
            room = audio_latents(canvas.num_frames) - audio_latents(index)
            guides.append(replace(guide, frame_index=index, frames=frames, sound=min(guide.sound, max(0, room))))
        return replace(self, canvas=canvas, guides=tuple(g for g in guides if g.frames or g.sound))


@lru_cache(maxsize=64)
def _count_steps(
    held: tuple[tuple[str, float | None], ...],
    vision: bool,
    video_levels: tuple[float, ...],
    sound_levels: tuple[float, ...],
    schedule: tuple,
) -> StepCounts:
    """Plan the forwards over one row per distinct label: of each condition kind, each mask value, each kind of text."""
    tags = torch.tensor([MODALITY_TEXT, MODALITY_VIDEO][: 1 + vision])
    counts = [
        ("text", len(tags), None),
        *((kind, 1, at) for kind, at in held),
        ("audio", max(1, len(sound_levels)), None),
        ("video", max(1, len(video_levels)), None),
    ]
    segments, stop = [], 0
    for kind, count, at in counts:
        segments.append(Segment(kind, stop, stop + count, held=at))
        stop += count
    video = torch.tensor(video_levels)[:, None, None].expand(-1, 2, 2) if video_levels else None
    sound = torch.tensor(sound_levels)[None] if sound_levels else None
    masks = Masks(video, sound) if video_levels or sound_levels else None
    layout = PackedLayout(tuple(segments), torch.zeros(stop, 3, dtype=torch.float64), tags)
    steps = plan_steps(layout, plan_schedule(*schedule), masks)
    return StepCounts(
        pairs=max(len(step.pairs) for step in steps.forwards),
        timesteps=max(len(step.timesteps) for step in steps.forwards),
        all_pairs=len(steps.pairs),
        all_timesteps=len(steps.timesteps),
        before_loop=steps.tables_before_loop,
        forwards=len(steps.forwards),
    )


def mask_levels(masks: Masks | None) -> dict[str, tuple[float, ...]]:
    """The distinct values of both masks: ``video_levels`` and ``sound_levels`` of ``RenderSizes``."""
    tokens = (None, None) if masks is None else (masks.video_tokens, masks.audio_tokens)
    video, sound = (() if mask is None else tuple(torch.unique(mask).tolist()) for mask in tokens)
    return {"video_levels": video, "sound_levels": sound}


def gradient_levels(count: int) -> tuple[float, ...]:
    """``count`` mask values spread over 0 (keep) to 1 (regenerate), on the masks' own grid."""
    if not 2 <= count <= MASK_LEVELS + 1:
        raise H3Error(f"a mask of {count} levels: give 2 to {MASK_LEVELS + 1}")
    return tuple(sorted({round(index * MASK_LEVELS / (count - 1)) / MASK_LEVELS for index in range(count)}))


def prompt_rows(prompt: str) -> int:
    """Rows of a prompt before it is tokenised, on the safe side."""
    return max(1, -(-len(prompt.encode("utf-8", "replace")) // BYTES_PER_TOKEN))


# ---- what stands before the prompt


def picture_vision(width: int, height: int, recipe: str = "reference") -> Vision:
    """A picture of these pixels before the prompt: its label and its block."""
    high, wide = comfy_size(height, width) if recipe == "comfy" else picture_size(height, width)
    patches = (high // PATCH) * (wide // PATCH)
    return Vision(LABEL_ROWS + BLOCK_MARKS + patches // MERGE**2, (patches,))


def clip_vision(width: int, height: int, sampled: int, has_sound: bool, recipe: str = "reference") -> Vision:
    """A clip of ``sampled`` frames (two a second) before the prompt: its labels, and per pair a time and a block."""
    high, wide = comfy_size(height, width) if recipe == "comfy" else clip_size(sampled, height, width)
    patches = (high // PATCH) * (wide // PATCH)
    block, pairs = LABEL_ROWS + BLOCK_MARKS + patches // MERGE**2, -(-sampled // FRAMES_PER_PATCH)
    return Vision(LABEL_ROWS * (1 + has_sound) + pairs * block, (patches,) * pairs)


def reference_edges(width: int, height: int) -> tuple[int, int]:
    """Width and height of a picture reference: short edge 2048 (enlarged to it too), each edge rounded to 32."""
    ratio_value((width, height))
    scale = IMAGE_SHORT_EDGE / min(width, height)
    return tuple(max(1, round(edge * scale / PIXELS_PER_TOKEN)) * PIXELS_PER_TOKEN for edge in (width, height))


def picture_reference(width: int, height: int, within: Canvas | None = None) -> ReferenceSize:
    """A picture of ``width`` x ``height`` pixels as a reference; ``within`` a canvas: by the recipe ``comfy``, shrunk
    to its area and never enlarged."""
    if within is None:
        wide, high = reference_edges(width, height)
    else:
        scale = min(1.0, math.sqrt(within.width * within.height / (width * height)))
        wide, high = (max(1, round(edge * scale / PIXELS_PER_TOKEN)) * PIXELS_PER_TOKEN for edge in (width, height))
    cells = (1, high // PIXELS_PER_LATENT, wide // PIXELS_PER_LATENT)
    vision = picture_vision(wide, high, "reference" if within is None else "comfy")
    return ReferenceSize(ConditionShape(cells, kind="image"), vision)


def clip_reference(
    width: int,
    height: int,
    frames: int,
    canvas: Canvas,
    sound_seconds: float | None = None,
    recipe: str = "reference",
) -> ReferenceSize:
    """A clip of ``frames`` at 24 fps as a reference: on the trained canvas of its own ratio (by the recipe ``comfy``
    its own size where that is smaller), cut to the target."""
    wide, high = clip_canvas("the reference clip", width, height, recipe)
    shown = min(frames, canvas.num_frames)
    kept = floor_frames(shown)
    cells = (latent_frames(kept), high // PIXELS_PER_LATENT, wide // PIXELS_PER_LATENT)
    sound = 0 if sound_seconds is None else _sound_latents(sound_seconds, canvas)
    kind = "video_audio" if sound else "video"
    sampled = len(sample_clip(shown)[0]) if recipe == "reference" else -(-kept // SEEN_EVERY)
    vision = clip_vision(wide, high, sampled, bool(sound), recipe)
    return ReferenceSize(ConditionShape(cells, sound, kind=kind), vision)


def sound_reference(seconds: float, canvas: Canvas) -> ReferenceSize:
    """A sound as a reference, cut to the target; the text encoder sees only its label."""
    return ReferenceSize(ConditionShape(None, _sound_latents(seconds, canvas), kind="audio"), Vision(LABEL_ROWS))


def _sound_latents(seconds: float, canvas: Canvas) -> int:
    if not 0 < seconds < math.inf:
        raise H3Error(f"a reference sound of {seconds!r} seconds: give more than 0")
    return max(1, math.ceil(min(seconds, canvas.num_frames / FPS) * AUDIO_LATENT_RATE))


def _placed_guide(guide: Placed) -> GuideSize:
    frames = 0 if guide.frames is None else len(guide.frames)
    sound = 0 if guide.audio is None else -(-guide.audio.shape[1] // AUDIO_HOP)
    return GuideSize(guide.frame_index, frames, sound, guide.strength, guide.keyframe)


def _placed_reference(reference: PlacedReference, recipe: str) -> ReferenceSize:
    sound = 0 if reference.audio is None else -(-reference.audio.shape[1] // AUDIO_HOP)
    if reference.frames is None:
        return ReferenceSize(ConditionShape(None, sound, kind=reference.kind), Vision(LABEL_ROWS))
    frames, height, width = reference.frames.shape[:3]
    cells = (latent_frames(frames), height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT)
    shown = reference.shown.pixels
    if reference.kind == "image":
        vision = picture_vision(shown.shape[2], shown.shape[1], recipe)
    else:
        vision = clip_vision(shown.shape[2], shown.shape[1], len(shown), bool(sound), recipe)
    return ReferenceSize(ConditionShape(cells, sound, kind=reference.kind), vision)
