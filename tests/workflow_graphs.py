"""The bundled workflows, described in words a person can check; the canvas files are made from them on a real page.

    Box(name, type, column, row, widgets, links) ... ─▶ described() ─▶ canvas.js ─▶ workflows/*.json + tests/workflows/*

Columns run left to right, rows top to bottom; a link is ("name of the box", "name of its output"). The sizes are those
of the small carried model on a CPU; everything else stands at the nodes' own defaults, which a user keeps.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

Link = tuple[str, str]
ROOMS = {"weights": "#3f789e", "what": "#88AA88", "render": "#b06634", "save": "#a1309b"}
NOTE = ("#432", "#653")
SMALL = {"width": 192, "height": 128, "seconds": 1.6}
PROMPT = (
    "A red ball rolls over a meadow under a blue sky. Wind in the grass, a bird far away. "
    "A man says: <d>[English] There it goes.</d>"
)
SEED = {"seed": 1, "control_after_generate": "fixed"}


@dataclass(frozen=True)
class Box:
    """One node: where it stands and what it is given. ``group`` is the frame it lies in."""

    name: str
    type: str
    column: int
    row: int
    group: str = ""
    title: str = ""
    widgets: dict = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    rows: int = 1
    size: tuple[int, int] | None = None


@dataclass(frozen=True)
class Workflow:
    """A canvas file: its name, its boxes, and the frames by the key that boxes name."""

    name: str
    boxes: tuple[Box, ...]
    groups: dict[str, str]

    def described(self) -> dict:
        """What canvas.js takes, and the id that the file keeps however often it is made."""
        nodes = [
            {
                "name": box.name,
                "type": box.type,
                "title": box.title,
                "column": box.column,
                "row": box.row,
                "rows": box.rows,
                "widgets": box.widgets,
                "links": {name: list(link) for name, link in box.links.items()},
                **({"size": list(box.size)} if box.size else {}),
                **({"colour": list(NOTE)} if box.type == "MarkdownNote" else {}),
            }
            for box in self.boxes
        ]
        groups = [
            {"title": title, "colour": ROOMS[key], "members": [box.name for box in self.boxes if box.group == key]}
            for key, title in self.groups.items()
        ]
        identity = str(uuid.uuid5(uuid.NAMESPACE_URL, f"minimax-h3-runtime/{self.name}"))
        return {"name": self.name, "id": identity, "nodes": nodes, "groups": groups}


WEIGHTS_NOTE = """
**Real weights.** In the frame *1 Weights*, choose your files in place of *small carried model*: in *H3 Load Model*, \
*H3 Load Text Encoder* and *H3 Load VAEs*. {size} Nothing else changes.

**The label.** {label}
"""
TRAINED = "In *H3 Empty Latent* set width and height to 0 (the trained size, 1344x768) and seconds to 5.167."
CLIPS = "Size and length are those of your clip, as near as the model allows; the node says what it made of them."
THEIRS = "In *MiniMax H3 Image to Video* set 1344, 768 and 124, the trained size."
LABEL = (
    "As it stands: LOSSLESS, because the steps and shifts are the release's own and nothing is quantised. BEYOND THE "
    "REFERENCE stands beside it as long as the clip is shorter or smaller than what the model was trained on."
)
CARRIED_NOTE = (
    "It runs as it is, without a download and with an empty input folder. The small carried model only shows that "
    "every part works: its pictures are blotches of colour, its sound is soft hiss."
)


def note(text: str, size: str = TRAINED, label: str = LABEL) -> Box:
    tail = WEIGHTS_NOTE.format(size=size, label=label)
    words = f"{text.strip()}\n\n{CARRIED_NOTE}\n{tail}".strip()
    return Box("note", "MarkdownNote", 0, 0, title="Read me", widgets={"text": words}, rows=9, size=(420, 600))


def model(row: int = 0, choice: str = "small carried model", title: str = "") -> Box:
    return Box("model", "H3RuntimeLoadModel", 1, row, "weights", title, {"model": choice})


def encoder(row: int) -> Box:
    return Box("encoder", "H3RuntimeLoadTextEncoder", 1, row, "weights")


def vaes(row: int) -> Box:
    return Box("vaes", "H3RuntimeLoadVaes", 1, row, "weights")


def empty(row: int, column: int = 2) -> Box:
    return Box("empty", "H3RuntimeEmptyLatent", column, row, "what", "", SMALL)


def media(row: int, column: int = 2) -> Box:
    return Box("media", "H3RuntimeSampleMedia", column, row, "what", "H3 Sample Media (yours here)")


def prompt(row: int, column: int = 2) -> Box:
    links = {"clip": ("encoder", "clip")}
    return Box("prompt", "H3RuntimeEncodePrompt", column, row, "what", "", {"prompt": PROMPT}, links, size=(360, 190))


def sampler(column: int, row: int, positive: Link, latent: Link = ("empty", "latent"), name: str = "sampler") -> Box:
    links = {"model": ("model", "model"), "positive": positive, "latent": latent}
    return Box(name, "H3RuntimeSampler", column, row, "render", "", SEED, links, 2, (360, 430))


def save(column: int, row: int, prefix: str, latent: Link = ("sampler", "latent")) -> Box:
    links = {"latent": latent, "video_vae": ("vaes", "video vae"), "audio_vae": ("vaes", "audio vae")}
    return Box(
        "save", "H3RuntimeDecodeAndSave", column, row, "save", "", {"filename_prefix": prefix}, links, 1, (400, 500)
    )


def text_to_video() -> Workflow:
    words = """
