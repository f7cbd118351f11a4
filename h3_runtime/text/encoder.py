"""The prompt to the rows that condition the DiT: Qwen3-VL, cut after layer L and without its final norm.

    text, pictures -> presentation -> ids, positions -> embeddings -> layer 0 .. L-1 -> hidden [rows, text_dim]
                                      patches -> vision tower --^ (and into the first layers: deepstack)

The module is transformers' own ``Qwen3VLModel``, built on the meta device with L layers and an identity in place of
the last norm, then given weights straight from the file: its ``last_hidden_state`` is the full model's
``hidden_states[L]`` bit for bit, and no later layer is ever loaded. Rotary positions
are computed here and handed over, because the module's own call for them changed between versions. Reading is split
in three so that layers can later arrive one by one: ``open_weights`` (which tensors, where), ``build_module`` (no
memory), ``fill`` (tensors into the module). Nothing here touches the network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..checkpoint.gguf_file import open_weights as open_source
from ..checkpoint.opening import Checkpoint
from ..checkpoint.pieces import Online
from ..checkpoint.reader import TensorSource, listed, refuse_unfilled
from ..checkpoint.text_layers import OWN_FILE, TextLayers, open_text, text_path  # noqa: F401  (the maker's name)
from ..checkpoint.text_layout import EMBEDDING, Layout, count_layers, recognise_text
from ..errors import CheckpointError, H3Error, MissingDependency, NonFiniteError
from ..job import MODALITY_TEXT, TextCondition
from ..memory.placement import Placement
from ..memory.streaming import run_in_order
from .config import CONDITION_LAYER, TextEncoderConfig, pick_layers
from .placed import PlacedWeights, chunk_layers
from .presentation import (
    Clip,
    EmbeddingPiece,
    Picture,
    PresentedPrompt,
    Sound,
    TextPiece,
    lint_prompt,
    present,
    tokenize,
)
from .tokenizer import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START, Tokenizer
from .tower import Look, Seen, look_at, place
from .vision import VisionInput, preprocess_picture

OLDEST_TRANSFORMERS = (4, 57, 1)
CONFIG_KEY = "h3_runtime.config"
ROTARY_BUFFERS = ("inv_freq", "original_inv_freq")
VISION_ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class EncoderWeights:
    """What a text encoder file or folder holds, whatever its layout and number types; ``checkpoint`` knows each tensor
    by the module's name."""

    checkpoint: Checkpoint
    layout: Layout
    config: TextEncoderConfig

    @property
    def source(self) -> TensorSource:
        return self.checkpoint.source


def import_qwen():
    """(``Qwen3VLModel``, version) of the installed transformers; ``MissingDependency`` when it cannot serve."""
    cure = "install it with: pip install 'transformers>=4.57.1'"
    try:
        import transformers
    except ImportError as error:
        raise MissingDependency(
            f"the text encoder needs the 'transformers' package, which cannot be imported ({error}); {cure}"
        ) from error
    version = tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:3])
    if version < OLDEST_TRANSFORMERS:
        raise MissingDependency(
            f"transformers {transformers.__version__} has no usable Qwen3-VL; 4.57.1 or newer is needed; {cure}"
        )
    try:
        from transformers import Qwen3VLConfig, Qwen3VLModel  # noqa: F401
    except Exception as error:  # a torchaudio of another torch fails here with OSError or RuntimeError
        raise MissingDependency(
            f"transformers {transformers.__version__} cannot load its Qwen3-VL classes ({error}); a torchaudio or "
            "torchvision made for another torch is the usual cause: install the one that fits, or uninstall it"
        ) from error
    return Qwen3VLModel, version


def open_weights(path: str | Path, layers: int | None = None) -> EncoderWeights:
    """Recognise a text encoder without reading any weights.

    ``path``: a safetensors file (ours, or ComfyUI's), a GGUF file, or a folder with ``text_encoder.safetensors`` or
    with config.json and official shards. ``layers`` overrides where the condition is read (default: the file's own
    config, else 50).
    """
    source = open_source(text_path(path))
    refuse_unfilled(source.files)
    layout, known = recognise_text(source)
    config = _config_in(source, layout, layers)
    if config is not None:
        return EncoderWeights(open_text(path, config.layers)[0], layout, config)
    available = count_layers(known)
    checkpoint, _ = open_text(path, min(available, layers or CONDITION_LAYER))
    _refuse_other_encoders(checkpoint)
    return EncoderWeights(checkpoint, layout, TextEncoderConfig(layers=pick_layers(available, layers)))


