"""The bundled workflows that put two or more ways side by side: 01, 08, 09 and 11.

one H3 Load Model ─▶ A as it is stored ───────────────▶ sampler ─▶ frames or file ─┐
                  └▶ B quantised, accelerated or ... ─▶ sampler ─▶ frames or file ─┴▶ H3 Compare
"""

from __future__ import annotations

from .workflow_parts import (
    CLIPS,
    PROMPT,
    SEED,
    Box,
    Link,
    Workflow,
    boxes,
    changed,
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

AB = "As it stands: A is LOSSLESS, B is APPROXIMATE"
VIEWER = (
    "**The viewer.** *Wipe* draws a line between both clips, *difference* shows what B changed, a key steps frame by "
    "frame, and the sound switches between A and B. The curve under the time line is the likeness of each frame."
)
FRAMES = {"weights": "1 Weights", "what": "2 What is seen and heard, and how long"}


def side(letter: str, words: str, row: int, source: Link, column: int = 3, **more) -> Box:
    """The sampler of one side; its title begins with the side's letter."""
    made = sampler(column, row, ("prompt", "positive"), name=f"sampler {letter}")
    return changed(made, group=letter, title=f"{letter.upper()}: H3 Sampler, {words}", links={"model": source}, **more)


def quantised(row: int, group: str, column: int = 2, **widgets) -> Box:
    links = {"model": ("model", "model")}
    widgets = {"quantise": "int8_convrot", **widgets}
    return Box("fewer", "H3RuntimeQuantise", column, row, group, "H3 Quantise Model (INT8)", widgets, links)


def picture(letter: str, row: int, latent: Link, column: int = 4, **widgets) -> Box:
    links = {"latent": latent, "video_vae": ("vaes", "video vae")}
    return Box(f"images {letter}", "H3RuntimeDecodeVideo", column, row, letter, "", widgets, links)


def ears(letter: str, row: int, latent: Link, column: int = 4, name: str = "") -> Box:
    links = {"latent": latent, "audio_vae": ("vaes", "audio vae")}
    return Box(name or f"sound {letter}", "H3RuntimeDecodeSound", column, row, letter, "", {}, links)


def compared(name: str, column: int, row: int, names: dict[str, str], rows: int = 4, **links: Link) -> Box:
    """H3 Compare of two sides in memory; ``names``: {letter of a box: what the side is called}."""
    given, widgets = dict(links), {"filename_prefix": f"h3/{name}"}
    for side_name, (letter, words) in zip("ab", names.items()):
        given |= {
            f"images_{side_name}": (f"images {letter}", "images"),
            f"report_{side_name}": (f"images {letter}", "report"),
        }
        widgets[f"name_{side_name}"] = words
    return Box(name, "H3RuntimeCompare", column, row, "save", "", widgets, given, rows, (640, 1240))


def first_run() -> Workflow:
    words = f"""
# 01 First run: exact against INT8

Press **Run**. The same words and the same seed are rendered twice: **A** with the weights as they are stored, **B** \
with the weights rounded to INT8, which takes half of the memory. *H3 Compare* on the right measures B against A \
before any encoding and opens the viewer.

**Which side is exact?** A. Its badge says LOSSLESS: bit for bit what the reference gives. B says APPROXIMATE: close, \
and not the same.

{VIEWER}
"""
    sides = []
    for letter, row, source, way in (
        ("a", 0, ("model", "model"), "exact"),
        ("b", 2, ("fewer", "model"), "INT8"),
    ):
        latent = (f"sampler {letter}", "latent")
        made = side(
            letter, way, row, source, widgets={"resume": False}
        )  # what each costs is shown: nothing is taken up
        sides += [made, picture(letter, row, latent), ears(letter, row + 1, latent)]
    result = compared(
        "compare",
        5,
        0,
        {"a": "exact", "b": "INT8"},
        latent_a=("sampler a", "latent"),
        latent_b=("sampler b", "latent"),
        audio_a=("sound a", "audio"),
        audio_b=("sound b", "audio"),
    )
    return Workflow(
        "01-first-run-exact-against-int8",
        boxes(
            words,
            model(0),
            encoder(1),
            vaes(2),
            prompt(0, words=f"{PROMPT}, then a beep"),
            empty(1),
            quantised(2, "b"),
            *sides,
            result,
            label=f"{AB}, because its weights were quantised while they were loaded.",
        ),
        {**FRAMES, "a": "3 A: exact", "b": "4 B: INT8", "save": "5 Compare"},
    )


def streamed() -> Workflow:
    words = f"""
# 08 On a 24 GB card: lossless streamed, against INT8

Two ways to render with weights that do not fit on the card. **A** keeps them as they are stored and streams them \
from main memory, block by block (*place* = ram): slower, and the same to the bit. **B** rounds them to INT8, so that \
more of them stay on the card. Press **Run**; *H3 Compare Videos* measures B against A from the frames that both \
files kept.

**The plan.** Both *H3 Memory Plan* nodes say what a card of 24 GiB with 64 GiB of main memory would hold. Set your \
own numbers there; 0 is this machine.

{VIEWER}
"""
    sides = []
    for letter, row, source, way in (
        ("a", 0, ("model", "model"), "streamed from RAM"),
        ("b", 2, ("fewer", "model"), "INT8"),
    ):
        sides.append(side(letter, way, row, source))
        sides.append(kept(letter, row, f"h3/card_{letter}", rows=2))
        links = {"model": source, "latent": ("empty", "latent")}
        plan = {"vram_gib": 24.0, "ram_gib": 64.0}
        title = f"{letter.upper()}: H3 Memory Plan"
        column, size = 3 if letter == "a" else 4, (340, 400)
        sides.append(Box(f"plan {letter}", "H3RuntimeMemoryPlan", column, 4, "plan", title, plan, links, size=size))
    return Workflow(
        "08-24-gb-lossless-streamed-against-int8",
        boxes(
            words,
            model(0, place="ram"),
            encoder(1),
            vaes(2),
            prompt(0, words="a blue square bounces, high beeps"),
            empty(1),
            quantised(2, "b"),
            *sides,
            filed("compare", 5, 0, "b", 4, (640, 1180)),
            label=f"{AB}, because its weights were quantised. Where weights lie never changes a label.",
        ),
        {
            **FRAMES,
            "a": "3 A: lossless, streamed",
            "b": "4 B: INT8",
            "plan": "What a card of 24 GiB holds",
            "save": "5 Compare",
        },
    )


def kept(letter: str, row: int, prefix: str, rows: int = 2, column: int = 4) -> Box:
    """Decode and save with the frames kept as before encoding."""
    made = save(column, row, prefix, (f"sampler {letter}", "latent"))
    return changed(made, name=f"save {letter}", group=letter, rows=rows, widgets={"keep_frames": True})


def filed(name: str, column: int, row: int, letter: str, rows: int = 2, size=(560, 900), group: str = "save") -> Box:
    """H3 Compare Videos of the saved clip of side A and that of another."""
    links = {"video_a": ("save a", "video"), "video_b": (f"save {letter}", "video")}
    title = f"{letter.upper()} against A: H3 Compare Videos"
    widgets = {"filename_prefix": f"h3/{name}"}
    return Box(name, "H3RuntimeCompareVideos", column, row, group, title, widgets, links, rows, size)


WAYS = (
    ("b", "INT8", "weights rounded to INT8"),
    ("c", "block cache", "blocks left out where the first of them changes little"),
    ("d", "forecast", "half of the steps foretold"),
    ("e", "few steps", "a few-step LoRA in place of 49 steps"),
)


def accelerated() -> Workflow:
    listed = "\n".join(f"- **{letter.upper()}** {way}: {what}" for letter, way, what in WAYS)
    words = f"""
# 09 Accelerated paths, side by side

One prompt, one seed, five ways. **A** is exact; each of the others is measured against it by an *H3 Compare Videos* \
of its own. Press **Run**.

{listed}

Each sampler says how long it took and what engaged. On the small model the times say little: it is too small for \
shortcuts to pay. With real weights they do, and what they cost is what this workflow shows.

**One at a time.** Select what is in a frame and press Ctrl+M to mute it.

{VIEWER}
"""

    def accelerate(letter: str, column: int, **widgets) -> Box:
        return Box(f"way {letter}", "H3RuntimeAccelerate", column, 1, letter, "", widgets)

    lora = Box(
        "lora",
        "H3RuntimeLoadLora",
        7,
        0,
        "e",
        "H3 Load LoRA (a few-step one)",
        {"lora": "small carried model, 4 steps"},
        {"model": ("model", "model")},
    )
    sources = {"b": ("fewer", "model"), "e": ("lora", "model")}
    columns = []
    for column, (letter, way) in enumerate([("a", "exact"), *((letter, way) for letter, way, _ in WAYS)], start=3):
        made = side(letter, way, 2, sources.get(letter, ("model", "model")), column, rows=1)
        if letter in "cde":
            made = changed(made, links={"acceleration": (f"way {letter}", "acceleration")})
        columns += [made, kept(letter, 3, f"h3/path_{letter}", 1, column)]
        if letter != "a":
            columns.append(filed(f"compare_{letter}", column, 4, letter, 1, group=letter))
    return Workflow(
        "09-accelerated-paths-side-by-side",
        boxes(
            words,
            model(0),
            encoder(1),
            vaes(2),
            prompt(0, words="a purple square moves up, middle tone"),
            empty(1),
            quantised(1, "b", 4),
            accelerate("c", 5, accelerator="block-cache"),
            accelerate("d", 6, accelerator="forecast", **{"accelerator.calls": 0.5}),
            lora,
            accelerate("e", 7, accelerator="few-step"),
            *columns,
            pickers="in *H3 Load Model*, *H3 Load Text Encoder* and *H3 Load VAEs*, and in *H3 Load LoRA* a few-step "
            "LoRA made for your weights (without one, mute frame E)",
            label=f"{AB}, C is APPROXIMATE, D is APPROXIMATE, E is APPROXIMATE.",
        ),
        {**FRAMES, "a": "A: exact", **{letter: f"{letter.upper()}: {way}, against A" for letter, way, _ in WAYS}},
    )


def tiles() -> Workflow:
    words = f"""
# 11 Tiled decode: the reference's tiles against others

A picture that is larger than 256 pixels is decoded in tiles that overlap and fade into each other. 256 is what the \
decoder was trained on, and what the reference does (**A**). Smaller tiles (**B**, 128) take less memory, one tile of \
the whole picture (**C**, 448) has no seams: both are other pictures than the reference's. Press **Run**: the clip \
of *H3 Sample Media* is encoded once and decoded three times.

The small model's decoder looks at each spot by itself, so that its three pictures are the same but for rounding. \
With the real VAE the difference shows: look at the seams in *difference*.

**Your clip.** Connect *Load Video* to *video* of *H3 Encode Video and Sound*, or the latent of an *H3 Sampler* to \
the decoders; then they carry its label.

{VIEWER}
"""
    latent = ("encoded", "latent")
    sound = {"audio_a": ("sound", "audio"), "audio_b": ("sound", "audio")}
    named = {"a": "256 px (reference)", "b": "128 px", "c": "448 px, one tile"}
    pictures = [
        changed(picture(letter, row, latent, tile=tile), title=f"{letter.upper()}: H3 Decode Video, tile {tile}")
        for letter, row, tile in (("a", 0, 256), ("b", 1, 128), ("c", 2, 448))
    ]
    pictures = [changed(box, group="render") for box in pictures]
    return Workflow(
        "11-tiled-decode-side-by-side",
        boxes(
            words,
            changed(vaes(0), row=0),
            media(1, width=448, height=256),
            encoded(3, 1),
            *pictures,
            changed(ears("a", 3, latent, name="sound"), group="render"),
            compared("compare_b", 5, 0, {"a": named["a"], "b": named["b"]}, **sound),
            compared("compare_c", 6, 0, {"a": named["a"], "c": named["c"]}, **sound),
            pickers="in *H3 Load VAEs*",
            size=CLIPS,
            label="No sampler ran, so there is no label of a render: A is what the reference decodes, B and C are "
            "APPROXIMATE, and say so.",
        ),
        {"weights": "1 Weights", "what": "2 A clip", "render": "3 Decode, three ways", "save": "4 Compare"},
    )


def against_server() -> Workflow:
    words = f"""
# 13 Here, lossless, against a server

**A** renders here. **B** asks a server of yours (SGLang or vLLM-Omni) for the same clip, with the same words, and \
*H3 Compare Videos* shows how far the two lie apart. Press **Run**: A runs. B is muted until there is a server.

**B.** Enter a server once (python -m h3_runtime engine list says where), press R and choose it in *H3 Render on a \
Server*. Select what is in frame B and in frame *Compare* and press Ctrl+M. A server has the real weights: choose \
them here as well before you compare, and write the same words on both sides. It draws its own noise, so that the \
same seed gives another clip there; its label says that nothing of it is verified here.

{VIEWER}
"""
    remote = Box(
        "save b",
        "H3RuntimeRemoteRender",
        3,
        2,
        "b",
        "B: H3 Render on a Server",
        {"prompt": PROMPT, "seconds": 5.167, "filename_prefix": "h3/server_b", **SEED},
        rows=2,
        size=(360, 720),
        muted=True,
    )
    return Workflow(
        "13-here-lossless-against-a-server",
        boxes(
            words,
            model(0),
            encoder(1),
            vaes(2),
            prompt(0),
            empty(1),
            side("a", "lossless", 0, ("model", "model")),
            kept("a", 0, "h3/here_a"),
            remote,
            changed(filed("compare", 5, 0, "b", 4, (640, 1180)), muted=True),
            label="As it stands: LOSSLESS, for A: the steps and shifts are the release's own. B has the label of its "
            "engine.",
        ),
        {**FRAMES, "a": "3 A: here, lossless", "b": "4 B: a server (muted)", "save": "5 Compare (muted)"},
    )
