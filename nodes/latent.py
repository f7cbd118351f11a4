"""Latents of picture and sound: made empty, made from a clip, saved, loaded, taken apart and put together.

seconds, ratio, megapixels ─▶ H3 Empty Latent ────────────┐
frames + sound ─▶ H3 Encode Video and Sound ──────────────┼─▶ LATENT ─▶ H3 Sampler ─▶ H3 Save Latent
file ─▶ H3 Load Latent ───────────────────────────────────┘
LATENT ─▶ H3 Split Latent ─▶ picture, sound ─▶ H3 Join Latent
"""

from __future__ import annotations

from functools import lru_cache

import torch

from . import host
from .av_latent import KEY, empty_clip, give_latent, take_latent
from .media import take_clip, take_media, take_sound
from .sockets import CATEGORY, GONE, Node, SavedFileNode, intermediate, io, samples_of
from .stand_ins import part_of

FOLDER = f"{CATEGORY}/latent"
SUFFIX = ".h3-latent.safetensors"
RATIOS = ["16:9", "9:16", "1:1", "4:3", "3:4", "3:2", "2:3", "21:9", "9:21"]
FPS = 24


def size_outputs():
    return [
        io.Int.Output("width", display_name="width"),
        io.Int.Output("height", display_name="height"),
        io.Int.Output("frames", display_name="frames"),
    ]


def described(canvas) -> str:
    return (
        f"{canvas.width}x{canvas.height}, {canvas.num_frames} frames = {canvas.seconds:.3f} s at {FPS} fps "
        f"({canvas.latent_t} latents of picture, {canvas.audio_t} of sound)"
    )


def canvas_of(seconds=5.167, ratio="16:9", megapixels=0.0, width=0, height=0, frames=0):
    """The canvas that the widgets of H3 Empty Latent ask for. H3Error for one that cannot be."""
    from ..h3_runtime import Canvas, H3Error

    if bool(width) != bool(height):
        raise H3Error(f"width is {width} and height {height}: give both, or 0 for both to use the ratio")
    count = frames or max(1, round(seconds * FPS))
    if width:
        return Canvas.fit(count, (width, height))
    sides = tuple(int(side) for side in ratio.split(":"))
    return Canvas.fit(count, None, sides, megapixels or None)


@lru_cache(maxsize=16)
def saved_canvas(name: str, stamp: str):
    """(canvas, whether it is a finished clip) of a saved latent; ``stamp`` changes when the file does."""
    from ..h3_runtime import H3Error, load_latent

    path = host.saved_file(name)
    if path is None:
        raise H3Error(GONE.format(name))
    saved = load_latent(path)
    return saved.canvas, saved.finished