def build_module(config: TextEncoderConfig) -> nn.Module:
    """transformers' ``Qwen3VLModel`` with ``config.layers`` layers, no last norm, weights on the meta device.

    The rotary frequencies are no weights and stand in no file: they are computed here and stay float32.
    """
    qwen, version = import_qwen()
    with torch.device("meta"):
        module = qwen(config.to_transformers(version))
    module.language_model.norm = nn.Identity()
    _set_rotary(module.language_model.rotary_emb, config.head_dim, config.rope_theta)
    _set_rotary(module.visual.rotary_pos_emb, config.vision_hidden // config.vision_heads // 2, VISION_ROPE_THETA)
    lost = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if lost:
        raise MissingDependency(
            f"transformers {'.'.join(map(str, version))} keeps tables in Qwen3-VL that this version does not know "
            f"({listed(lost)}); install the transformers release named in requirements.txt"
        )
    chunk_layers(module)
    return module.requires_grad_(False).eval()


def check_weights(module: nn.Module, weights: EncoderWeights) -> None:
    """Every tensor the module has must be stored in its shape, and no other; else a ``CheckpointError`` naming them."""
    expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    found, stored = weights.checkpoint.shapes, weights.layout.stored_name
    extra = [problem.removeprefix("extra ") for problem in weights.checkpoint.problems if problem.startswith("extra ")]
    others = [problem for problem in weights.checkpoint.problems if not problem.startswith("extra ")]
    missing = sorted(stored(name) for name in expected.keys() - found.keys())
    recipes = weights.checkpoint.recipes
    extra = sorted({*extra, *(s for name in found.keys() - expected.keys() for s in recipes[name].sources)})
    misshapen = [
        f"{stored(name)} is {list(found[name])}, needed {list(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    faults = []
    if missing:
        faults.append(f"{len(missing)} missing: {listed(missing)}")
    if extra:
        faults.append(f"{len(extra)} not known: {listed(extra)}")
    if misshapen:
        faults.append(f"{len(misshapen)} of another shape: {listed(misshapen)}")
    if others:
        faults.append(f"{len(others)} not usable: {listed(others)}")
    if faults:
        raise CheckpointError(
            f"{weights.source.path} is no whole text encoder of {weights.config.layers} layers ({weights.layout.name} "
            f"layout); tensors {'; '.join(faults)}; download or make the file again"
        )


class TextEncoder:
    """A loaded encoder with its tokenizer. ``load`` makes one, ``encode`` is what it is for.

    ``files`` are the weight files (for a fingerprint), ``notes`` what was odd about them, ``source`` its name in words,
    ``info`` what a manifest says of them, ``module`` transformers' model (streamed layers in it have no memory).
    """

    def __init__(self, placed: PlacedWeights, tokenizer: Tokenizer, weights: EncoderWeights):
        self.placed = placed
        self.module = placed.module
        self.info = placed.text.info
        self.tokenizer = tokenizer
        self.config = weights.config
        self.files = weights.source.files
        self.notes = weights.source.notes
        self.source = f"{weights.source.path.name}, state after layer {weights.config.layers}"

    @classmethod
    def load(
        cls,
        path: str | Path,
        tokenizer_dir: str | Path | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        layers: int | None = None,
        placement: Placement | None = None,
        quantise: str | Online | None = None,
    ) -> TextEncoder:
        """Read an encoder (see ``open_weights`` for what ``path`` may be) and find its vocabulary.

        dtype: of plain weights and of the states returned; None keeps the file's (bf16 in the release, and beside
        quantised layers, which keep their stored types). placement: where the layers are while they are not needed
        (default: resident); it never changes a state. quantise: the linears of its layers, while they are read.
        tokenizer_dir: folder with vocab.json and merges.txt, when they do not lie where ``Tokenizer.find`` looks.
        Raises ``CheckpointError`` for files that do not fit, ``MissingDependency`` for transformers that cannot.
        """
        if not Path(path).exists():
            raise CheckpointError(f"the text encoder {path} does not exist; give a safetensors file or its folder")
        weights = open_weights(path, layers)
        tokenizer = Tokenizer.find(path, folder=tokenizer_dir)
        _check_tokenizer(tokenizer, weights.config)
        module = build_module(weights.config)
        check_weights(module, weights)
        text = TextLayers(path, weights.config.layers, dtype, quantise)
        return cls(PlacedWeights(module, text, placement or Placement(), torch.device(device)), tokenizer, weights)

    @property
    def text_dim(self) -> int:
        """Width of a condition row; must equal the DiT's ``text_dim``."""
        return self.config.hidden

    @property
    def dtype(self) -> torch.dtype:
        """Of the states."""
        return self.placed.dtype

    def encode(self, prompt: str, pictures: Sequence = ()) -> TextCondition:
        """``prompt`` as it stands, after one labelled block per picture (uint8 [H, W, 3]), in their order.

        The notes give the row count and whatever in the prompt will not act as written; nothing is cut.
        """
        inputs = [preprocess_picture(picture) for picture in pictures]
        return self.encode_items(prompt, [Picture(seen.grid[1:]) for seen in inputs], inputs)

    def encode_items(
        self,
        prompt: str,
        items: Sequence[Picture | Sound | Clip],
        inputs: Sequence[VisionInput],
        pieces: Sequence[TextPiece | EmbeddingPiece] | None = None,
    ) -> TextCondition:
        """``prompt`` after labelled ``items``; ``inputs`` are the pixels of the pictures and clips among them.

        ``pieces``: the prompt taken apart, where it names prompt embeddings (text/embeddings.py). Returns hidden
        [rows, text_dim] on the CPU in the encoder's dtype and one tag per row.
        """
        if not isinstance(prompt, str):
            raise H3Error(f"the prompt is {type(prompt).__name__}; one text is needed: a render has one prompt")
        seen = [item for item in items if not isinstance(item, Sound)]
        assert [_pads(item) for item in seen] == [value.grid for value in inputs], "items and pixels differ"
        presented = tokenize(present(prompt if pieces is None else pieces, items), self.tokenizer)
        hidden = self._states(presented, inputs)
        check_states(hidden, presented.ids, self.source)
        return TextCondition(hidden, presented.tags, _notes(prompt, presented, pieces is not None), self.source)

    @torch.no_grad()
    def _states(self, presented: PresentedPrompt, inputs: Sequence[VisionInput]) -> Tensor:
        ids, config = presented.ids, self.config
        hidden = self.placed.words(ids)  # [L, text_dim]
        for first, rows in presented.inserted:
            hidden[first : first + len(rows)] = rows.to(hidden)
        looks = place(inputs, (ids == config.image_token) | (ids == config.video_token))
        return run(self.placed, hidden, presented.positions, looks).cpu()


def run(placed: PlacedWeights, hidden: Tensor, positions: Tensor, looks: Sequence[Look]) -> Tensor:
    """hidden [L, D], the words' embeddings, to the state after the last layer, in place.

    positions [3, L]: time, height, width of each row. ``looks``: the pictures, whose rows are overwritten.
    """
    seen = Seen()
    if looks:
        with placed.tower() as tower:
            seen = look_at(tower, looks, hidden)
            del tower
    rotary = placed.module.language_model.rotary_emb(hidden[None], positions[:, None].to(hidden.device))
    with placed.layers() as layers:
        for index, layer in enumerate(run_in_order(layers)):
            layer(hidden[None], rotary)
            seen.add_(hidden, index)
    return hidden


def check_states(hidden: Tensor, ids: Tensor, source: str) -> None:
    """Refuse states no prompt could have made: a bad file must not end as a render that ignores its prompt.

    hidden [L, D], ids [L]. NaN or infinity: ``NonFiniteError``. All values alike, or rows alike for unlike tokens:
    ``CheckpointError``.
    """
    values = hidden.float()
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).any(dim=1).sum())
        raise NonFiniteError(
            f"the text encoder ({source}) gave NaN or infinity in {bad} of {len(values)} rows; its file is damaged or "
            "overflows in this number type: download it again or load it as bf16 or fp32"
        )
    scale = values.abs().max()
    if float(values.max()) == float(values.min()):
        raise CheckpointError(
            f"the text encoder ({source}) gave the constant {values.max():g} for every prompt value, so the prompt "
            "would have no effect; its file is damaged: download it again"
        )
    if len(set(ids.tolist())) > 1 and bool((values - values[:1]).abs().max() <= 1e-6 * scale):
        raise CheckpointError(
            f"the text encoder ({source}) gave the same row for all {len(values)} tokens, so the prompt would have no "
            "effect; its file is damaged: download it again"
        )