# 02 Text to video, lossless

Write what is seen and heard in *H3 Encode Prompt* and press **Run**. *H3 Decode and Save Video* plays the clip \
with its sound; the file is in the output folder under h3/.

Speech is written *\\<d\\>\\[English\\] Good evening.\\</d\\>*. There is no negative prompt and no guidance \
scale: the model was trained without them.

To make another clip from the same words, change the seed. Only the sampler and what follows it run again.
"""
    return Workflow(
        "02-text-to-video-lossless",
        boxes(
            words,
            model(0),
            encoder(1),
            vaes(3),
            empty(2),
            prompt(1),
            sampler(3, 0, ("prompt", "positive")),
            save(4, 3, "h3/text"),
        ),
        GROUPS,
    )


def boxes(words: str, *more: Box, **notes) -> tuple[Box, ...]:
    return (note(words, **notes), *more)


GROUPS = {
    "weights": "1 Weights",
    "what": "2 What is seen and heard, and how long",
    "render": "3 Render",
    "save": "4 Watch",
}


def first_and_last() -> Workflow:
    words = """
# 03 First and last frame

The clip begins with one picture and ends with another. Press **Run**.

**Your pictures.** Delete *H3 Sample Media* and connect *Load Image* to *first_frame*, and another to \
*last_frame*. One of the two is enough. A picture of another shape is fitted to the clip: what was done to it \
stands on the node.

The prompt says what happens between the two.
"""
    frames = Box(
        "frames",
        "H3RuntimeFirstLastFrame",
        3,
        1,
        "what",
        "",
        {"prompt": "The red ball flies from left to right over the meadow. Wind, and a soft landing."},
        {
            "video_vae": ("vaes", "video vae"),
            "latent": ("empty", "latent"),
            "clip": ("encoder", "clip"),
            "first_frame": ("media", "picture"),
            "last_frame": ("media", "last"),
        },
        1,
        (360, 330),
    )
    return Workflow(
        "03-first-and-last-frame",
        boxes(
            words,
            model(0),
            encoder(1),
            vaes(4),
            empty(2),
            media(3),
            frames,
            sampler(4, 0, ("frames", "positive")),
            save(5, 4, "h3/frames"),
        ),
        GROUPS,
    )


def guides() -> Workflow:
    words = """
# 04 Guides at several frames, with sound

Three guides, one *H3 Add Guide* each: a picture at the first frame, the same picture again at 0.9 seconds, and \
a sound from the beginning on. Their order does not matter. Press **Run**.

**Your media.** Connect *Load Image*, *Load Video* or *Load Audio* in place of *H3 Sample Media*. A *Load Video* \
goes into *video* and brings its own sound and frame rate.

