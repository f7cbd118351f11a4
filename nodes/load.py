"""Loaders: a file is chosen and checked here, and read when it is first needed.

file of the host's folders, or the small carried model ──▶ Part (header checked) ──▶ H3_MODEL, CLIP, VAE
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from . import host
from .sockets import CATEGORY, LOADER, H3Model, Node, io, wrong_type
from .stand_ins import EncoderAsClip, PictureAsVae, SoundAsVae

FOLDER = f"{CATEGORY}/load"
CARRIED = "small carried model"
CARRIED_LORA = "small carried model, 4 steps"
CARRIED_FILES = {
    "dit": "dit.safetensors",
    "text_encoder": "text_encoder.safetensors",
    "video_vae": "video_vae.safetensors",
    "audio_vae": "audio_vae.safetensors",
}
FOLDERS = {
    "dit": ("diffusion_models",),
    "text_encoder": ("text_encoders",),
    "video_vae": ("vae",),
    "audio_vae": ("vae",),
}
PRECISIONS = ["as stored", "float32", "bfloat16"]
LAYOUTS = ["detect", "official", "diffusers", "comfyui"]
QUANTISE = ["no", "int8_convrot", "int8", "fp8"]
METHODS = QUANTISE[1:]
PLACES = ["auto", "resident", "ram", "disk"]
PICK = "The small carried model needs no download: it knows one coloured shape on grey and its tones."


def quantise_input(which: str = ""):
    """The widget of a loader; ``which`` weights it is about, where a file holds others."""
    return io.Combo.Input(
        "quantise",
        optional=True,
        options=QUANTISE,
        default="no",
        tooltip=f"Quantise {which or 'the'} weights while they are loaded: less memory, another result (labelled).",
    )


def asked_of(word: str, method: str) -> str | None:
    """The widget's method for the part ``word``, as the runtime takes it."""
    return None if method == "no" else f"{word}={method}"


def choices(kind: str) -> list[str]:
    return [CARRIED, *host.folder_files(*FOLDERS[kind])]


def carried_folder() -> Path:
    """Where the small model lies that the package carries."""
    from ..h3_runtime import CARRIED_MODEL

    return CARRIED_MODEL


def path_of(kind: str, name: str) -> Path | None:
    """The file behind a picker's entry; None where it is gone."""
    if name == CARRIED:
        return carried_folder() / CARRIED_FILES[kind]
    return host.find_file(FOLDERS[kind][0], name, *FOLDERS[kind][1:])


def check_choice(kind: str, name: str | None) -> bool | str:
    """For validate_inputs: the sentence about a file that is not there."""
    if name in (None, CARRIED) or host.find_file(FOLDERS[kind][0], name, *FOLDERS[kind][1:]):
        return True
    return host.missing_file(FOLDERS[kind][0], name)


def settled_precision(name: str, precision: str) -> str:
    """The number type that a widget means: bf16 on a CPU is slow, and the small model has nothing to lose."""
    if name == CARRIED and precision == "as stored" and host.compute_device().type == "cpu":
        return "float32"
    return precision


def place_input():
    """The widget about where the DiT's blocks live."""
    return io.Combo.Input(
        "place",
        optional=True,
        options=PLACES,
        default=PLACES[0],
        tooltip="Where the blocks live: resident on the card, or streamed to it from RAM or disk. The result is the "
        "same to the bit; auto takes the fastest that fits.",
    )


def placement_of(place: str, converted: str = ""):
    """The Placement that the widget means, with the folder for converted blocks; None: the plan decides."""
    from ..h3_runtime import Placement

    return None if place == PLACES[0] else Placement(place, adaln=place, converted=converted)


def loading_of(kind: str, quantise: str, place: str = "auto", keep_converted: bool = False):
    """How the weights of a part are brought in, as the widgets of its loader say it."""
    from ..h3_runtime import H3Error, Loading

    converted = str(host.converted_folder()) if keep_converted else ""
    if converted and place in ("resident", "ram"):
        raise H3Error(
            f"keep_converted is for blocks from disk, and place is {place}: switch it off, or take disk or auto"
        )
    placement = placement_of(place, converted)
    word = "text" if kind == "text_encoder" else kind
    return Loading(quantise=asked_of(word, quantise), placement=placement, converted=converted)


