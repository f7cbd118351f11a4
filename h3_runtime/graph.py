"""A render whose parts come one by one, as the nodes of a graph give them.

    Part ("dit", "video_vae", "audio_vae", "text_encoder")   chosen and checked by its header, loaded at its first use
    text condition + guides + references + latents + masks ─▶ RenderJob ─▶ run_job ─▶ RenderResult
    RenderResult + the VAEs that decode it ─with_parts─▶ its label and manifest

In a graph pixels are gone when sampling starts: ``PastMedia`` stands for them with a name and a hash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from . import __version__
from .checkpoint.load import CheckpointInfo
from .checkpoint.opening import find_partition, open_checkpoint
from .checkpoint.parts import DiTPath, PartPaths
from .errors import H3Error
from .fidelity import Fidelity, compose
from .job import RenderJob
from .lora import Applied, Lora
from .lora import apply as apply_loras
from .lora import plan as plan_loras
from .recovery import RecoveryFolder
from .render import Models, RenderResult, label
from .request import Media, RenderRequest
from .sampler import SampleResult, sample
from .text.encoder import open_weights

KINDS = ("dit", "video_vae", "audio_vae", "text_encoder")
PRECISIONS = {"as stored": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class PastMedia(Media):
    """A picture, clip or sound that was used and is no longer at hand: ``name``, and ``digest`` of what it held."""

    digest: str = ""

    def __post_init__(self):
        assert self.name and self.digest and self.path is None, self

    @property
    def sha256(self) -> str:
        return self.digest


class Part:
    """One part of a model: checked when it is made, loaded when first used, let go by ``release``.

    Parts of one file that differ in their LoRAs share what is loaded: at any time the weights carry one set of them.
    """

    def __init__(self, kind: str, models: Models, path: Path, partition: str = "unknown", loras: tuple[Lora, ...] = ()):
        self.kind, self.path, self.partition, self.loras = kind, path, partition, loras
        self._models = models
        self._shared: dict[str, Applied | None] = {"applied": None}

    @staticmethod
    def open(
        kind: str,
        path: str | Path,
        precision: str = "as stored",
        device: str | torch.device = "cpu",
        layout: str | None = None,
        vocabulary: str | Path | None = None,
    ) -> Part:
        """Choose the file or folder at ``path``. CheckpointError when it is not a usable ``kind``; no weights are read.

        ``precision``: one of PRECISIONS (VAEs are float32 whatever it says). ``vocabulary``: folder of vocab.json and
        merges.txt, for a text encoder that does not lie beside them.
        """
        assert kind in KINDS, kind
        if precision not in PRECISIONS:
            raise H3Error(f"precision {precision!r}: give one of {', '.join(PRECISIONS)}")
        path = Path(path)
        partition = "unknown"
        if kind == "text_encoder":
            open_weights(path)
        else:
            checkpoint = open_checkpoint(path, kind, layout)
            if kind == "dit":
                partition = find_partition(checkpoint.source)[0]
        dits = (DiTPath(path, partition),) if kind == "dit" else ()
        named = {other: path if kind == other else None for other in KINDS[1:]}
        parts = PartPaths(dits=dits, tokenizer=None if vocabulary is None else Path(vocabulary), **named)
        return Part(kind, Models(parts, PRECISIONS[precision], device, layout, keep=True), path, partition)

    def with_lora(self, lora: Lora) -> Part:
        """The same DiT with one more LoRA; nothing is loaded or changed."""
        assert self.kind == "dit", self.kind
        part = Part(self.kind, self._models, self.path, self.partition, (*self.loras, lora))
        part._shared = self._shared
        return part

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def device(self) -> torch.device:
        return torch.device(self._models.device)

    @property
    def dtype(self) -> torch.dtype | None:
        return self._models.dtype

    @property
    def models(self) -> Models:
        return self._models

    @property
    def info(self) -> CheckpointInfo | None:
        """What was loaded; None before."""
        return self._models.infos.get(self.kind)

    @property
    def loaded(self) -> bool:
        return bool(self._models._loaded)

    def load(self, task: str = "t2va"):
        """The module (a text encoder: ``TextEncoder``), read when it is not there. ``task`` chooses nothing but checks
        that a DiT is of the partition it needs."""
        if self.kind != "dit":
            return getattr(self._models, self.kind)()
        self._models.parts.dit_for(task)
        applied = self._shared["applied"]
        on_it = () if applied is None else applied.plan.loras
        if self.loaded and on_it != self.loras:
            self.release()
        dit = self._models.dit(task)
        if self.loras and self._shared["applied"] is None:
            self._shared["applied"] = apply_loras(dit, plan_loras(dit, self.loras))
        return dit

    def release(self) -> None:
        """Let the weights go; the next use reads them again."""
        self._models.release(*KINDS)
        self._shared["applied"] = None

    def described(self) -> list[str]:
        """Sentences about what is loaded: the file's own notes, and what of each LoRA is applied."""
        said = [] if self.info is None else list(self.info.notes)
        if self.info is not None and self.info.approximate:
            said.append(self.info.approximate)
        applied = self._shared["applied"]
        if applied is not None:
            said += [applied.plan.summary(index) for index in range(len(applied.plan.loras))]
            said += applied.plan.notes
        return said

    def lora_marks(self) -> list[str]:
        """What of the LoRAs decides the output: hash and strength of each that is on the weights."""
        applied = self._shared["applied"]
        if applied is None:
            return []
        return [f"{f.fingerprint} {lora.strength!r}" for f, lora in zip(applied.plan.files, applied.plan.loras)]

    def warnings(self, job: RenderJob) -> list[str]:
        """What of the LoRAs does not go together with the job's settings."""
        applied = self._shared["applied"]
        if applied is None:
            return []
        return applied.plan.warnings(self.partition, job.num_forwards, job.video_shift, job.audio_shift)


