"""What conditions a render: the prompt, first and last frame, guides at any frame, and saved prompts.

prompt ─▶ H3 Encode Prompt ──────────────────────┐
prompt + pictures ─▶ H3 First and Last Frame ────┼─▶ CONDITIONING ─▶ H3 Add Guide ─▶ H3 Add Guide ─▶ H3 Sampler
saved prompt ─▶ H3 Load Prompt Embeddings ───────┘
"""

from __future__ import annotations

from . import host
from .av_latent import take_latent
from .conditioning import (
    KEY,
    KEYFRAMES,
    REFERENCES,
    TAGS,
    CarriedGuide,
    add_guide,
    give_condition,
    give_guide,
    past,
)
from .media import take_clip, take_frames, take_media, take_sound
from .sockets import CATEGORY, Node, SavedFileNode, io
from .stand_ins import EncoderAsClip, encode_with_clip, is_ours, part_of

FOLDER = f"{CATEGORY}/condition"
SUFFIX = ".h3-condition.safetensors"
PLACES = ["frame", "seconds"]
RECIPES = ["reference", "comfy"]
PROMPT_TOOLTIP = (
    "What is seen and heard. Speech is written <d>[English] words</d>. The whole text is used, however long; what will "
    "not act as written is reported. There is no negative prompt: the model was trained without one."
)
CLIP_TOOLTIP = "The text encoder: H3 Load Text Encoder, or ComfyUI's own CLIP of MiniMax H3."
RECIPE_TOOLTIP = (
    "How pictures are sized and encoded. reference: as the release does, the exact baseline. comfy: as ComfyUI's own "
    "nodes do."
)


def prompt_input():
    return io.String.Input("prompt", multiline=True, dynamic_prompts=True, tooltip=PROMPT_TOOLTIP)


def recipe_input():
    return io.Combo.Input("recipe", optional=True, options=RECIPES, default="reference", tooltip=RECIPE_TOOLTIP)


def encode_request(request, clip, saved, video_vae=None, audio_vae=None):
    """(CONDITIONING, sentences) of a request with its pictures, by our encoder, the host's CLIP, or a saved prompt."""
    from ..h3_runtime import GraphModels, TextCondition, condition_shown, encode_media, refuse_other

    given = {"video_vae": part_of(video_vae, "video_vae"), "audio_vae": part_of(audio_vae, "audio_vae")}
    ours = clip if isinstance(clip, EncoderAsClip) else None
    models = GraphModels(text_encoder=ours, **given)
    carried = None if saved is None else saved[0][1].get(KEY)
    placement, job = encode_media(request, models)
    notes, foreign = list(placement.notes), any_foreign(video_vae, audio_vae)
    if carried is not None:
        refuse_other(carried.made, "the saved prompt", request.prompt, request.recipe, placement.shown)
        made, infos = carried.made, {**carried.infos, **models.infos}
    elif ours is not None:
        made = condition_shown(request, placement.shown, models)
        infos = models.infos
    else:
        conditioning, said = encode_with_clip(clip, request.prompt, items=host_items(placement.shown))
        text = TextCondition(conditioning[0][0][0].clone(), conditioning[0][1][TAGS].clone())
        _keep_pictures(conditioning, job, request, foreign)
        return conditioning, [*notes, *said, f"{len(text.tags)} rows, encoded by ComfyUI's CLIP"]
    return give_condition(made, infos, job, request, foreign), [*notes, *made.text.notes]


def any_foreign(*vaes) -> bool:
    """Whether one of the connected VAEs is not ours."""
    return any(vae is not None and not is_ours(vae) for vae in vaes)


def _keep_pictures(conditioning: list, job, request, foreign: bool) -> None:
    """Put the job's keyframes and references into a CONDITIONING of the host's CLIP."""
    from ..h3_runtime import MadeCondition

    ours = give_condition(MadeCondition(job.text, _NoRecord()), {}, job, request, foreign)[0][1]
    for key in (KEYFRAMES, REFERENCES):
        if key in ours:
            conditioning[0][1][key] = ours[key]