class EmptyLatent(Node):
    """An empty clip of picture and sound."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeEmptyLatent",
            display_name="H3 Empty Latent",
            category=FOLDER,
            description="An empty latent of picture and sound: choose a length and a shape. Lengths are 17k + 5 "
            "frames at "
            "24 a second (5 to 15 seconds are what the model was trained on), sides multiples of 32.",
            search_aliases=["empty minimax h3 latent", "resolution", "duration"],
            inputs=[
                io.Float.Input(
                    "seconds",
                    optional=True,
                    default=5.167,
                    min=0.04,
                    max=150.0,
                    step=0.001,
                    tooltip="Length; raised to the next 17k + 5 frames (124 frames = 5.167 s). The shortest is "
                    "5 frames.",
                ),
                io.Combo.Input(
                    "ratio",
                    optional=True,
                    options=RATIOS,
                    default="16:9",
                    tooltip="Width to height. With megapixels 0 the size is the one the model was trained on.",
                ),
                io.Float.Input(
                    "megapixels",
                    optional=True,
                    default=0.0,
                    min=0.0,
                    max=64.0,
                    step=0.01,
                    tooltip="Area in million pixels; 0: the trained size of this ratio (1344x768 for 16:9).",
                ),
                io.Int.Input(
                    "width",
                    optional=True,
                    default=0,
                    min=0,
                    max=8192,
                    step=32,
                    tooltip="An exact width in place of ratio and megapixels, with height; 0: not used.",
                ),
                io.Int.Input(
                    "height",
                    optional=True,
                    default=0,
                    min=0,
                    max=8192,
                    step=32,
                    tooltip="An exact height in place of ratio and megapixels, with width; 0: not used.",
                ),
                io.Int.Input(
                    "frames",
                    optional=True,
                    default=0,
                    min=0,
                    max=3600,
                    tooltip="An exact number of frames in place of seconds, raised to the next 17k + 5; 0: not used.",
                ),
            ],
            outputs=[io.Latent.Output(display_name="latent"), *size_outputs()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, seconds=5.167, ratio="16:9", megapixels=0.0, width=0, height=0, frames=0):
        canvas = canvas_of(seconds, ratio, megapixels, width, height, frames)
        latent = give_latent(empty_clip(canvas))
        del latent[KEY]  # an empty latent has nothing to tell
        notes = [described(canvas), *canvas.notes]
        return cls.report(notes, latent, canvas.width, canvas.height, canvas.num_frames)


class EncodeClip(Node):
    """A clip with its sound as a latent."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeEncodeClip",
            display_name="H3 Encode Video and Sound",
            category=FOLDER,
            description="Encodes a clip and its sound to a latent: to keep parts of it (H3 Noise Masks), to "
            "start from it "
            "(denoise below 1), or to make it longer (H3 Extend Clip).",
            search_aliases=["vae encode video", "video to latent"],
            inputs=[
                io.Vae.Input("video_vae", tooltip="The video VAE."),
                io.Vae.Input("audio_vae", tooltip="The audio VAE."),
                io.Image.Input("images", optional=True, tooltip="The frames of the clip."),
                io.Audio.Input("audio", optional=True, tooltip="Its sound; silence stands where there is none."),
                io.Video.Input(
                    "video",
                    optional=True,
                    tooltip="A clip with its sound, in place of images and audio; any frame rate.",
                ),
                io.Latent.Input(
                    "size_of",
                    optional=True,
                    tooltip="A latent whose size and length the clip is fitted to; else its own are used, as near as "
                    "possible.",
                ),
                io.Float.Input(
                    "fps",
                    optional=True,
                    default=24.0,
                    min=1.0,
                    max=240.0,
                    step=0.001,
                    tooltip="Frames a second of images; other rates than 24 are put on 24.",
                ),
            ],
            outputs=[io.Latent.Output(display_name="latent"), *size_outputs()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, video_vae, audio_vae, images=None, audio=None, video=None, **options):
        from ..h3_runtime import GraphModels, H3Error, Media, RenderRequest, encode_media

        notes: list[str] = []
        if video is not None:
            if images is not None or audio is not None:
                raise H3Error("connect either a video, or images and a sound: not both")
            media = take_media(video, "clip", notes)
        elif images is None:
            raise H3Error("no clip is connected: give images or a video")
        else:
            frames = take_clip(images, options.get("fps", 24.0), "clip", notes)
            media = Media(frames=frames, audio=take_sound(audio, "clip", notes), name="clip")
        asked = {}
        if options.get("size_of") is not None:
            canvas = take_latent(options["size_of"]).canvas
            asked = {"size": (canvas.width, canvas.height), "frames": canvas.num_frames}
        models = GraphModels(video_vae=part_of(video_vae, "video_vae"), audio_vae=part_of(audio_vae, "audio_vae"))
        placement, job = encode_media(RenderRequest("", source=media, **asked), models)
        canvas = placement.canvas
        notes = [described(canvas), *notes, *placement.notes]
        return cls.report(notes, give_latent(job.source), canvas.width, canvas.height, canvas.num_frames)