def make_folder(folder: Path) -> None:
    from ..h3_runtime import H3Error

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise H3Error(f"{folder} cannot be made ({error.strerror}): switch keep_converted off") from None


def open_part(kind: str, name: str, precision: str = "as stored", layout: str = "detect", loading=None):
    """(Part on the device that suits it, sentences)."""
    from ..h3_runtime import H3Error, Part

    path = path_of(kind, name)
    if path is None:
        raise H3Error(host.missing_file(FOLDERS[kind][0], name))
    precision = settled_precision(name, precision)
    part = Part.open(
        kind,
        path,
        precision,
        layout=None if layout == "detect" else layout,
        vocabulary=host.vocabulary_folder() if kind == "text_encoder" else None,
        embedding_folders=host.embedding_folders() if kind == "text_encoder" else (),
        loading=loading,
    )
    part.place(host.compute_device())
    return part, [f"{part.name}: {part.size / 2**30:.2f} GiB, {precision}, for {part.device}; read when it is needed"]


@lru_cache(maxsize=32)
def foreseen_part(
    kind: str,
    name: str,
    stamp: str,
    precision: str = "as stored",
    layout: str = "detect",
    quantise: str = "no",
    place: str = "auto",
    keep_converted: bool = False,
):
    """A Part to foresee with, apart from those that run: nothing is ever loaded into it. ``stamp`` changes when the
    file does."""
    loading = None if kind == "audio_vae" else loading_of(kind, quantise, place, keep_converted)
    return open_part(kind, name, precision, layout, loading)[0]


@lru_cache(maxsize=32)
def foreseen_with_lora(part, name: str, stamp: str, strength: float):
    """``part`` with one more LoRA of the host's folder; ``stamp`` as above."""
    from ..h3_runtime import H3Error, Lora

    path = lora_path(name)
    if path is None:
        raise H3Error(host.missing_file("loras", name))
    return part.with_lora(Lora(path, strength))


@lru_cache(maxsize=32)
def foreseen_quantised(part, method: str, place: str):
    """``part`` quantised, to foresee with."""
    return part.quantised(method, placement_of(place))


def lora_path(name: str) -> Path | None:
    """The file behind the LoRA picker's entry; None where it is gone."""
    from ..h3_runtime import FEW_STEP_LORA

    return FEW_STEP_LORA if name == CARRIED_LORA else host.find_file("loras", name)


def lora_stamp(name: str) -> str:
    """What changes when that file does."""
    return name if name == CARRIED_LORA else host.stamp(host.find_file("loras", name))


def file_stamp(kind: str, name: str | None) -> str:
    return str(name) if name in (None, CARRIED) else host.stamp(host.find_file(FOLDERS[kind][0], name))


