"""The bundled workflows, described in words a person can check; the canvas files are made from them on a real page.

    text_to_video() ... mixing(), and the comparisons of workflow_comparisons.py ─▶ described() ─▶ canvas.js
                                                            ─▶ workflows/*.json + tests/workflows/*

workflow_parts.py has what they are made of.
"""

from __future__ import annotations

from .workflow_comparisons import accelerated, against_server, first_run, streamed, tiles
from .workflow_parts import (
    CLIPS,
    GROUPS,
    PROMPT,
    Box,
    Link,
    Workflow,
    boxes,
    empty,
    encoded,
    encoder,
    media,
    model,
    prompt,
    sampler,
    save,
    vaes,
)

THEIRS = "In *MiniMax H3 Image to Video* set 1344, 768 and 124, the trained size."


def text_to_video() -> Workflow:
    words = """
# 02 Text to video, lossless

Press **Run**: a red circle crosses from left to right with a low tone that ends in a beep. *H3 Decode and Save \
Video* plays the clip with its sound; the file is in the output folder under h3/.

Change the words in *H3 Encode Prompt* (a blue square bounces, high beeps) and run again. There is no negative \
prompt and no guidance scale: the model was trained without them. With the real weights, speech is written \
*\\<d\\>\\[English\\] Good evening.\\</d\\>*.

To make another clip from the same words, change the seed. Only the sampler and what follows it run again.
"""
    return Workflow(
        "02-text-to-video-lossless",
        boxes(
            words,
            model(0),
            encoder(1),
            vaes(2),
            empty(2),
            prompt(1, words=f"{PROMPT}, then a beep"),
            sampler(3, 0, ("prompt", "positive")),
            save(4, 0, "h3/text"),
        ),
        GROUPS,
    )


def first_and_last() -> Workflow:
    words = """
# 03 First and last frame

The clip begins with one picture and ends with another: here a circle on the left and the same on the right. The \
model fills in the way between. Press **Run**.

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
        {"prompt": PROMPT},
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
            vaes(2),
            empty(2),
            media(3),
            frames,
            sampler(4, 0, ("frames", "positive")),
            save(5, 0, "h3/frames"),
        ),
        GROUPS,
    )


def guides() -> Workflow:
    words = """
# 04 Guides at several frames, with sound

Three guides, one *H3 Add Guide* each: a picture at the first frame, another in the middle (0.46 seconds), and a \
sound from the beginning on. Their order does not matter. Press **Run**: the circle passes through both pictures.

**Your media.** Connect *Load Image*, *Load Video* or *Load Audio* in place of *H3 Sample Media*. A *Load Video* \
goes into *video* and brings its own sound and frame rate.

**Where.** *at* chooses between frame and seconds. A frame of -1 is the last one. *strength* below 1 lets the \
model leave the guide further.
"""

    def guide(name: str, column: int, before: Link, widgets: dict, **links: Link) -> Box:
        links = {"positive": before, "latent": ("empty", "latent"), **links}
        return Box(name, "H3RuntimeAddGuide", column, 1, "what", "", widgets, links, 2)

    picture = {"video_vae": ("vaes", "video vae"), "image": ("media", "picture")}
    middle = {**picture, "image": ("media", "middle")}
    sound = {"audio_vae": ("vaes", "audio vae"), "audio": ("media", "sound")}
    return Workflow(
        "04-guides-at-several-frames-with-sound",
        boxes(
            words,
            model(0),
            encoder(1),
            vaes(2),
            prompt(1),
            empty(2),
            media(3),
            guide("one", 3, ("prompt", "positive"), {"at": "frame", "frame": 0}, **picture),
            guide("two", 4, ("one", "positive"), {"at": "seconds", "seconds": 0.46}, **middle),
            guide("three", 5, ("two", "positive"), {"at": "frame", "frame": 0}, **sound),
            sampler(6, 0, ("three", "positive")),
            save(7, 0, "h3/guides"),
        ),
        GROUPS,
    )


def references() -> Workflow:
    words = """
# 05 References

The prompt names what is connected: *\\<Picture 1\\>*, *\\<Video 1\\>*, *\\<Audio 1\\>* ... A reference lends its \
look, motion or voice; it is not copied. Press **Run**: the picture shows a red circle, the words ask for a square \
in its colour.