**Where.** *at* chooses between frame and seconds. A frame of -1 is the last one. *strength* below 1 lets the \
model leave the guide further.
"""

    def guide(name: str, column: int, before: Link, widgets: dict, **links: Link) -> Box:
        links = {"positive": before, "latent": ("empty", "latent"), **links}
        return Box(name, "H3RuntimeAddGuide", column, 1, "what", "", widgets, links, 2)

    picture = {"video_vae": ("vaes", "video vae"), "image": ("media", "picture")}
    sound = {"audio_vae": ("vaes", "audio vae"), "audio": ("media", "sound")}
    return Workflow(
        "04-guides-at-several-frames-with-sound",
        boxes(
            words,
            model(0),
            encoder(1),
            vaes(4),
            prompt(1),
            empty(2),
            media(3),
            guide("one", 3, ("prompt", "positive"), {"at": "frame", "frame": 0}, **picture),
            guide("two", 4, ("one", "positive"), {"at": "seconds", "seconds": 0.9, "strength": 0.8}, **picture),
            guide("three", 5, ("two", "positive"), {"at": "frame", "frame": 0}, **sound),
            sampler(6, 0, ("three", "positive")),
            save(7, 4, "h3/guides"),
        ),
        GROUPS,
    )


def references() -> Workflow:
    words = """
# 05 References

The prompt names what is connected: *\\<Picture 1\\>*, *\\<Video 1\\>*, *\\<Audio 1\\>* ... A reference lends its \
look, motion or voice; it is not copied. Press **Run**.

**Your media.** Connect *Load Image* to *image_0* (up to 9 pictures), *Load Video* to *video_0* (up to 3 clips \
of 2 to 15 seconds), *Load Audio* to *sound_0* (up to 3). A clip brings its own sound, which counts before the \
sounds.

**Weights.** References need the Ref2VA weights; with others the sampler refuses in a sentence.

**Recipe.** *comfy* sizes the pictures to the clip, as ComfyUI's own nodes do. *reference* does what the release \
does and enlarges them to 2048 pixels: exact, and minutes on a CPU.
"""
    named = Box(
        "named",
        "H3RuntimeReferences",
        3,
        1,
        "what",
        "",
        {
            "prompt": "The ball of <Picture 1> rolls along a beach. A voice like <Audio 1> hums a tune.",
            "recipe": "comfy",
        },
        {
            "latent": ("empty", "latent"),
            "clip": ("encoder", "clip"),
            "video_vae": ("vaes", "video vae"),
            "audio_vae": ("vaes", "audio vae"),
            "images.image_0": ("media", "picture"),
            "sounds.sound_0": ("media", "sound"),
        },
        2,
        (360, 430),
    )
    return Workflow(
        "05-references",
        boxes(
            words,
            model(0),
            encoder(1),
            vaes(4),
            empty(2),
            media(3),
            named,
            sampler(4, 0, ("named", "positive")),
            save(5, 4, "h3/references"),
            label=LABEL_REFERENCES,
        ),
        GROUPS,
    )


LABEL_REFERENCES = (
    "As it stands: APPROXIMATE, because *comfy* sizes the references otherwise than the release does. The report of "
    "the sampler says so. Set the recipe to *reference* for the release's own way."
)


def encoded() -> Box:
    links = {
        "video_vae": ("vaes", "video vae"),
        "audio_vae": ("vaes", "audio vae"),
        "images": ("media", "clip"),
        "audio": ("media", "sound"),
    }
    return Box("encoded", "H3RuntimeEncodeClip", 3, 2, "what", "", {}, links)


def inpaint() -> Workflow:
    words = """
# 06 Inpaint by mask, keep the sound

White in the mask is made anew, black is kept. The sound stays as it is (*sound* = keep). Press **Run**; *The \
token grid* shows what the model really makes anew: a token is 32x32 pixels, and 1 or 4 frames.

**Your clip.** Connect *Load Video* to *video* of *H3 Encode Video and Sound*, and *Load Image (as Mask)* to \
*mask*. One mask counts for all frames; one per frame is possible.

**The other way round.** *picture* = keep and *sound* = all makes a new sound for the same picture. *ranges* \
makes only some seconds anew.
"""
    masks = Box(
        "masks",
        "H3RuntimeNoiseMasks",
        4,
        2,
        "what",
        "",
        {"picture": "mask", "sound": "keep"},
        {"latent": ("encoded", "latent"), "mask": ("media", "mask")},
        1,
        (300, 230),
    )
    grid = Box("grid", "PreviewImage", 6, 2, "save", "The token grid", {}, {"images": ("masks", "grid")}, 1, (400, 260))
    return Workflow(
        "06-inpaint-by-mask-keep-the-sound",
        boxes(
            words,
            model(0),
            encoder(1),
            vaes(3),
            prompt(1),
            media(2),
            encoded(),
            masks,
            grid,
            sampler(5, 0, ("prompt", "positive"), ("masks", "latent")),
            save(6, 3, "h3/inpaint"),
            size=CLIPS,
        ),
        GROUPS,
    )


def extend() -> Workflow:
    words = """