class LoadModel(Node):
    """Choose the DiT."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeLoadModel",
            display_name=LOADER,
            category=FOLDER,
            description="Chooses the MiniMax H3 model (DiT) that the H3 Sampler runs. Any layout in circulation is "
            "read: official and diffusers shards, ComfyUI files, GGUF. Its weights are read when they are first "
            "needed.",
            search_aliases=["minimax h3 loader", "unet loader", "load diffusion model"],
            inputs=[
                io.Combo.Input("model", options=choices("dit"), tooltip=f"A file in models/diffusion_models. {PICK}"),
                io.Combo.Input(
                    "precision",
                    optional=True,
                    options=PRECISIONS,
                    default="as stored",
                    tooltip="as stored: the number type of the file, the exact baseline. float32: weights cast "
                    "up, twice "
                    "the memory. bfloat16: weights rounded where the file holds more.",
                ),
                io.Combo.Input(
                    "layout",
                    optional=True,
                    options=LAYOUTS,
                    default="detect",
                    tooltip="Only for a file whose layout cannot be told from its tensors; detect otherwise.",
                ),
                quantise_input(),
                place_input(),
                io.Boolean.Input(
                    "keep_converted",
                    optional=True,
                    default=False,
                    tooltip="For blocks from disk whose bytes need work first (quantised here, or reordered): done "
                    "once and kept in models/h3_converted, a file as large as the weights, in place of anew at every "
                    "step.",
                ),
            ],
            outputs=[H3Model.Output(display_name="model")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, model=None):
        return check_choice("dit", model)

    @classmethod
    def fingerprint_inputs(cls, model=None, **others):
        return file_stamp("dit", model)

    @classmethod
    @host.runtime_mode
    def execute(cls, model, precision="as stored", layout="detect", quantise="no", place="auto", keep_converted=False):
        loading = loading_of("dit", quantise, place, keep_converted)
        if loading.converted:
            make_folder(Path(loading.converted))
        part, notes = open_part("dit", model, precision, layout, loading)
        partition = {
            "fl2va": "FL2VA weights (text, first and last frame, guides)",
            "ref2va": "Ref2VA weights (references)",
            "both": "weights for text, first and last frame, guides and references",
        }.get(part.partition, "weights of an unknown partition: FL2VA or Ref2VA cannot be told from this file")
        return cls.report([partition, *notes], part)


class LoadTextEncoder(Node):
    """Choose the text encoder."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeLoadTextEncoder",
            display_name="H3 Load Text Encoder",
            category=FOLDER,
            description="Chooses MiniMax H3's text encoder (Qwen3-VL). It plugs into our nodes and into ComfyUI's own "
            "CLIP inputs, its H3 nodes included.",
            search_aliases=["minimax h3 clip", "load clip", "qwen3-vl"],
            inputs=[
                io.Combo.Input(
                    "text_encoder",
                    options=choices("text_encoder"),
                    tooltip=f"A file in models/text_encoders. {PICK} It goes with the carried model only.",
                ),
                io.Combo.Input(
                    "precision",
                    optional=True,
                    options=PRECISIONS,
                    default="as stored",
                    tooltip="as stored: the number type of the file, the exact baseline. float32: weights cast up.",
                ),
                quantise_input("its layers'"),
            ],
            outputs=[io.Clip.Output(display_name="clip")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, text_encoder=None):
        return check_choice("text_encoder", text_encoder)

    @classmethod
    def fingerprint_inputs(cls, text_encoder=None, **others):
        return file_stamp("text_encoder", text_encoder)

    @classmethod
    @host.runtime_mode
    def execute(cls, text_encoder, precision="as stored", quantise="no"):
        from ..h3_runtime import Loading

        loading = Loading(quantise=asked_of("text", quantise))
        part, notes = open_part("text_encoder", text_encoder, precision, loading=loading)
        return cls.report(notes, EncoderAsClip(part))