class SaveLatent(Node):
    """Keep a latent of picture and sound in a file."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeSaveLatent",
            display_name="H3 Save Latent",
            category=FOLDER,
            description="Saves both streams in one file with size, length and the run they come from: a "
            "finished clip to "
            "decode later, or the state of a run that was stopped part-way (stop_step) to go on with.",
            search_aliases=["save av latent"],
            inputs=[
                io.Latent.Input("latent", tooltip="The latent to keep."),
                io.String.Input(
                    "filename_prefix",
                    optional=True,
                    default="h3/latent",
                    tooltip="Name below the output folder; a number is added.",
                ),
            ],
            outputs=[
                io.Latent.Output(display_name="latent", tooltip="The latent, unchanged."),
                SavedFileNode.saved_output(),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, latent, filename_prefix="h3/latent"):
        from ..h3_runtime import H3Error, describe_latent, save_latent

        taken = take_latent(latent)
        if taken.clip is None:
            raise H3Error("the latent is empty: there is nothing to save yet; connect the sampler's")
        path, shown = host.output_file(filename_prefix, SUFFIX)
        carried = taken.carried
        about = {"finished": True, "fps": FPS}
        source = None
        if carried is not None:
            about |= {**carried.info, "finished": carried.finished}
            source = carried.source
            if carried.overlap is not None:
                about["overlap"] = carried.overlap
            if carried.result is not None:
                about |= describe_latent(carried.result)
        save_latent(path, taken.canvas, taken.clip, source, **about)
        notes = [f"saved {path.name}: {described(taken.canvas)}"]
        if not about["finished"]:
            notes.append(f"a state after forward {carried.stop}: go on with start_step {carried.stop}")
        if taken.masks is not None:
            notes.append("its mask is not saved: connect H3 Noise Masks again after loading")
        return cls.report(notes, latent, host.saved_name(shown), ui={"text": [path.name]})


class LoadLatent(SavedFileNode):
    """Read a latent of picture and sound from a file."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeLoadLatent",
            display_name="H3 Load Latent",
            category=FOLDER,
            description="Reads what H3 Save Latent kept, or what the command line saved.",
            search_aliases=["load av latent"],
            inputs=[cls.saved_input(SUFFIX, ".latent.safetensors")],
            outputs=[io.Latent.Output(display_name="latent"), *size_outputs()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, file):
        from ..h3_runtime import load_latent

        saved = load_latent(cls.opened(file))
        stop = int(saved.info.get("stop", 0))
        notes = [described(saved.canvas)]
        if "label" in saved.info:
            notes.append(f"its render was {saved.info['label']}")
        if not saved.finished:
            notes.append(f"the state of a run after forward {stop}: set the sampler's start_step to {stop}")
        latent = give_latent(
            saved.latent,
            finished=saved.finished,
            stop=stop,
            source=saved.source,
            overlap=saved.info.get("overlap"),
            info=saved.info,
        )
        canvas = saved.canvas
        return cls.report(notes, latent, canvas.width, canvas.height, canvas.num_frames)


class SplitLatent(Node):
    """Picture and sound apart."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeSplitLatent",
            display_name="H3 Split Latent",
            category=FOLDER,
            description="Takes a latent apart into its picture and its sound, for nodes that know one stream only.",
            inputs=[io.Latent.Input("latent", tooltip="A latent of picture and sound.")],
            outputs=[
                io.Latent.Output("picture", display_name="picture", tooltip="[1, 24, T, h, w]"),
                io.Latent.Output("sound", display_name="sound", tooltip="[1, 32, 2, A]"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, latent):
        from ..h3_runtime import H3Error

        streams = samples_of(latent)
        if len(streams) != 2:
            raise H3Error("the latent holds one stream only: there is nothing to take apart")
        notes = ["its masks are left out"] if latent.get("noise_mask") is not None else []
        picture, sound = ({"samples": intermediate(stream.float())} for stream in streams)
        return cls.report(notes, picture, sound)


class JoinLatent(Node):
    """Picture and sound together."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeJoinLatent",
            display_name="H3 Join Latent",
            category=FOLDER,
            description="Puts a picture and a sound into one latent. Each may also come out of a latent that "
            "has both: the "
            "picture of one, the sound of the other.",
            inputs=[
                io.Latent.Input("picture", tooltip="A latent with a picture."),
                io.Latent.Input("sound", tooltip="A latent with sound, of the same length."),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, picture, sound):
        from ..h3_runtime import AVLatent, H3Error, audio_latents, whole_frames

        video, audio = samples_of(picture)[0].float(), samples_of(sound)[-1].float()
        clip = AVLatent(video, audio)
        needed = audio_latents(whole_frames(video.shape[2]))
        notes = []
        have = audio.shape[3]
        if have != needed:
            if abs(have - needed) > 2:
                raise H3Error(
                    f"the sound has {have} latents ({have / 40:.3f} s) and the picture needs {needed} "
                    f"({needed / 40:.3f} s): encode a sound of the clip's length"
                )
            fitted = torch.zeros(1, 32, 2, needed)
            fitted[..., : min(have, needed)] = audio[..., :needed]
            clip = AVLatent(video, fitted)
            notes.append(f"the sound was fitted from {have} to {needed} latents")
        return cls.report([described(take_latent(give_latent(clip)).canvas), *notes], give_latent(clip))


NODES = [EmptyLatent, EncodeClip, SaveLatent, LoadLatent, SplitLatent, JoinLatent]