**Your media.** Connect *Load Image* to *image_0* (up to 9 pictures), *Load Video* to *video_0* (up to 3 clips \
of 2 to 15 seconds), *Load Audio* to *sound_0* (up to 3). A clip brings its own sound, which counts before the \
sounds. The small model was taught pictures only.

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
            "prompt": "a square in the colour of <Picture 1> stays still on the left, middle tone",
            "recipe": "comfy",
        },
        {
            "latent": ("empty", "latent"),
            "clip": ("encoder", "clip"),
            "video_vae": ("vaes", "video vae"),
            "audio_vae": ("vaes", "audio vae"),
            "images.image_0": ("media", "picture"),
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
            vaes(2),
            empty(2),
            media(3),
            named,
            sampler(4, 0, ("named", "positive")),
            save(5, 0, "h3/references"),
            label=LABEL_REFERENCES,
        ),
        GROUPS,
    )


LABEL_REFERENCES = (
    "As it stands: APPROXIMATE, because *comfy* sizes the references otherwise than the release does. The report of "
    "the sampler says so. Set the recipe to *reference* for the release's own way."
)


def inpaint() -> Workflow:
    words = """
# 06 Inpaint by mask, keep the sound

White in the mask is made anew, black is kept. The sound stays as it is (*sound* = keep). Press **Run**: the red \
circle of the clip becomes blue and goes the same way. *The token grid* shows what the model really makes anew: a \
token is 32x32 pixels, and 1 or 4 frames. (*original* of the last node takes the clip's sound where you want its own \
samples in the file.)

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
            prompt(1, words=PROMPT.replace("red", "blue")),
            media(2),
            encoded(),
            masks,
            grid,
            sampler(5, 0, ("prompt", "positive"), ("masks", "latent")),
            save(6, 0, "h3/inpaint"),
            size=CLIPS,
        ),
        GROUPS,
    )


def extend() -> Workflow:
    words = """
# 07 Extend a clip with its sound

*H3 Extend Clip* takes the end of a clip as the beginning of the next one, and *H3 Join Clips* puts both \
together before decoding: no cut, and picture and sound stay together. Press **Run**: in the clip a circle goes to \
the right, in the piece that is added it comes back.

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
        {"seconds": 0.7, "overlap": 0.917},
        {"latent": ("encoded", "latent")},
    )
    joined = Box(
        "joined",
        "H3RuntimeJoinClips",
        6,
        0,
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
            prompt(1, words="a red circle moves right to left, low tone"),
            media(2),
            encoded(),
            longer,
            sampler(5, 0, ("prompt", "positive"), ("longer", "latent")),
            joined,
            save(7, 0, "h3/longer", ("joined", "latent")),
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
            vaes(2),
            prompt(1),
            kept,
            loaded,
            empty(2, 4),
            sampler(5, 0, ("loaded", "positive")),
            save(6, 0, "h3/kept"),
        ),
        GROUPS,
    )


MIXING = """
# 12 Mixing with ComfyUI's own H3 nodes

The prompt, the first frame and the guide are made by ComfyUI's own nodes (*MiniMax H3 Image to Video*, *Add \
Guide for MiniMax H3*) with our text encoder and VAEs; our sampler renders; ComfyUI's *VAE Decode* and *VAE \
Decode Audio* decode. Press **Run**: the circle passes through the first frame and the guide in the middle.

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
        {"prompt": PROMPT, "width": 128, "height": 128, "length": 22},
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
        {"frame_idx": 11},
        {
            "positive": ("theirs", "positive"),
            "latent": ("theirs", "LATENT"),
            "vae": ("vaes", "video vae"),
            "audio_vae": ("vaes", "audio vae"),
            "image": ("media", "middle"),
            "audio": ("media", "sound"),
        },
    )
    images = Box(
        "images", "VAEDecode", 6, 0, "save", "", {}, {"samples": ("sampler", "latent"), "vae": ("vaes", "video vae")}
    )
    sound = Box(
        "sound",
        "VAEDecodeAudio",
        6,
        1,
        "save",
        "",
        {},
        {"samples": ("sampler", "latent"), "vae": ("vaes", "audio vae")},
    )
    keep = Box(
        "save",
        "H3RuntimeSaveVideo",
        7,
        0,
        "save",
        "",
        {"filename_prefix": "h3/mixed"},
        {"images": ("images", "IMAGE"), "audio": ("sound", "AUDIO"), "latent": ("sampler", "latent")},
        2,
        (340, 640),
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


def workflows() -> tuple[Workflow, ...]:
    """All of them, in the order of their numbers."""
    makers = (first_run, text_to_video, first_and_last, guides, references, inpaint, extend)
    makers += (streamed, accelerated, embeddings, tiles, mixing, against_server)
    return tuple(make() for make in makers)
