"""A render whose parts come one by one, as the nodes of a graph give them.

    Part ("dit", "video_vae", "audio_vae", "text_encoder")   chosen and checked by its header, loaded at its first use
    text condition + guides + references + latents + masks ─▶ RenderJob ─▶ run_job ─▶ RenderResult
    RenderResult + the VAEs that decode it ─with_parts─▶ its label and manifest

In a graph pixels are gone when sampling starts: ``PastMedia`` stands for them with a name and a hash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .accelerators import Accelerator, build
from .checkpoint.info import CheckpointInfo
from .checkpoint.load import open_dit
from .checkpoint.opening import find_partition, open_checkpoint, partition_serves, wrong_partition
from .checkpoint.parts import DiTPath, PartPaths
from .encodings import LatentCache, MediaOrigin
from .errors import H3Error
from .fidelity import Fidelity, compose, use
from .guides import place
from .job import Plan, RenderJob, TextCondition
from .lora import Lora
from .memory.placement import Placement
from .memory.plan import plan
from .memory.probe import Card, Host, probe_card, probe_cpu, probe_host
from .memory.rows import RenderSizes
from .memory.spent import Spent
from .memory.weights import ModelWeights, dit_of, parts_of, with_loras
from .model import RESIDENT, Loading, Models, check_device
from .pressure import sample_under_pressure
from .recovery import RecoveryFolder
from .references import Encoder
from .render import TILE_BATCH, RenderResult, condition_text, encode, find_run, label, run_fingerprint
from .request import Media, RenderRequest
from .sampler import SampleResult
from .text.conditions import MadeCondition
from .text.encoder import open_weights
from .text.shown import Shown
from .text.tokenizer import find_vocabulary

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
        self.size = 0  # bytes of its files
        self.planned_rows = 0  # the longest sequence that the plan has placed this DiT for
        self.planned_beside: frozenset = frozenset()  # the accelerators that it was placed beside
        self.root: Part = self  # the part without LoRAs, which shares the weights
        self.asked = models.loading  # how it was opened, before any plan placed it
        self.evictable = None  # a host's note of the root, kept as long as it

    @staticmethod
    def open(
        kind: str,
        path: str | Path,
        precision: str = "as stored",
        device: str | torch.device = "cpu",
        layout: str | None = None,
        vocabulary: str | Path | None = None,
        embedding_folders: Sequence[str | Path] = (),
        loading: Loading | None = None,
    ) -> Part:
        """Choose the file or folder at ``path``. CheckpointError when it is not a usable ``kind``; no weights are read.

        ``precision``: one of PRECISIONS (VAEs are float32 whatever it says). ``vocabulary``: folder of vocab.json and
        merges.txt, for a text encoder that has none beside it; ``embedding_folders``: where prompts find embeddings.
        ``loading``: how its weights are brought in.
        """
        assert kind in KINDS, kind
        if precision not in PRECISIONS:
            raise H3Error(f"precision {precision!r}: give one of {', '.join(PRECISIONS)}")
        path = Path(path)
        partition, tokenizer = "unknown", None
        if kind == "text_encoder":
            checkpoint = open_weights(path).checkpoint
            tokenizer = _vocabulary_for(path, vocabulary)
        else:
            checkpoint = open_checkpoint(path, kind, layout)
            if kind == "dit":
                partition = find_partition(checkpoint.source)[0]
        if loading is not None and (online := loading.online(kind)) is not None:
            online.linears(checkpoint)  # refuses what is quantised already
        dits = (DiTPath(path, partition),) if kind == "dit" else ()
        named = {other: path if kind == other else None for other in KINDS[1:]}
        parts = PartPaths(dits=dits, tokenizer=tokenizer, **named)
        models = Models(
            parts,
            PRECISIONS[precision],
            device,
            layout,
            keep=True,
            embedding_folders=tuple(embedding_folders),
            loading=loading,
        )
        part = Part(kind, models, path, partition)
        part.size = sum(file.stat().st_size for file in checkpoint.source.files)
        return part

    def with_lora(self, lora: Lora) -> Part:
        """The same DiT with one more LoRA; nothing is loaded or changed."""
        assert self.kind == "dit", self.kind
        part = Part(self.kind, self._models, self.path, self.partition, (*self.loras, lora))
        part.size, part.root, part.asked = self.size, self.root, self.asked
        return part

    def quantised(self, method: str, placement: Placement | None = None) -> Part:
        """The same DiT with its LoRAs, quantised by ``method`` while it loads: weights of its own.

        ``placement``: where its blocks live; None: as the plan says. H3Error for a file that is quantised already.
        """
        assert self.kind == "dit", self.kind
        models = self._models
        loading = replace(self.asked, quantise=f"dit={method}", loras=(), placement=placement)
        names = {dtype: name for name, dtype in PRECISIONS.items()}
        part = Part.open(self.kind, self.path, names[models.dtype], models.device, models.layout, loading=loading)
        for lora in self.loras:
            part = part.with_lora(lora)
        return part

    def place(self, device: str | torch.device) -> None:
        """Where the part computes, from its next load on. H3Error, before anything is read, where it cannot."""
        check_device(device)
        if torch.device(device) != self.device:
            self.release()
            self._models.device = device

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

    @property
    def in_host_memory(self) -> bool:
        """Whether the weights, once loaded, lie in the host's memory: on a CPU, or streamed from there."""
        placement = self._models.loading.placement
        return self.device.type == "cpu" or (placement is not None and placement.rung == "ram")

    def load(self, task: str = "t2va"):
        """The module (a text encoder: ``TextEncoder``), read when it is not there. ``task`` chooses nothing but checks
        that a DiT is of the partition it needs."""
        if self.kind != "dit":
            return getattr(self._models, self.kind)()
        self._carry_loras()
        return self._models.dit(task)

    def encoders(self) -> list[Encoder]:
        """Ways to encode with this video VAE; a way that memory is not enough for hands over to the next."""
        assert self.kind == "video_vae", self.kind
        return self._models.encoders()

    def _carry_loras(self) -> None:
        """Have the weights carry this part's LoRAs: with others on them they are read anew."""
        loading = self._models.loading
        if loading.loras != self.loras:
            self.release()
            self._models.loading = replace(loading, loras=self.loras)

    def check(self, job: RenderJob) -> None:
        """H3Error for a job that this DiT cannot run; only headers are read."""
        needed = "ref2va" if job.references else "fl2va"
        if not partition_serves(self.partition, needed):
            names = {"fl2va": "FL2VA", "ref2va": "Ref2VA"}
            what = "references need" if job.references else "a prompt without references needs"
            raise H3Error(
                f"{what} {names[needed]} weights, and {self.name} holds {names[self.partition]} weights: choose "
                "the other "
                "file in H3 Load Model"
            )
        width, needed = job.text.hidden.shape[1], self._models.text_width(job.task)
        if width != needed:
            raise H3Error(
                f"the prompt's rows are {width} wide and {self.name} reads {needed}: encode the prompt with the text "
                "encoder of this model"
            )

    def release(self) -> None:
        """Let the weights go; the next use reads them again."""
        self._models.release(*KINDS)

    def described(self) -> list[str]:
        """Sentences about what is loaded: the file's own notes, and what of each LoRA is applied."""
        said = [] if self.info is None else list(self.info.notes)
        if self.info is not None and self.info.approximate:
            said.append(self.info.approximate)
        return said

    def warnings(self, job: RenderJob) -> list[str]:
        """What of the LoRAs does not go together with the job's settings."""
        plan = self._models.lora_plan
        if plan is None:
            return []
        return plan.warnings(self.partition, job.num_forwards, job.video_shift, job.audio_shift)