class LoadVaes(Node):
    """Choose both VAEs."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeLoadVaes",
            display_name="H3 Load VAEs",
            category=FOLDER,
            description="Chooses the video VAE and the audio VAE. Both plug into our nodes and into ComfyUI's own VAE "
            "inputs (VAE Encode, VAE Decode, tiled or not, VAE Decode Audio, its H3 nodes).",
            search_aliases=["minimax h3 vae", "load vae"],
            inputs=[
                io.Combo.Input(
                    "video_vae",
                    options=choices("video_vae"),
                    tooltip="A file in models/vae. float32 is the exact one; a half precision file is "
                    f"labelled. {PICK}",
                ),
                io.Combo.Input(
                    "audio_vae",
                    options=choices("audio_vae"),
                    tooltip="A file in models/vae: the audio VAE of MiniMax H3, in float32.",
                ),
                quantise_input("the video VAE decoder's"),
            ],
            outputs=[
                io.Vae.Output("video", display_name="video vae"),
                io.Vae.Output("audio", display_name="audio vae"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, video_vae=None, audio_vae=None):
        wrong = [check_choice("video_vae", video_vae), check_choice("audio_vae", audio_vae)]
        return next((sentence for sentence in wrong if sentence is not True), True)

    @classmethod
    def fingerprint_inputs(cls, video_vae=None, audio_vae=None, **others):
        return file_stamp("video_vae", video_vae) + file_stamp("audio_vae", audio_vae)

    @classmethod
    @host.runtime_mode
    def execute(cls, video_vae, audio_vae, quantise="no"):
        from ..h3_runtime import Loading

        picture, said = open_part("video_vae", video_vae, loading=Loading(quantise=asked_of("video_vae", quantise)))
        sound, more = open_part("audio_vae", audio_vae)
        return cls.report([*said, *more], PictureAsVae(picture), SoundAsVae(sound))


class LoadLora(Node):
    """Put a LoRA on the model."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeLoadLora",
            display_name="H3 Load LoRA",
            category=FOLDER,
            description="Puts a LoRA of any circulated layout on the model; chain several to stack them. The sampler "
            "reports what of it was applied, and what was not and why.",
            search_aliases=["minimax h3 lora", "turbo"],
            inputs=[
                H3Model.Input("model", tooltip=f"The model of {LOADER}, or of another H3 Load LoRA."),
                io.Combo.Input(
                    "lora",
                    options=[CARRIED_LORA, *host.folder_files("loras")],
                    tooltip="A file in models/loras, made for MiniMax H3; the first entry goes with the small carried "
                    "model alone.",
                ),
                io.Float.Input(
                    "strength",
                    optional=True,
                    default=1.0,
                    min=-10.0,
                    max=10.0,
                    step=0.05,
                    tooltip="1 is as trained, 0 switches it off.",
                ),
            ],
            outputs=[H3Model.Output(display_name="model")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, input_types, lora=None):
        if lora is not None and lora_path(lora) is None:
            return host.missing_file("loras", lora)
        return wrong_type(input_types, {"model": "H3_MODEL"}, {"model": host_model_refused()})

    @classmethod
    def fingerprint_inputs(cls, lora=None, **others):
        return "" if lora is None else lora_stamp(lora)

    @classmethod
    @host.runtime_mode
    def execute(cls, model, lora, strength=1.0):
        from ..h3_runtime import H3Error, Lora, open_lora

        require_model(model)
        path = lora_path(lora)
        if path is None:
            raise H3Error(host.missing_file("loras", lora))
        file = open_lora(path)
        notes = [f"{file.name}: layout {file.layout}, {len(file.pairs)} pairs", *file.warnings(model.partition)]
        if file.preset is not None:
            preset = file.preset
            notes.append(
                f"made for {preset.forwards} steps, shifts {preset.video_shift} and {preset.audio_shift}: set the "
                "sampler so"
            )
        return cls.report(notes, model.with_lora(Lora(path, strength)))


class QuantiseModel(Node):
    """The model once more, in fewer bits."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeQuantise",
            display_name="H3 Quantise Model",
            category=FOLDER,
            description="The same model in fewer bits, for the second side of a comparison: one H3 Load Model serves "
            "both. Its weights are read and quantised when they are first needed, after those of the other side have "
            "left the memory.",
            search_aliases=["int8", "fp8", "quantize", "convrot"],
            inputs=[
                H3Model.Input("model", tooltip=f"The model of {LOADER} or H3 Load LoRA, as it is stored."),
                io.Combo.Input(
                    "quantise",
                    optional=True,
                    options=METHODS,
                    default=METHODS[0],
                    tooltip="The number format: less memory, another result (labelled). A file that is quantised "
                    "already is refused.",
                ),
                place_input(),
            ],
            outputs=[H3Model.Output(display_name="model")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, input_types):
        return wrong_type(input_types, {"model": "H3_MODEL"}, {"model": host_model_refused()})

    @classmethod
    @host.runtime_mode
    def execute(cls, model, quantise=METHODS[0], place=PLACES[0]):
        require_model(model)
        part = model.quantised(quantise, placement_of(place))
        return cls.report([f"{part.name}: {quantise}, quantised when it is needed"], part)


def host_model_refused() -> str:
    return (
        "this input takes the runtime's own H3_MODEL, and ComfyUI's MODEL was connected: load the file with the node "
        f"{LOADER} (ComfyUI's model belongs to ComfyUI's sampler; latents and conditioning can be shared)"
    )


def require_model(model) -> None:
    """H3Error, naming our loader, for anything that is not a model of ours."""
    from ..h3_runtime import H3Error, Part

    if not isinstance(model, Part) or model.kind != "dit":
        raise H3Error(host_model_refused())


NODES = [LoadModel, LoadTextEncoder, LoadVaes, LoadLora, QuantiseModel]