# 07 Extend a clip with its sound

*H3 Extend Clip* takes the end of a clip as the beginning of the next one, and *H3 Join Clips* puts both \
together before decoding: no cut, and picture and sound stay together. Press **Run**.

**Your clip.** Connect *Load Video* to *video* of *H3 Encode Video and Sound*. Or connect the latent of another \
sampler to *H3 Extend Clip* and *H3 Join Clips*: then nothing is encoded twice.

**Longer.** *seconds* says how much is added, *overlap* how much of the old end the new part sees. Chain Extend, \
Sampler and Join again for any length.
"""
    longer = Box(
        "longer",
        "H3RuntimeExtendClip",
        4,
        2,
        "what",
        "",
        {"seconds": 1.0, "overlap": 0.917},
        {"latent": ("encoded", "latent")},
    )
    joined = Box(
        "joined",
        "H3RuntimeJoinClips",
        6,
        2,
        "save",
        "",
        {},
        {"first": ("encoded", "latent"), "second": ("sampler", "latent")},
    )
    return Workflow(
        "07-extend-a-clip-with-its-sound",
        boxes(
            words,
            model(0),
            encoder(1),
            vaes(3),
            prompt(1),
            media(2),
            encoded(),
            longer,
            sampler(5, 0, ("prompt", "positive"), ("longer", "latent")),
            joined,
            save(7, 3, "h3/longer", ("joined", "latent")),
            size=CLIPS,
        ),
        GROUPS,
    )


def embeddings() -> Workflow:
    words = """
# 10 Prompt embeddings, saved and reused

The prompt is encoded once and kept in a file; the render reads the file. Press **Run**.

**The next time.** The text encoder is 51 GB and is not needed again: select *H3 Load Text Encoder*, *H3 Encode \
Prompt* and *H3 Save Prompt Embeddings* and bypass them (Ctrl+B) or delete them. Pull the wire off *file* and \
choose the saved file there (press R when it is not in the list). The clip is the same to the bit.

The files lie in the output folder under h3/. A prompt that was encoded with pictures goes into *saved* of the \
node that takes the pictures.
"""
    kept = Box(
        "kept",
        "H3RuntimeSavePrompt",
        3,
        1,
        "what",
        "",
        {"filename_prefix": "h3/prompt"},
        {"positive": ("prompt", "positive")},
    )
    loaded = Box(
        "loaded", "H3RuntimeLoadPrompt", 4, 1, "what", "", {"file": "none saved yet"}, {"file": ("kept", "file")}
    )
    return Workflow(
        "10-prompt-embeddings-saved-and-reused",
        boxes(
            words,
            model(0),
            encoder(1),
            vaes(3),
            prompt(1),
            kept,
            loaded,
            empty(2, 4),
            sampler(5, 0, ("loaded", "positive")),
            save(6, 3, "h3/kept"),
        ),
        GROUPS,
    )


MIXING = """
# 12 Mixing with ComfyUI's own H3 nodes

The prompt, the first frame and the guide are made by ComfyUI's own nodes (*MiniMax H3 Image to Video*, *Add \
Guide for MiniMax H3*) with our text encoder and VAEs; our sampler renders; ComfyUI's *VAE Decode* and *VAE \
Decode Audio* decode. Press **Run**.

Latents and conditioning travel freely between both. A model does not: ours goes into our sampler only, so that \
no checkpoint is loaded twice.