def weights_of_parts(dit: Part, others: Iterable[Part] = ()) -> ModelWeights:
    """What this DiT, and the parts beside it where they are known (else the release's), take; headers are read."""
    models = dit.models
    how, path = models.loading, models.parts.dits[0].path
    opened = open_dit(path, models.dtype, models.layout, quantise=how.online("dit"))
    others = tuple(others)
    paths = {part.kind: part.path for part in others}
    online = {part.kind: part.models.loading.online(part.kind) for part in others}
    parts = PartPaths(dits=models.parts.dits, tokenizer=None, **{kind: paths.get(kind) for kind in KINDS[1:]})
    return parts_of(parts, with_loras(dit_of(opened), dit.loras), online)


def plan_sizes(
    dit: Part,
    sizes: RenderSizes,
    weights: ModelWeights,
    vram_gib: float = 0.0,
    ram_gib: float = 0.0,
    freed: tuple[int, int] = (0, 0),
    accelerators: Sequence[Accelerator] = (),
) -> Plan:
    """What a render of these sizes takes with this DiT of ``weights``, before any are read.

    ``vram_gib``, ``ram_gib``: plan for another machine; 0: this one, where ``freed`` bytes (card, host) that are taken
    now will be free by then.
    """
    host = Host.given(ram_gib) if ram_gib else probe_host().with_disk(dit.path)
    if not ram_gib:
        host = replace(host, available=min(host.total, host.available + freed[1]))
    host = replace(host, converted=dit.models.loading.converted).with_transforms(weights.dit.transforms)
    card = probe_card(dit.device) if dit.device.type == "cuda" else None
    if card is not None:
        card = replace(card, free=min(card.total, card.free + freed[0]))
    if vram_gib:
        card = Card.given(vram_gib, card)
    return plan(sizes, weights, card or probe_cpu(host), host, accelerators)


