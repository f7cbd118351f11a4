"""What a sampler will be given, read from the widgets of the nodes before it, without running any of them.

graph {id: {class_type, inputs: {name: value or [id, output]}}} ─Upstream─▶ model(), latent(), condition(), number() ...

What only a run can tell (a picture that another node makes, a length that it counts) is assumed, and ``unknown`` says
what was assumed and why.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from . import host
from .latent import FPS, SUFFIX, canvas_of, saved_canvas
from .load import METHODS, PLACES, file_stamp, foreseen_part, foreseen_quantised, foreseen_with_lora, lora_stamp

TRAINED = {"ratio": "16:9"}
KINDS_OF = {"H3RuntimeLoadTextEncoder": ("text_encoder",), "H3RuntimeLoadVaes": ("video_vae", "audio_vae")}
PRIMITIVES = ("PrimitiveInt", "PrimitiveFloat", "PrimitiveBoolean", "PrimitiveString", "PrimitiveStringMultiline")
PLAIN_FRAMES = 124
DEEPEST = 200  # nodes one after another


class Step(NamedTuple):
    """A node before this one: its id, what it is, its inputs, and which of its outputs is connected."""

    id: str
    kind: str
    inputs: dict[str, Any]
    output: int


@dataclass(frozen=True)
class SeenLatent:
    """``renders``: the samplers whose clips it holds. ``state``: it may be the state of a run that was stopped."""

    canvas: Any
    renders: tuple[str, ...] = ()
    has_clip: bool = False
    masks: bool = False
    state: bool = False
    overlap: int = 22


@dataclass
class Upstream:
    """The graph before one node. ``wrong``: nodes whose widgets cannot be used, and why; ``unknown``: sentences."""

    graph: dict[str, dict]
    wrong: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    path: tuple[str, ...] = ()

    def assume(self, sentence: str) -> None:
        if sentence not in self.unknown:
            self.unknown.append(sentence)

    def step(self, inputs: dict, name: str) -> Step | None:
        """The node that ``name`` is connected to, or None."""
        given = inputs.get(name)
        if not is_link(given) or given[0] not in self.graph:
            return None
        return self.at(given[0], given[1])

    def at(self, node: str, output: int = 0) -> Step:
        """A node of the graph. H3Error with the sentence about it where its widgets cannot be used."""
        from ..h3_runtime import H3Error

        if node in self.wrong:
            raise H3Error(self.wrong[node])
        found = self.graph[node]
        return Step(node, found["class_type"], found["inputs"], output)

    def linked(self, inputs: dict, name: str) -> bool:
        return is_link(inputs.get(name))

    def value(self, inputs: dict, name: str, default):
        """A widget's value; of one that is connected to a plain number or text, that."""
        step = self.step(inputs, name)
        if step is None and not self.linked(inputs, name):
            return inputs.get(name, default)
        if step is not None and step.kind in PRIMITIVES and not is_link(step.inputs.get("value", default)):
            return step.inputs.get("value", default)
        if step is not None and step.kind == "H3RuntimeEmptyLatent" and step.output in (1, 2, 3):
            canvas = self.latent_of(step).canvas
            return (canvas.width, canvas.height, canvas.num_frames)[step.output - 1]
        shown = "nothing" if default in (0, "") else default
        self.assume(f"{name.replace('_', ' ')} comes out of another node when the graph runs: {shown} is assumed")
        return default

    @contextmanager
    def inside(self, step: Step):
        """Reading what is before ``step``. H3Error for a graph that goes round in a circle."""
        from ..h3_runtime import H3Error

        if step.id in self.path or len(self.path) > DEEPEST:
            raise H3Error("the graph goes round in a circle, or is too deep to be read")
        before, self.path = self.path, (*self.path, step.id)
        try:
            yield
        finally:
            self.path = before

    def trained(self):
        """The canvas that is assumed where none is known."""
        return canvas_of(**TRAINED)

    # --- models

    def model(self, inputs: dict, name: str = "model"):
        """The DiT with its LoRAs as a Part of its own, or None where nothing of ours is connected."""
        step = self.step(inputs, name)
        if step is None:
            return None
        with self.inside(step):
            return self.model_of(step)

    def model_of(self, step: Step):
        given = step.inputs
        if step.kind == "H3RuntimeLoadLora":
            below = self.model(given)
            name, strength = self.value(given, "lora", None), self.value(given, "strength", 1.0)
            if below is None or not isinstance(name, str):
                return None
            return foreseen_with_lora(below, name, lora_stamp(name), float(strength))
        if step.kind == "H3RuntimeQuantise":
            below = self.model(given)
            words = ("quantise", METHODS[0]), ("place", PLACES[0])
            method, place = (self.value(given, word, default) for word, default in words)
            return None if below is None else foreseen_quantised(below, method, place)
        if step.kind != "H3RuntimeLoadModel":
            return None
        chosen = self.value(given, "model", None)
        words = ("precision", "as stored"), ("layout", "detect"), ("quantise", "no"), ("place", "auto")
        words += (("keep_converted", False),)
        return self._part("dit", chosen, *(self.value(given, word, default) for word, default in words))

    def part(self, inputs: dict, name: str):
        """The encoder or VAE that is connected to ``name``; None for none, or another program's."""
        step = self.step(inputs, name)
        if step is None:
            return None
        return self._part_of(step.inputs, KINDS_OF.get(step.kind, ())[step.output : step.output + 1])

    def _part_of(self, given: dict, kinds):
        for kind in kinds:
            precision = given.get("precision", "as stored") if kind == "text_encoder" else "as stored"
            quantise = "no" if kind == "audio_vae" else given.get("quantise", "no")
            return self._part(kind, given.get(kind), precision, "detect", quantise)
        return None

    def _part(self, kind: str, name, *how):
        return None if not isinstance(name, str) else foreseen_part(kind, name, file_stamp(kind, name), *how)

    def loaded(self, kind: str):
        """The one part of this kind that the graph loads, connected to the node or not; None for none or several."""
        loaders = [found["inputs"] for found in self.graph.values() if kind in KINDS_OF.get(found["class_type"], ())]
        parts = {self._part_of(given, (kind,)) for given in loaders}
        return parts.pop() if len(parts) == 1 else None

    # --- latents

    def latent(self, inputs: dict, name: str = "latent", frames: int = PLAIN_FRAMES) -> SeenLatent:
        step = self.step(inputs, name)
        if step is None:
            self.assume(f"nothing is connected to {name}: the trained size is assumed")
            return SeenLatent(self.trained())
        return self.latent_of(step, frames)

    def latent_of(self, step: Step, frames: int = PLAIN_FRAMES) -> SeenLatent:
        with self.inside(step):
            read = LATENTS.get(step.kind)
            return self._plain_latent(step, frames) if read is None else read(self, step)

    def _empty(self, step: Step) -> SeenLatent:
        asked = (("seconds", 5.167), ("ratio", "16:9"), ("megapixels", 0.0), ("width", 0), ("height", 0), ("frames", 0))
        return SeenLatent(canvas_of(**{name: self.value(step.inputs, name, default) for name, default in asked}))

    def _encoded(self, step: Step) -> SeenLatent:
        if self.linked(step.inputs, "size_of"):
            return SeenLatent(self.latent(step.inputs, "size_of").canvas, has_clip=True)
        clip = self.step(step.inputs, "images")
        made = None if clip is None else self.sample_media(clip)
        if made is None:
            self.assume("the size of the encoded clip is known when the graph runs: the trained size is assumed")
            return SeenLatent(self.trained(), has_clip=True)
        width, height, frames = made
        return SeenLatent(canvas_of(width=width, height=height, frames=frames), has_clip=True)

    def sample_media(self, step: Step) -> tuple[int, int, int] | None:
        """(width, height, frames) of H3 Sample Media, None for any other node."""
        if step.kind != "H3RuntimeSampleMedia":
            return None
        asked = (("width", 128), ("height", 128), ("frames", 22))
        return tuple(self.value(step.inputs, name, default) for name, default in asked)

    def _masked(self, step: Step) -> SeenLatent:
        nothing_kept = [self.value(step.inputs, name, "") for name in ("picture", "sound")] == ["all", "all"]
        return replace(self.latent(step.inputs), masks=not nothing_kept, renders=())

    def _extended(self, step: Step) -> SeenLatent:
        from ..h3_runtime import continued_frames

        before = self.latent(step.inputs)
        seconds, overlap = self.value(step.inputs, "seconds", 4.25), self.value(step.inputs, "overlap", 0.917)
        more, shared = (max(1, round(length * FPS)) for length in (seconds, overlap))
        made = continued_frames(before.canvas.num_frames, more, shared)
        canvas = canvas_of(width=before.canvas.width, height=before.canvas.height, frames=made.total)
        return SeenLatent(canvas, has_clip=True, masks=True, overlap=made.shared)

    def _joined(self, step: Step) -> SeenLatent:
        one, two = self.latent(step.inputs, "first"), self.latent(step.inputs, "second")
        overlap = self.value(step.inputs, "overlap", -1)
        frames = one.canvas.num_frames + two.canvas.num_frames - (two.overlap if overlap < 0 else overlap)
        canvas = canvas_of(width=one.canvas.width, height=one.canvas.height, frames=frames)
        return SeenLatent(canvas, (*one.renders, *two.renders), has_clip=True)

    def _rendered(self, step: Step) -> SeenLatent:
        frames = self.value(step.inputs, "frames", PLAIN_FRAMES)
        below = self.latent(step.inputs, frames=frames)
        stopped = bool(self.value(step.inputs, "stop_step", 0))
        return SeenLatent(below.canvas, (step.id,), has_clip=True, state=stopped, overlap=below.overlap)

    def _saved(self, step: Step) -> SeenLatent:
        name = step.inputs.get("file")
        if not isinstance(name, str) or name not in host.saved_files(SUFFIX):
            self.assume("the saved latent is not there: the trained size is assumed")
            return SeenLatent(self.trained(), has_clip=True)
        canvas, finished = saved_canvas(name, host.stamp(host.saved_file(name)))
        return SeenLatent(canvas, has_clip=True, state=not finished)

    def _other_half(self, step: Step) -> SeenLatent:
        """A latent that stands in for the one before it: kept, taken apart, put together."""
        below = self.latent(step.inputs, "picture" if step.kind == "H3RuntimeJoinLatent" else "latent")
        return below if step.kind == "H3RuntimeSaveLatent" else replace(below, renders=())

    def _plain_latent(self, step: Step, frames: int) -> SeenLatent:
        """Another program's latent: an empty one of a width and height, or one that only a run makes."""
        width, height = (self.value(step.inputs, side, 0) for side in ("width", "height"))
        length = next((self.value(step.inputs, word, 0) for word in ("length", "frames") if word in step.inputs), 0)
        if not (_is_count(width) and _is_count(height)):
            below = next((name for name in ("samples", "latent") if self.linked(step.inputs, name)), None)
            if below is not None:
                seen = self.latent(step.inputs, below)
                return replace(seen, renders=(), masks=seen.masks or "mask" in step.inputs)
            self.assume("the latent is made by another program's node: the trained size is assumed")
            return SeenLatent(self.trained(), has_clip=True)
        sides = (max(32, round(side / 32) * 32) for side in (width, height))
        width, height = sides
        count = length if _is_count(length) and length > 1 else frames
        return SeenLatent(canvas_of(width=width, height=height, frames=count))


LATENTS = {
    "H3RuntimeEmptyLatent": Upstream._empty,
    "H3RuntimeEncodeClip": Upstream._encoded,
    "H3RuntimeNoiseMasks": Upstream._masked,
    "H3RuntimeExtendClip": Upstream._extended,
    "H3RuntimeJoinClips": Upstream._joined,
    "H3RuntimeSampler": Upstream._rendered,
    "H3RuntimeLoadLatent": Upstream._saved,
    "H3RuntimeSaveLatent": Upstream._other_half,
    "H3RuntimeSplitLatent": Upstream._other_half,
    "H3RuntimeJoinLatent": Upstream._other_half,
}


def is_link(value) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int


def _is_count(value) -> bool:
    return type(value) is int and 0 < value <= 1 << 16