def _notes(prompt: str, presented: PresentedPrompt, embeddings_read: bool) -> tuple[str, ...]:
    rows = len(presented.tags)
    text = int((presented.tags == MODALITY_TEXT).sum())
    notes = [f"rows of the prompt: {rows} ({text} of text, {rows - text} of pictures); nothing was cut"]
    if presented.is_empty:
        notes.append("the prompt is empty: it was encoded as the single pad token, so the clip follows no text")
    elif not prompt.strip():
        notes.append("the prompt has no words: the clip follows no text")
    if not embeddings_read and re.search(r"(^|\s)embedding:\S", prompt):
        notes.append(
            "'embedding:' in the prompt was encoded as plain words: name the folder of embeddings (--embeddings DIR)"
        )
    for word in prompt.split():
        before, _, name = word.partition("embedding:")
        if before and name.strip(":.,()[]"):
            notes.append(
                f"{word!r} was encoded as plain words: an embedding's name follows a space or begins a line, and "
                "weights of words are not read"
            )
    return tuple(notes + lint_prompt(prompt))


def _pads(item: Picture | Clip) -> tuple[int, int, int]:
    return (len(item.timestamps) if isinstance(item, Clip) else 1, *item.grid)


def _config_in(source: TensorSource, layout: Layout, layers: int | None) -> TextEncoderConfig | None:
    """The config that came with the weights; None for a file that carries none, which must be the released encoder."""
    if CONFIG_KEY in source.metadata:
        config = TextEncoderConfig.from_dict(_parsed(source.metadata[CONFIG_KEY], f"{source.path}: {CONFIG_KEY}"))
        if layers is None:
            return config
        return TextEncoderConfig.from_dict({**config.to_dict(), "layers": pick_layers(config.layers, layers)})
    folder = source.path if source.path.is_dir() else source.path.parent
    if layout.name not in ("official", "transformers"):
        return None
    written = folder / "config.json"
    if not written.is_file():
        raise CheckpointError(f"{folder} has no config.json beside the weights; download the whole folder")
    return TextEncoderConfig.from_huggingface(_parsed(written.read_bytes(), str(written)), layers)


