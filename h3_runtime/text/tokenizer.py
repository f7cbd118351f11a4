"""Text to token ids: Qwen2's byte-level BPE with the seven tokens that H3 adds.

    text -> NFC -> split by Qwen's expression -> bytes as letters -> merges -> ids
                   ^ special tokens are cut out first and never merged

    0 ................. V-1 | V ........... V+25 | V+26 ....... V+32
    vocab.json               Qwen's own 26        H3's seven: <d> </d> <|cutoff|> ...

The published vocabulary has V = 151643, which puts ``<|endoftext|>`` on 151643 and ``<d>`` on 151669. H3's seven have
no ids of their own in any file: the ids follow from the order of the list, so the order is part of the format. Files
only, no network: ``vocab.json`` and ``merges.txt`` lie beside the encoder, in an official folder or in any ComfyUI
(``comfy/text_encoders/qwen25_tokenizer``).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from ..errors import CheckpointError, H3Error, MissingDependency

PAD_TOKEN = "<|endoftext|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

# In id order. Qwen marks the last group as ordinary added words; they are cut out of the text all the same.
QWEN_SPECIAL_TOKENS = (
    PAD_TOKEN,
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    VISION_START,
    VISION_END,
    "<|vision_pad|>",
    IMAGE_PAD,
    VIDEO_PAD,
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
H3_TOKENS = (
    "<d>",
    "</d>",
    "<|cutoff|>",
    "<|lyrics_start|>",
    "<|lyrics_end|>",
    "<|caption_start|>",
    "<|caption_end|>",
)
PUBLISHED_PAD_ID = 151643

COMFY_VOCABULARY = Path("comfy") / "text_encoders" / "qwen25_tokenizer"
VOCABULARY_FILES = ("vocab.json", "merges.txt")


def import_tokenizers():
    """The ``tokenizers`` package, or a ``MissingDependency`` that says how to get it."""
    try:
        import tokenizers
    except ImportError as error:
        raise MissingDependency(
            f"the prompt needs the 'tokenizers' package, which cannot be imported ({error}); "
            "install it with: pip install tokenizers"
        ) from error
    return tokenizers


def pipeline_around(model):
    """A ``tokenizers.Tokenizer`` over a BPE ``model`` with Qwen's normaliser and splitter, before any special token."""
    tokenizers = import_tokenizers()
    pipeline = tokenizers.Tokenizer(model)
    pipeline.normalizer = tokenizers.normalizers.NFC()
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN_SPLIT), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return pipeline


class Tokenizer:
    """Text to ids. Made by ``from_files`` or ``find``; ``source`` is the folder of its files, for messages."""

    def __init__(self, pipeline, source: str):
        self._pipeline = pipeline
        self.source = source

    @classmethod
    def from_files(cls, vocab: str | Path, merges: str | Path) -> Tokenizer:
        """Read ``vocab.json`` (word to id) and ``merges.txt`` and append the special tokens.

        Raises ``CheckpointError`` for a file that is missing, damaged or does not fit the other.
        """
        tokenizers = import_tokenizers()
        vocab, merges = Path(vocab), Path(merges)
        words = _read_words(vocab)
        pipeline = pipeline_around(tokenizers.models.BPE(words, _read_merges(merges, words)))
        pipeline.add_special_tokens(
            [tokenizers.AddedToken(token, normalized=False, special=True) for token in QWEN_SPECIAL_TOKENS + H3_TOKENS]
        )
        _check_order(pipeline, vocab, len(words))
        return cls(pipeline, str(vocab.parent))

    @classmethod
    def find(
        cls, encoder_path: str | Path | None = None, folder: str | Path | None = None, comfy: str | Path | None = None
    ) -> Tokenizer:
        """The vocabulary that belongs to the encoder at ``encoder_path`` (a file or a folder).

        Looks in ``folder`` when given, and nowhere else then. Otherwise: beside the encoder, in the ``tokenizer`` or
        ``processor`` folder next to it, in the ComfyUI checkout ``comfy`` (or the one that the variable COMFYUI_PATH
        names), and in the ComfyUI that the encoder's folder lies in. Raises ``H3Error`` with the places it looked in.
        """
        place = find_vocabulary(encoder_path, folder, comfy)
        return cls.from_files(*(place / name for name in VOCABULARY_FILES))

    @property
    def size(self) -> int:
        """Number of ids, special tokens included: the embedding needs at least this many rows."""
        return self._pipeline.get_vocab_size(with_added_tokens=True)

    def token_id(self, name: str) -> int:
        """The id of one token by its written form, e.g. ``<|image_pad|>``."""
        found = self._pipeline.token_to_id(name)
        if found is None:
            raise H3Error(f"'{name}' is no token of the vocabulary in {self.source}; check which vocabulary was found")
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of one piece of text; nothing is added and nothing is cut, so the empty text gives no ids."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise H3Error(
                f"the text holds half a character (U+{ord(text[error.start]):04X} at position {error.start}), which is "
                "no valid Unicode; remove or retype it"
            ) from error
        return self._pipeline.encode(text, add_special_tokens=False).ids