class _NoRecord:
    recipe = "reference"


def host_items(shown) -> list[dict] | None:
    """What stands before the prompt as the host's CLIP takes it."""
    import torch

    items = []
    for thing in shown:
        if thing.kind in ("sound", "clip with sound"):
            items.append({"type": "audio"})
        if thing.kind == "sound":
            continue
        data = torch.from_numpy(thing.pixels).float() / 255
        if thing.kind == "picture":
            items.append({"type": "image", "data": data})
        else:
            times = [time for pair in thing.timestamps for time in (pair, pair)][: len(data)]
            items.append({"type": "video", "data": data, "timestamps": times})
    return items or None


class EncodePrompt(Node):
    """Encode a prompt."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeEncodePrompt",
            display_name="H3 Encode Prompt",
            category=FOLDER,
            description="Turns a prompt into what the model reads. For pictures use H3 First and Last Frame or H3 "
            "References, which show them to the text encoder too.",
            search_aliases=["minimax h3 prompt", "clip text encode"],
            inputs=[io.Clip.Input("clip", tooltip=CLIP_TOOLTIP), prompt_input()],
            outputs=[io.Conditioning.Output(display_name="positive")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, clip, prompt):
        from ..h3_runtime import GraphModels, RenderRequest, condition_shown

        if not isinstance(clip, EncoderAsClip):
            conditioning, notes = encode_with_clip(clip, prompt)
            return cls.report(["encoded by ComfyUI's CLIP", *notes], conditioning)
        models = GraphModels(text_encoder=clip)
        made = condition_shown(RenderRequest(prompt), (), models)
        return cls.report(made.text.notes, give_condition(made, models.infos))


class FirstLastFrame(Node):
    """A prompt with its first and last frame."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeFirstLastFrame",
            display_name="H3 First and Last Frame",
            category=FOLDER,
            description="Encodes a prompt together with the picture the clip begins with, the one it ends with, "
            "or both. "
            "The first one given is stretched to the clip's size, the other is cropped to it; both are reported.",
            search_aliases=["minimax h3 image to video", "i2v", "keyframe"],
            inputs=[
                io.Clip.Input("clip", optional=True, tooltip=f"{CLIP_TOOLTIP} Not needed with a saved prompt."),
                io.Vae.Input("video_vae", tooltip="The video VAE, which encodes the pictures."),
                io.Latent.Input("latent", tooltip="The latent that will be rendered: its size and length are used."),
                prompt_input(),
                io.Image.Input("first_frame", optional=True, tooltip="The picture that the clip begins with."),
                io.Image.Input("last_frame", optional=True, tooltip="The picture that the clip ends with."),
                io.Conditioning.Input(
                    "saved",
                    optional=True,
                    tooltip="From H3 Load Prompt Embeddings: the same prompt and pictures, encoded before; the "
                    "text encoder "
                    "is not needed then.",
                ),
                recipe_input(),
            ],
            outputs=[io.Conditioning.Output(display_name="positive")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, video_vae, latent, prompt, clip=None, **options):
        from ..h3_runtime import H3Error, Media, RenderRequest

        taken = take_latent(latent)
        notes, pictures = list(taken.notes), {}
        for name in ("first_frame", "last_frame"):
            image = options.get(name)
            if image is not None:
                words = name.replace("_", " ")
                if len(image) > 1:
                    notes.append(f"{words}: the first of {len(image)} pictures is used")
                pictures[name] = Media(frames=take_frames(image[:1], words, notes), name=words)
        if not pictures:
            raise H3Error("no picture is connected: give a first frame, a last frame, or use H3 Encode Prompt")
        require_encoder(clip, options.get("saved"))
        request = RenderRequest(
            prompt,
            size=(taken.canvas.width, taken.canvas.height),
            frames=taken.canvas.num_frames,
            recipe=options.get("recipe", "reference"),
            **pictures,
        )
        conditioning, said = encode_request(request, clip, options.get("saved"), video_vae)
        return cls.report([*notes, *said], conditioning)