@dataclass(frozen=True)
class Watcher:
    """What a run tells while it goes: ``progress(done, total, seconds)`` per forward, ``poll()`` per block (may raise),
    ``watch(denoised)`` per forward (see ``sample``)."""

    progress: Callable[[int, int, float], None] | None = None
    poll: Callable[[], None] | None = None
    watch: Callable[[Callable[[], Tensor]], None] | None = None


@dataclass(frozen=True)
class Origin:
    """Where a job's conditions came from: the ``infos`` of the parts that made them, ``foreign`` names of those that
    other programs' code made, the text ``encoder``'s entry in the label (empty: foreign), and sentences."""

    infos: Mapping[str, CheckpointInfo] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    encoder: str = "encoder/stored"
    notes: tuple[str, ...] = ()


def run_job(
    dit: Part,
    job: RenderJob,
    request: RenderRequest,
    origin: Origin = Origin(),
    watcher: Watcher = Watcher(),
    recovery: RecoveryFolder | None = None,
) -> RenderResult:
    """Load the DiT and run the forwards of ``job``; a run of exactly this job that ``recovery`` holds is taken up.

    H3Error before any weights are read for a DiT of the wrong partition.
    """
    began = time.perf_counter()
    module = dit.load(job.task)
    loaded = time.perf_counter()
    run = None
    if recovery is not None:
        made_by = [f"dit={dit.info.fingerprint}", *dit.lora_marks(), str(dit.dtype), __version__]
        run = recovery.run(job.fingerprint(*made_by), job.canvas, task=job.task, prompt=request.prompt, seed=job.seed)
    sampled = sample(module, job, (), watcher.progress, watcher.poll, run, watch=watcher.watch)
    done = time.perf_counter()
    notes = [*origin.notes, *dit.described(), *dit.warnings(job)]
    if sampled.resumed_after is not None:
        notes.append(f"taken up after forward {sampled.resumed_after} of {job.num_forwards}, saved by an earlier run")
    return RenderResult(
        request=request,
        job=job,
        latent=sampled.latent,
        finished=sampled.finished,
        fidelity=_label(dit, job, sampled, origin),
        infos={**origin.infos, "dit": dit.info},
        notes=tuple(dict.fromkeys(notes)),
        seconds={"load": loaded - began, "denoise": done - loaded},
        step_seconds=sampled.step_seconds,
        stats={"rows": sampled.num_rows, "dit_calls": sampled.dit_calls, **sampled.stats},
        recovery=run,
        device=str(dit.device),
        dtype=dit.models.cast_to,
    )


def _label(dit: Part, job: RenderJob, sampled: SampleResult, origin: Origin) -> Fidelity:
    """The label of ``render.label``, with the encoder that really made the prompt's rows, and what is not ours."""
    plain = label(job, sampled, dit.models)
    names = [part.name for part in plain.parts if not part.name.startswith("encoder/")]
    names += [origin.encoder] if origin.encoder else []
    reasons = {part.name: part.reason for part in plain.parts}
    if origin.foreign:
        names.append("condition/foreign")
        reasons[names[-1]] = f"not made by this runtime: {', '.join(origin.foreign)}"
    if dit.lora_marks():
        names.append("dit/lora")
    return compose(names, plain.beyond, plain.compute, reasons)


def with_parts(result: RenderResult, parts: Iterable[Part]) -> RenderResult:
    """The result with the VAEs that decode it: they belong to its label and manifest."""
    infos, names = dict(result.infos), [part.name for part in result.fidelity.parts]
    reasons = {part.name: part.reason for part in result.fidelity.parts}
    for part in parts:
        if part.info is None:
            continue
        infos[part.kind] = part.info
        if part.info.approximate:
            names.append(f"{part.kind.replace('_', '-')}/file-approximate")
            reasons[names[-1]] = part.info.approximate
    fidelity = compose(names, result.fidelity.beyond, result.fidelity.compute, reasons)
    return replace(result, infos=infos, fidelity=fidelity)