def settle_placement(dit: Part, job: RenderJob) -> list[str]:
    """On a card, where nobody said how to place the DiT: have the plan say it, before any weights are read. What is
    loaded stays while no longer sequence is asked for. H3Error with what would fit when the job does not, on a card or
    in the machine's memory."""
    models, root = dit.models, dit.root
    settled = models.loading.placement is not None and not root.planned_rows
    sizes = RenderSizes.of_job(job)
    if dit.device.type == "cpu":
        _refuse_beyond_memory(dit, sizes, job)
    if settled or dit.device.type != "cuda":
        return []
    rows, beside = sizes.layout().num_rows, frozenset(job.accelerators)
    if dit.loaded and rows <= root.planned_rows and beside <= root.planned_beside:
        return []
    dit.release()
    accelerators = build(job.accelerators)
    notes = models.follow(plan_sizes(dit, sizes, weights_of_parts(dit), accelerators=accelerators))
    root.planned_rows, root.planned_beside = rows, beside
    return notes


def _refuse_beyond_memory(dit: Part, sizes: RenderSizes, job: RenderJob) -> None:
    """H3Error where denoising takes more than this machine's free memory: the system would end the whole process."""
    freed = (0, dit.info.nbytes if dit.loaded else 0)
    made = plan_sizes(dit, sizes, weights_of_parts(dit), freed=freed, accelerators=build(job.accelerators))
    stage = made.stage("denoise")
    if stage.vram + stage.host > made.free_host:
        raise H3Error(made.refusal)


def _vocabulary_for(encoder: Path, otherwise: str | Path | None) -> Path | None:
    """The folder beside the encoder, else ``otherwise``. H3Error where neither has one."""
    try:
        return find_vocabulary(encoder)
    except H3Error:
        if otherwise is None:
            raise
        return find_vocabulary(folder=otherwise)