def require_encoder(clip, saved) -> None:
    from ..h3_runtime import H3Error

    if clip is None and saved is None:
        raise H3Error("no text encoder is connected: connect H3 Load Text Encoder, or a saved prompt")
    if saved is not None and KEY not in saved[0][1]:
        raise H3Error("the input saved takes the output of H3 Load Prompt Embeddings only")


class AddGuide(Node):
    """Hold a picture, clip or sound at a frame."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeAddGuide",
            display_name="H3 Add Guide",
            category=FOLDER,
            description="Holds a picture, a clip, a sound, or a clip with its sound at any frame or second of "
            "the video. "
            "Chain one node per guide; their order does not matter.",
            search_aliases=["minimax h3 add guide", "keyframe", "storyboard"],
            inputs=[
                io.Conditioning.Input(
                    "positive", tooltip="The prompt's conditioning, or that of another H3 Add Guide."
                ),
                io.Latent.Input("latent", tooltip="The latent that will be rendered: its size and length are used."),
                io.Combo.Input(
                    "at",
                    optional=True,
                    options=PLACES,
                    default="frame",
                    tooltip="Whether the guide is placed by its frame or by its time.",
                ),
                io.Int.Input(
                    "frame",
                    optional=True,
                    default=0,
                    min=-9999,
                    max=9999,
                    tooltip="The frame where the guide begins (at = frame). Negative: counted from the end, -1 "
                    "is the last.",
                ),
                io.Float.Input(
                    "seconds",
                    optional=True,
                    default=0.0,
                    min=0.0,
                    max=600.0,
                    step=0.01,
                    tooltip="The second where the guide begins (at = seconds); the nearest frame is taken.",
                ),
                io.Float.Input(
                    "strength",
                    optional=True,
                    default=1.0,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    tooltip="1 holds it as it is. Less mixes it with noise, and the model may leave it further.",
                ),
                io.Vae.Input("video_vae", optional=True, tooltip="The video VAE, for a picture or clip."),
                io.Vae.Input("audio_vae", optional=True, tooltip="The audio VAE, for sound."),
                io.Image.Input(
                    "image",
                    optional=True,
                    tooltip="A picture, or the frames of a clip. Clips are cut to 17k + 5 frames; fewer than 5 "
                    "count as one.",
                ),
                io.Audio.Input("audio", optional=True, tooltip="Sound from the same frame on; cut at the clip's end."),
                io.Video.Input(
                    "video",
                    optional=True,
                    tooltip="A clip with its sound, in place of image and audio; any frame rate.",
                ),
                io.Float.Input(
                    "fps",
                    optional=True,
                    default=24.0,
                    min=1.0,
                    max=240.0,
                    step=0.001,
                    tooltip="Frames a second of the clip in image; other rates than 24 are put on 24.",
                ),
                recipe_input(),
            ],
            outputs=[io.Conditioning.Output(display_name="positive")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, positive, latent, at="frame", strength=1.0, **options):
        from ..h3_runtime import GraphModels, GuideRequest, RenderRequest, encode_media

        taken = take_latent(latent)
        notes = list(taken.notes)
        media = cls._media(options, notes)
        place = {"frame": options.get("frame", 0)} if at == "frame" else {"seconds": options.get("seconds", 0.0)}
        asked = GuideRequest(media, strength=strength, **place)
        request = RenderRequest(
            "",
            size=(taken.canvas.width, taken.canvas.height),
            frames=taken.canvas.num_frames,
            guides=(asked,),
            recipe=options.get("recipe", "reference"),
        )
        models = GraphModels(
            video_vae=part_of(options.get("video_vae"), "video_vae"),
            audio_vae=part_of(options.get("audio_vae"), "audio_vae"),
        )
        placement, job = encode_media(request, models)
        guide = job.guides[0]
        held = [] if guide.video is None else [f"{guide.video.shape[2]} latents of picture"]
        held += [] if guide.audio is None else [f"{guide.audio.shape[3]} of sound"]
        notes += [*placement.notes, f"{media.name} at frame {guide.frame_index}: {', '.join(held)}"]
        foreign = any_foreign(options.get("video_vae"), options.get("audio_vae"))
        mark = CarriedGuide(past(media), strength, foreign=foreign, recipe=request.recipe, infos=models.infos)
        entry = give_guide(guide, mark)
        return cls.report(notes, add_guide(positive, entry))

    @staticmethod
    def _media(options: dict, notes: list[str]):
        from ..h3_runtime import H3Error, Media

        image, audio, video = (options.get(name) for name in ("image", "audio", "video"))
        if video is not None:
            if image is not None or audio is not None:
                raise H3Error("connect either a video, or an image and a sound: not both")
            return take_media(video, "guide video", notes)
        if image is None and audio is None:
            raise H3Error("nothing to hold is connected: give an image, a sound or a video")
        name = "guide sound" if image is None else "guide picture" if len(image) < 5 else "guide clip"
        frames = None if image is None else take_clip(image, options.get("fps", 24.0), name, notes)
        return Media(frames=frames, audio=take_sound(audio, name, notes), name=name)


class SaveEmbeddings(Node):
    """Keep an encoded prompt in a file."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeSavePrompt",
            display_name="H3 Save Prompt Embeddings",
            category=FOLDER,
            description="Saves an encoded prompt, so that the text encoder need not be loaded for it again. The file "
            "records what it was made from: prompt, pictures and references by content.",
            search_aliases=["save conditioning", "cache prompt"],
            inputs=[
                io.Conditioning.Input("positive", tooltip="A prompt encoded by our text encoder."),
                io.String.Input(
                    "filename_prefix",
                    optional=True,
                    default="h3/prompt",
                    tooltip="Name below the output folder; a number is added.",
                ),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive", tooltip="The prompt, unchanged."),
                SavedFileNode.saved_output(),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, positive, filename_prefix="h3/prompt"):
        from ..h3_runtime import H3Error, save_condition

        carried = positive[0][1].get(KEY)
        if carried is None:
            raise H3Error("this prompt was encoded by another program's node: encode it with H3 Load Text Encoder")
        path, shown = host.output_file(filename_prefix, SUFFIX)
        save_condition(path, carried.made)
        notes = [f"saved {path.name}: {len(carried.made.text.tags)} rows"]
        for key, what in ((KEYFRAMES, "pictures and guides"), (REFERENCES, "references")):
            if positive[0][1].get(key):
                notes.append(f"the file holds the prompt's rows; its {what} are connected again when it is loaded")
        return cls.report(notes, positive, host.saved_name(shown), ui={"text": [path.name]})


class LoadEmbeddings(SavedFileNode):
    """Read an encoded prompt from a file."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeLoadPrompt",
            display_name="H3 Load Prompt Embeddings",
            category=FOLDER,
            description="Reads a prompt that H3 Save Prompt Embeddings kept: no text encoder is loaded. A "
            "prompt that was "
            "encoded with pictures goes into the input saved of the node that takes those pictures.",
            search_aliases=["load conditioning"],
            inputs=[cls.saved_input(SUFFIX)],
            outputs=[
                io.Conditioning.Output(display_name="positive"),
                io.String.Output("prompt", display_name="prompt", tooltip="The text it was made from."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, file):
        from ..h3_runtime import encoder_of_record, load_condition

        path = cls.opened(file)
        made = load_condition(path)
        notes = [*made.text.notes, f"made by {made.record.encoder}"]
        if made.record.items:
            names = ", ".join(item["kind"] for item in made.record.items)
            notes.append(f"it was encoded with {names}: connect it to the input saved of the node that takes them")
        info = encoder_of_record(made, path)
        return cls.report(notes, give_condition(made, {"text_encoder": info}), made.record.prompt)


NODES = [EncodePrompt, FirstLastFrame, AddGuide, SaveEmbeddings, LoadEmbeddings]