def _refuse_other_encoders(checkpoint: Checkpoint) -> None:
    """A file without a config must be the released encoder."""
    published = TextEncoderConfig()
    shape = checkpoint.shapes.get(EMBEDDING)
    if shape not in (None, (published.vocab, published.hidden)):
        raise CheckpointError(
            f"{checkpoint.source.path} has word embeddings of {list(shape)} and carries no config; "
            f"H3's encoder is Qwen3-VL-32B with [{published.vocab}, {published.hidden}]"
        )


def _parsed(text: str | bytes, where: str) -> dict:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{where} is no valid JSON ({error}); download the file again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} is no JSON table of names and values; download the file again")
    return values


def _set_rotary(rotary: nn.Module, channels: int, theta: float) -> None:
    frequencies = 1.0 / (theta ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels))
    for name in ROTARY_BUFFERS:
        if hasattr(rotary, name):
            setattr(rotary, name, frequencies.clone())


def _check_tokenizer(tokenizer: Tokenizer, config: TextEncoderConfig) -> None:
    if tokenizer.size > config.vocab:
        raise H3Error(
            f"the vocabulary in {tokenizer.source} has {tokenizer.size} tokens and the text encoder knows "
            f"{config.vocab}; use the vocabulary that came with this encoder"
        )
    for name, needed in (
        (IMAGE_PAD, config.image_token),
        (VIDEO_PAD, config.video_token),
        (VISION_START, config.vision_start_token),
        (VISION_END, config.vision_end_token),
    ):
        if tokenizer.token_id(name) != needed:
            raise H3Error(
                f"the vocabulary in {tokenizer.source} puts {name} on {tokenizer.token_id(name)}, the text encoder on "
                f"{needed}; use the vocabulary that came with this encoder"
            )