class GraphModels(Models):
    """The parts that a node was given, as one model: each stays where it is and is loaded when it is first needed.

    ``given``: kind -> anything with ``load()`` and ``info`` (a Part, or another program's VAE in our clothes).
    """

    def __init__(self, **given):
        encoder = given.get("text_encoder")
        paths = {kind: getattr(given.get(kind), "path", None) for kind in KINDS[1:]}
        own = None if encoder is None else encoder.models
        super().__init__(
            PartPaths(dits=(), tokenizer=None if own is None else own.parts.tokenizer, **paths),
            None if own is None else own.dtype,
            "cpu" if own is None else own.device,
            keep=True,
            embedding_folders=() if own is None else own.embedding_folders,
            caches=None if own is None else own.caches,
            loading=None if own is None else own.loading,
        )
        self._given = {kind: part for kind, part in given.items() if part is not None}

    def kept_latents(self, part: str) -> tuple[LatentCache, MediaOrigin | None]:
        """Those of the part that was given: it outlives a node. Nothing is kept for another program's VAE."""
        given = self._given.get(part)
        models = getattr(given, "models", None)
        if models is None:
            return self.caches.latents, None
        cache, origin = models.kept_latents(part)
        self.infos[part] = models.infos[part]
        return cache, origin

    def encoders(self) -> list[Encoder]:
        """Those of the video VAE that was given; another program's has one way, its own."""
        given = self._given.get("video_vae")
        if not hasattr(given, "encoders"):
            return [Encoder("by the VAE that was given", self.video_vae)]

        def noted(load: Callable):
            loaded = load()
            self.infos["video_vae"] = given.info
            return loaded

        return [way._replace(load=partial(noted, way.load)) for way in given.encoders()]

    def _load(self, key: str, part: str, load: Callable):
        given = self._given.get(part)
        if given is None:
            raise H3Error(f"a {part.replace('_', ' ')} is needed here and none is connected: add H3 Load VAEs")
        loaded = given.load()
        if given.info is not None:
            self.infos[part] = given.info
        return loaded


class _Shown(NamedTuple):
    """What ``condition_text`` asks of a placement."""

    shown: tuple[Shown, ...]
    condition: None = None


def encode_media(request: RenderRequest, models: Models, text: TextCondition | None = None) -> tuple:
    """(Placement, RenderJob) of the request's keyframes, guides, references and source; without ``text`` the job only
    carries their latents."""
    placement = place(request)
    if text is None:
        text = TextCondition(torch.zeros(1, 1), torch.ones(1, dtype=torch.int64))
    return placement, encode(request, placement, models, text)


def condition_shown(request: RenderRequest, shown: Sequence[Shown], models: Models) -> MadeCondition:
    """The prompt's rows after ``shown``, which another program prepared in its own way."""
    return condition_text(request, _Shown(tuple(shown)), models)


@dataclass(frozen=True)
class Watcher:
    """What a run tells while it goes: ``progress(done, total, seconds)`` per forward, ``poll()`` per block (may raise),
    ``watch(denoised)`` per forward (see ``sample``)."""

    progress: Callable[[int, int, float], None] | None = None
    poll: Callable[[], None] | None = None
    watch: Callable[[Callable[[], Tensor]], None] | None = None