**Your pictures.** Connect *Load Image* in place of *H3 Sample Media*.
"""


def mixing() -> Workflow:
    theirs = Box(
        "theirs",
        "MiniMaxH3ImageToVideo",
        3,
        1,
        "what",
        "",
        {"prompt": "The red ball flies over the meadow. Wind.", "width": 192, "height": 128, "length": 39},
        {"clip": ("encoder", "clip"), "vae": ("vaes", "video vae"), "first_frame": ("media", "picture")},
        1,
        (340, 330),
    )
    guide = Box(
        "guide",
        "MiniMaxH3AddGuide",
        4,
        1,
        "what",
        "",
        {"frame_idx": 22},
        {
            "positive": ("theirs", "positive"),
            "latent": ("theirs", "LATENT"),
            "vae": ("vaes", "video vae"),
            "audio_vae": ("vaes", "audio vae"),
            "image": ("media", "picture"),
            "audio": ("media", "sound"),
        },
    )
    images = Box(
        "images", "VAEDecode", 6, 3, "save", "", {}, {"samples": ("sampler", "latent"), "vae": ("vaes", "video vae")}
    )
    sound = Box(
        "sound",
        "VAEDecodeAudio",
        6,
        4,
        "save",
        "",
        {},
        {"samples": ("sampler", "latent"), "vae": ("vaes", "audio vae")},
    )
    keep = Box(
        "save",
        "H3RuntimeSaveVideo",
        7,
        3,
        "save",
        "",
        {"filename_prefix": "h3/mixed"},
        {"images": ("images", "IMAGE"), "audio": ("sound", "AUDIO"), "latent": ("sampler", "latent")},
        2,
        (400, 540),
    )
    return Workflow(
        "12-mixing-with-comfyui-h3-nodes",
        boxes(
            MIXING,
            model(0),
            encoder(1),
            vaes(3),
            media(2),
            theirs,
            guide,
            sampler(5, 0, ("guide", "positive"), ("theirs", "LATENT")),
            images,
            sound,
            keep,
            size=THEIRS,
            label=LABEL_MIXED,
        ),
        GROUPS,
    )


LABEL_MIXED = (
    "As it stands: APPROXIMATE, because the history of what other nodes made cannot be proven. The report of the "
    "sampler names it (condition/foreign)."
)


SERVER = "studio"
AGAINST = f"""
# 13 Here, lossless, against a server

The same prompt, size, length and seed twice: rendered here with the release's own schedule, and on an SGLang or \
vLLM-Omni server of yours with *quality* high. *H3 Compare* shows both clips and what lies between them.

**Your server.** A workflow holds a server's name, never its address. Run *python -m h3_runtime engine list*: it says \
where your servers are written down and how. Call it *{SERVER}*, or press R and choose yours in *H3 Render on a Server*.

**What it shows.** A server draws its noise its own way, so both clips differ as two seeds do: the figures are no \
measure of quality alone. Its frames come after H.264 and are marked so. SGLang gives *high* for text alone at \
1344x768, 124 frames and 50 steps; take *lossless* there otherwise.
"""


def against_a_server() -> Workflow:
    """Its files are made and its page is run with a server called SERVER (engine_server.py stands in for one)."""
    length = {"seconds": 4.458}
    far = Box(
        "far",
        "H3RuntimeRemoteRender",
        3,
        2,
        "render",
        "",
        {"server": SERVER, "prompt": PROMPT, "quality": "high", "filename_prefix": "h3/server", **length, **SEED},
        {"width": ("empty", "width"), "height": ("empty", "height")},
        2,
        (360, 760),
    )
    images = Box("images", "H3RuntimeDecodeVideo", 4, 0, "save", "", {},
                 {"latent": ("sampler", "latent"), "video_vae": ("vaes", "video vae")})  # fmt: skip
    sound = Box("sound", "H3RuntimeDecodeSound", 4, 1, "save", "", {},
                {"latent": ("sampler", "latent"), "audio_vae": ("vaes", "audio vae")})  # fmt: skip
    sides = {"images_a": ("images", "images"), "audio_a": ("sound", "audio"), "report_a": ("images", "report")}
    sides |= {"latent_a": ("sampler", "latent"), "images_b": ("far", "images"), "audio_b": ("far", "audio")}
    names = {"name_a": "here, lossless", "name_b": "server, high"}
    compare = Box("compare", "H3RuntimeCompare", 5, 0, "save", "", names,
                  {**sides, "report_b": ("far", "report")}, 3, (520, 620))  # fmt: skip
    blank = Box("empty", "H3RuntimeEmptyLatent", 2, 2, "what", "", {**SMALL, **length})
    nodes = (model(0), encoder(1), vaes(3), blank, prompt(1), sampler(3, 0, ("prompt", "positive")))
    return Workflow("13-local-lossless-against-a-server", boxes(AGAINST, *nodes, far, images, sound, compare), GROUPS)


def workflows() -> tuple[Workflow, ...]:
    """All of them, in the order of their numbers."""
    makers = (text_to_video, first_and_last, guides, references, inpaint, extend, embeddings, mixing)
    return tuple(make() for make in makers)
