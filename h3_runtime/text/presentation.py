"""How a request is put to the text encoder: labels, vision blocks, then the prompt as it stands.

    t2va    prompt
    fl2va   <Picture 1>: [block]  <Picture 2>: [block]  prompt
    ref2va  <Picture 1>: [block]                                   a picture
            <Audio 1>:                                             a sound: a label alone, the encoder hears nothing
            <Audio 2>: <Video 1>: <0.2 seconds>[block] <1.2 seconds>[block] ...   a clip with sound, 2 frames a block
            prompt

    [block] = <|vision_start|> pad ... pad <|vision_end|>, one pad per 2x2 patches

There is no chat template and no system text. Every piece of text is tokenised on its own, so a label never merges with
what follows. Each row also carries H3's tag: 1 for text, 0 for a whole vision block with its two marks; labels are
text. Everything here is arithmetic on sizes and strings: no pixels, no weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..errors import H3Error
from ..job import MODALITY_TEXT, MODALITY_VIDEO
from .tokenizer import IMAGE_PAD, PAD_TOKEN, VIDEO_PAD, VISION_END, VISION_START, Tokenizer
from .vision import FRAMES_PER_PATCH, MERGE

CLIP_FPS = 2.0
VIDEO_FPS = 24.0


@dataclass(frozen=True)
class Picture:
    """A still picture of ``grid`` = (rows, columns) in 16-pixel patches."""

    grid: tuple[int, int]


@dataclass(frozen=True)
class Sound:
    """A reference sound on its own."""


@dataclass(frozen=True)
class Clip:
    """A reference clip: ``timestamps`` in seconds, one per frame pair; ``grid`` as for a picture, the same for each."""

    grid: tuple[int, int]
    timestamps: tuple[float, ...]
    has_sound: bool = False


@dataclass(frozen=True)
class TextPiece:
    """A stretch of text that is tokenised on its own."""

    text: str


@dataclass(frozen=True)
class EmbeddingPiece:
    """A prompt embedding in place of words: its ``rows`` float32 [n, text_dim] go in before the first layer."""

    name: str
    rows: torch.Tensor = field(compare=False)


@dataclass(frozen=True)
class VisionBlock:
    """The place of one picture (``pad`` = the image pad) or one frame pair (the video pad) among the rows."""

    pad: str
    grid: tuple[int, int]

    @property
    def num_pads(self) -> int:
        return (self.grid[0] // MERGE) * (self.grid[1] // MERGE)


@dataclass(frozen=True)
class PresentedPrompt:
    """Row by row what the encoder is given.

    ids, tags: int64 [L]. positions: int64 [3, L], Qwen's rotary positions (time, height, width).
    is_empty: no text and no picture was given, and the one row is the pad token.
    inserted: (first row, float32 [n, text_dim]) of each prompt embedding; the pad token stands in ``ids`` there.
    """

    ids: torch.Tensor
    tags: torch.Tensor
    positions: torch.Tensor
    is_empty: bool
    inserted: tuple[tuple[int, torch.Tensor], ...] = ()


def present(
    prompt: str | Sequence[TextPiece | EmbeddingPiece], items: Sequence[Picture | Sound | Clip] = ()
) -> tuple[TextPiece | EmbeddingPiece | VisionBlock, ...]:
    """The segments for ``items`` in the given order and then the prompt, each kind numbered from 1.

    ``prompt``: text as it stands, or the pieces it was taken apart into (text/embeddings.py). Keyframes come as
    pictures before the references, so they are numbered first.
    """
    segments = []
    pictures = sounds = clips = 0
    for item in items:
        if isinstance(item, Sound) or (isinstance(item, Clip) and item.has_sound):
            sounds += 1
            segments.append(TextPiece(f"<Audio {sounds}>: "))
        if isinstance(item, Picture):
            pictures += 1
            segments += [TextPiece(f"<Picture {pictures}>: "), VisionBlock(IMAGE_PAD, item.grid)]
        elif isinstance(item, Clip):
            clips += 1
            segments.append(TextPiece(f"<Video {clips}>: "))
            for seconds in item.timestamps:
                segments += [TextPiece(f"<{seconds:.1f} seconds>"), VisionBlock(VIDEO_PAD, item.grid)]
    return (*segments, *([TextPiece(prompt)] if isinstance(prompt, str) else prompt))


def sample_clip(num_frames: int, fps: float = VIDEO_FPS) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Which frames of a clip the encoder sees (2 a second) and the time of each pair in seconds.

    A pair's time is the mean of its two samples'; an odd last sample pairs with itself.
    """
    stride = fps / CLIP_FPS
    indices = []
    position = 0.0  # summed, not multiplied: a rate that 2 does not divide rounds as the reference rounds
    while round(position) < num_frames:
        if not indices or round(position) > indices[-1]:
            indices.append(round(position))
        position += stride
    if len(indices) < FRAMES_PER_PATCH:
        needed = round(stride) + 1
        raise H3Error(
            f"a reference clip of {num_frames} frames at {fps:g} fps is too short: the encoder looks at it twice a "
            f"second and needs {needed} frames ({needed / fps:.2f} s) or more"
        )
    times = [index / CLIP_FPS for index in range(len(indices))]
    if len(times) % FRAMES_PER_PATCH:
        times.append(times[-1])
    pairs = tuple((first + second) / 2 for first, second in zip(times[::2], times[1::2]))
    return tuple(indices), pairs