def find_vocabulary(
    encoder_path: str | Path | None = None, folder: str | Path | None = None, comfy: str | Path | None = None
) -> Path:
    """The folder that ``Tokenizer.find`` reads. ``H3Error`` with the places that were looked in."""
    places = _places_to_look(encoder_path, folder, comfy)
    for place in places:
        if all((place / name).is_file() for name in VOCABULARY_FILES):
            return place
    looked = ", ".join(str(place) for place in places) or "no folder at all"
    subject = f"for the text encoder {encoder_path}" if encoder_path else "for the text encoder"
    raise H3Error(
        f"no vocabulary (vocab.json with merges.txt) was found {subject}; looked in: {looked}; put the two files "
        "beside the encoder or name a ComfyUI folder, which has them in comfy/text_encoders/qwen25_tokenizer"
    )


def vocabulary_sha256(folder: str | Path) -> str:
    """Of vocab.json and merges.txt in ``folder``: which words an encoder's ids stand for."""
    digest = hashlib.sha256()
    for name in VOCABULARY_FILES:
        digest.update((Path(folder) / name).read_bytes())
    return digest.hexdigest()


def _read_words(vocab: Path) -> dict[str, int]:
    if not vocab.is_file():
        raise CheckpointError(f"{vocab} is missing; a vocabulary is vocab.json and merges.txt of one source")
    try:
        words = json.loads(vocab.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{vocab} is no readable JSON ({error}); copy the file again") from error
    if not isinstance(words, dict) or not words or not all(type(value) is int for value in words.values()):
        raise CheckpointError(f"{vocab} is no vocabulary: a JSON table of word to id is needed; copy the file again")
    # The ids of the special tokens are counted on from the words, so a hole would shift H3's seven.
    if sorted(words.values()) != list(range(len(words))):
        raise CheckpointError(
            f"{vocab} does not number its {len(words)} words 0 to {len(words) - 1} without gap or repeat; "
            "take vocab.json from the official release or from ComfyUI"
        )
    return words


def _read_merges(merges: Path, words: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs in order of rank. Checked here, because the library aborts on a pair that is not in the vocabulary."""
    try:
        lines = merges.read_text(encoding="utf-8").split("\n")
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{merges} is missing or unreadable ({error}); a vocabulary is vocab.json and merges.txt of one source"
        ) from error
    pairs = []
    for number, line in enumerate(lines, start=1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = tuple(line.split(" "))
        if len(pair) != 2 or not all(word in words for word in (*pair, "".join(pair))):
            raise CheckpointError(
                f"{merges}, line {number}: {line[:40]!r} joins no two words of vocab.json into a third; "
                "take both files from one source"
            )
        pairs.append(pair)
    return pairs


def _check_order(pipeline, vocab: Path, num_words: int) -> None:
    """The seven must come right after Qwen's 26: that is what the embedding rows of the released encoder mean."""
    pad = pipeline.token_to_id(PAD_TOKEN)
    expected = list(range(pad, pad + len(QWEN_SPECIAL_TOKENS) + len(H3_TOKENS)))
    found = [pipeline.token_to_id(token) for token in QWEN_SPECIAL_TOKENS + H3_TOKENS]
    if found != expected or pad > num_words:
        token, got, want = next(
            (row for row in zip(QWEN_SPECIAL_TOKENS + H3_TOKENS, found, expected) if row[1] != row[2]),
            (PAD_TOKEN, pad, num_words),
        )
        raise CheckpointError(
            f"{vocab} puts the token {token} on id {got} where {want} is needed; "
            "take vocab.json from the official release or from ComfyUI"
        )


def _places_to_look(encoder_path, folder, comfy) -> list[Path]:
    if folder is not None:
        return [Path(folder), Path(folder) / "tokenizer"]
    places = []
    base = None
    if encoder_path is not None:
        base = Path(encoder_path).absolute()
        base = base if base.is_dir() else base.parent
        places += [base, base / "tokenizer", base / "processor"]
        places += [base.parent / "tokenizer", base.parent / "processor", base.parent]
    for checkout in (comfy, os.environ.get("COMFYUI_PATH")):
        if checkout:
            places += [Path(checkout) / COMFY_VOCABULARY, Path(checkout)]
    if base is not None:
        places += [parent / COMFY_VOCABULARY for parent in base.parents if (parent / "comfy").is_dir()]
    return list(dict.fromkeys(places))