@dataclass(frozen=True)
class Origin:
    """Where a job's conditions came from: the ``infos`` of the parts that made them, the prompt's ``condition`` (None:
    another program encoded it), names of what else is ``foreign``, and sentences."""

    infos: Mapping[str, CheckpointInfo] = field(default_factory=dict)
    condition: MadeCondition | None = None
    foreign: tuple[str, ...] = ()
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

    H3Error before any weights are read for a DiT of the wrong partition or text width.
    """
    spent = Spent(dit.device)
    with spent.stage("load"):
        dit.check(job)
        planned = settle_placement(dit, job)
        dit.load(job.task)
    models = dit.models
    run, found = find_run(recovery, request, job, models)
    with spent.stage("denoise"):
        sampled, placement, stepped = sample_under_pressure(
            partial(models.place_dit, job.task),
            models.loading.placement or RESIDENT,
            job,
            run,
            progress=watcher.progress,
            poll=watcher.poll,
            watch=watcher.watch,
        )
    notes = [*origin.notes, *planned, *dit.described(), *dit.warnings(job), *stepped, *sampled.notes]
    if warning := wrong_partition(dit.partition, job.task):
        notes.append(warning)
    notes += found
    return RenderResult(
        request=request,
        job=job,
        latent=sampled.latent,
        finished=sampled.finished,
        fidelity=_label(dit, job, sampled, origin),
        infos={**origin.infos, "dit": dit.info},
        notes=tuple(dict.fromkeys(notes)),
        spent=spent,
        step_seconds=sampled.step_seconds,
        stats={
            "rows": sampled.num_rows,
            "dit_calls": sampled.dit_calls,
            "placement": str(placement),
            **sampled.stats,
        },
        recovery=run,
        loras=None if models.lora_plan is None else models.lora_plan.describe(),
        device=str(dit.device),
        dtype=dit.models.cast_to,
        record=None if origin.condition is None else origin.condition.record,
    )


def _label(dit: Part, job: RenderJob, sampled: SampleResult, origin: Origin) -> Fidelity:
    """The label of ``render.label`` with the parts that made the conditions, and what another program made."""
    made = label(job, sampled, dit.models, origin.condition, origin.infos)
    if origin.condition is None:
        made = replace(made, parts=tuple(part for part in made.parts if not part.name.startswith("encoder/")))
    return add_foreign(made, [*(["the prompt"] if origin.condition is None else []), *origin.foreign])


def add_foreign(fidelity: Fidelity, names: Iterable[str]) -> Fidelity:
    """The label of a render for which another program encoded what ``names`` tells (nothing: the label as it is)."""
    names = list(names)
    if not names:
        return fidelity
    reason = f"encoded by another program's code: {', '.join(names)}"
    return replace(fidelity, parts=(*fidelity.parts, replace(use("condition/foreign"), reason=reason)))


def describe_latent(result: RenderResult) -> dict:
    """What a latent file says of the render it comes from, for ``save_latent``."""
    schedule = result.job.schedule
    return {
        "finished": result.finished,
        "stop": schedule.stop,
        "sigma_video": schedule.video[schedule.stop],
        "sigma_audio": schedule.audio[schedule.stop],
        "task": result.job.task,
        "partition": result.infos["dit"].partition,
        "label": result.fidelity.title,
        "run": run_fingerprint(result.job, result.infos["dit"], result.dtype),
    }


def encoder_of_record(made: MadeCondition, path: Path) -> CheckpointInfo:
    """The info of the encoder that made a saved condition, which is not at hand itself."""
    return CheckpointInfo(
        path=str(path),
        format="saved condition",
        part="text_encoder",
        partition="unknown",
        dtypes={},
        nbytes=path.stat().st_size,
        fingerprint=made.record.fingerprint,
        approximate=made.record.approximate,
    )


def weakest(labels: Iterable[Fidelity]) -> Fidelity:
    """The label of what was put together from several renders: all their parts, so the weakest of them."""
    labels = list(labels)
    parts = tuple(dict.fromkeys(part for label in labels for part in label.parts))
    beyond = tuple(dict.fromkeys(words for label in labels for words in label.beyond))
    return Fidelity(parts, beyond, next((label.compute for label in labels if label.compute), ""))


def with_parts(
    result: RenderResult, parts: Iterable[Part], tile_batch: int = 1, paths: Iterable[str] = ()
) -> RenderResult:
    """The result with the VAEs that decode it, ``tile_batch`` tiles at once, and other ``paths`` of how they do: they
    belong to its label and manifest."""
    infos, names = dict(result.infos), [*(part.name for part in result.fidelity.parts), *paths]
    reasons = {part.name: part.reason for part in result.fidelity.parts}
    for part in parts:
        info = part.info
        if info is None:
            continue
        infos[info.part] = info
        names += info.paths
        if info.approximate:
            reasons |= dict.fromkeys(info.paths, info.approximate)
    names += [TILE_BATCH] if tile_batch > 1 else []
    fidelity = compose(names, result.fidelity.beyond, result.fidelity.compute, reasons)
    request = replace(result.request, tile_batch=tile_batch)
    return replace(result, infos=infos, fidelity=fidelity, request=request)