def tokenize(segments: Sequence[TextPiece | EmbeddingPiece | VisionBlock], tokenizer: Tokenizer) -> PresentedPrompt:
    """Segments to rows. Nothing is cut, however long; a request with no rows at all becomes the single pad token."""
    reserved = {tokenizer.token_id(IMAGE_PAD): IMAGE_PAD, tokenizer.token_id(VIDEO_PAD): VIDEO_PAD}
    start, end = tokenizer.token_id(VISION_START), tokenizer.token_id(VISION_END)
    ids: list[int] = []
    tags: list[int] = []
    positions: list[torch.Tensor] = []
    inserted: list[tuple[int, torch.Tensor]] = []
    clock = 0
    for segment in segments:
        if isinstance(segment, TextPiece):
            piece = tokenizer.encode(segment.text)
            for token_id in reserved.keys() & set(piece):
                raise H3Error(
                    f"the prompt holds {reserved[token_id]}, which is kept for the rows of pictures; remove it"
                )
            ids += piece
            tags += [MODALITY_TEXT] * len(piece)
            positions.append(_text_positions(clock, len(piece)))
            clock += len(piece)
        elif isinstance(segment, EmbeddingPiece):
            count = len(segment.rows)
            inserted.append((len(ids), segment.rows))
            ids += [tokenizer.token_id(PAD_TOKEN)] * count
            tags += [MODALITY_TEXT] * count
            positions.append(_text_positions(clock, count))
            clock += count
        else:
            ids += [start] + [tokenizer.token_id(segment.pad)] * segment.num_pads + [end]
            tags += [MODALITY_VIDEO] * (segment.num_pads + 2)
            block = _picture_positions(clock + 1, segment.grid)
            after = clock + 1 + max(segment.grid) // MERGE
            positions += [_text_positions(clock, 1), block, _text_positions(after, 1)]
            clock = after + 1
    is_empty = not ids
    if is_empty:
        ids, tags, positions = [tokenizer.token_id(PAD_TOKEN)], [MODALITY_TEXT], [_text_positions(0, 1)]
    return PresentedPrompt(
        torch.tensor(ids), torch.tensor(tags), torch.cat(positions, dim=1), is_empty, tuple(inserted)
    )


def _text_positions(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count).expand(3, count)  # [3, count], the three axes alike


def _picture_positions(first: int, grid: tuple[int, int]) -> torch.Tensor:
    """[3, pads]: one time for the whole picture; its rows and columns are counted on from that time."""
    rows, columns = grid[0] // MERGE, grid[1] // MERGE
    time = torch.full((rows, columns), first)
    row = torch.arange(first, first + rows)[:, None].expand(rows, columns)
    column = torch.arange(first, first + columns).expand(rows, columns)
    return torch.stack([time, row, column]).reshape(3, -1)


DIALOGUE_TAG = re.compile(r"[<＜]\s*(?P<close>[/／]?)\s*d\s*[>＞]", re.IGNORECASE)
SPEECH = re.compile(r"<d>(.*?)</d>", re.DOTALL)
SYLLABIC = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]")  # kana, Han, Hangul
WORDS_A_SECOND, SYLLABLES_A_SECOND = 4.0, 8.0  # as fast as people speak without running words together
LANGUAGE_MARK = re.compile(r"\s*\[[^\[\]]*\w[^\[\]]*\]")


def lint_prompt(prompt: str) -> list[str]:
    """Notes about dialogue tags that H3 will not read as meant; the prompt itself is never changed.

    Speech is written ``<d>[English] words</d>``. Found: another spelling of a tag, a tag inside a tag, one never closed
    or never opened, speech without words or without its language. Positions count characters from 1.
    """
    notes = []
    opened: re.Match | None = None
    for tag in DIALOGUE_TAG.finditer(prompt):
        at = f"at character {tag.start() + 1}"
        written = "</d>" if tag["close"] else "<d>"
        if tag[0] != written:
            notes.append(f"'{tag[0]}' {at} is read as plain letters: a dialogue tag is written {written} exactly")
        elif written == "<d>":
            if opened:
                notes.append(f"<d> {at} lies inside the <d> at character {opened.start() + 1}: close that one first")
            opened = tag
        elif opened is None:
            notes.append(f"</d> {at} has no <d> before it")
        else:
            notes += _lint_speech(prompt[opened.end() : tag.start()], opened.start() + 1)
            opened = None
    if opened:
        notes.append(f"<d> at character {opened.start() + 1} is never closed: write </d> after the spoken words")
    return notes


def lint_pace(prompt: str, seconds: float) -> list[str]:
    """A note when the dialogue of a prompt is more than can be spoken in a clip of ``seconds``: such speech is rushed
    or turns to babble. Counted are words, and characters where a script writes a syllable in each."""
    words = syllables = 0
    for spoken in SPEECH.findall(prompt):
        spoken = LANGUAGE_MARK.sub("", spoken, count=1)
        syllables += len(SYLLABIC.findall(spoken))
        words += len(re.findall(r"\w+(?:['\u2019-]\w+)*", SYLLABIC.sub(" ", spoken)))
    needed = words / WORDS_A_SECOND + syllables / SYLLABLES_A_SECOND
    if needed <= seconds:
        return []
    kinds = ((words, "word"), (syllables, "character"))
    counts = [f"{count} {what}{'s' if count > 1 else ''}" for count, what in kinds if count]
    return [
        f"the dialogue has {' and '.join(counts)}: at the fastest that takes about {needed:.1f} s and the clip lasts "
        f"{seconds:.1f} s; shorten it, or render more frames"
    ]


def _lint_speech(speech: str, position: int) -> list[str]:
    language = LANGUAGE_MARK.match(speech)
    notes = []
    if not language:
        notes.append(f"<d> at character {position} names no language: write <d>[English] ... or the one spoken")
    if not speech[language.end() if language else 0 :].strip():
        notes.append(f"<d> at character {position} holds no words")
    return notes
