"""Masks of picture and sound, and clips made longer with them.

LATENT + MASK, time ranges ─▶ H3 Noise Masks ─▶ LATENT with noise_mask + a picture of the token grid
LATENT ─▶ H3 Extend Clip ─▶ LATENT of the next clip, its beginning kept ─▶ H3 Sampler ─▶ H3 Join Clips
"""

from __future__ import annotations

import torch

from . import host
from .av_latent import give_latent, take_latent
from .latent import described
from .media import give_images
from .sockets import CATEGORY, Node, io

FOLDER = f"{CATEGORY}/latent"
PICTURE_MODES = ["mask", "keep", "all"]
SOUND_MODES = ["keep", "all", "ranges", "curve"]


class NoiseMasks(Node):
    """What of a clip is made anew."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeNoiseMasks",
            display_name="H3 Noise Masks",
            category=FOLDER,
            description="Says which parts of a clip are made anew (white, 1) and which are kept (black, 0), for "
            "the picture "
            "by a mask and for the sound by time. The picture it returns shows what the model will really do: a "
            "token is "
            "32x32 pixels and 1 or 4 frames, a step of sound 1/40 second.",
            search_aliases=["inpaint", "set latent noise mask", "replace voice", "keep sound"],
            inputs=[
                io.Latent.Input("latent", tooltip="The encoded clip (H3 Encode Video and Sound)."),
                io.Combo.Input(
                    "picture",
                    optional=True,
                    options=PICTURE_MODES,
                    default="mask",
                    tooltip="mask: by the connected mask. keep: nothing of the picture is made anew. all: "
                    "everything is.",
                ),
                io.Combo.Input(
                    "sound",
                    optional=True,
                    options=SOUND_MODES,
                    default="keep",
                    tooltip="keep: the sound stays as it is. all: all of it is made anew. ranges, curve: by the "
                    "text below.",
                ),
                io.String.Input(
                    "sound_text",
                    optional=True,
                    default="1-2",
                    tooltip="ranges: seconds that are made anew, e.g. 1-2.5,3-4. curve: second=value points, e.g. "
                    "0=0,1=1,2=0.5.",
                ),
                io.Float.Input(
                    "sound_feather",
                    optional=True,
                    default=0.0,
                    min=0.0,
                    max=10.0,
                    step=0.01,
                    tooltip="Seconds over which a range fades out on both sides.",
                ),
                io.Mask.Input(
                    "mask",
                    optional=True,
                    tooltip="White is made anew. One mask for the whole clip, or one per frame; another size is "
                    "fitted.",
                ),
            ],
            outputs=[
                io.Latent.Output(display_name="latent"),
                io.Image.Output("grid", display_name="grid", tooltip="The masks on the token grid, white made anew."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, latent, picture="mask", sound="keep", sound_text="1-2", sound_feather=0.0, mask=None):
        from ..h3_runtime import H3Error, Masks, SoundMask, draw_masks, pool_pixels

        taken = take_latent({**latent, "noise_mask": None})
        canvas = taken.canvas
        if taken.clip is None:
            raise H3Error("the latent is empty: masks keep parts of a clip; encode one with H3 Encode Video and Sound")
        notes = list(taken.notes)
        cells = (canvas.latent_t, canvas.latent_h, canvas.latent_w)
        if picture == "mask":
            if mask is None:
                raise H3Error("no mask is connected: connect one, or set picture to keep or all")
            video = pool_pixels(fit_mask(mask, canvas, notes), canvas.latent_t)
        else:
            video = torch.full(cells, float(picture == "all"))
        if sound in ("keep", "all"):
            audio = torch.full((2, canvas.audio_t), float(sound == "all"))
        else:
            asked = SoundMask.parse(sound_text, sound_feather if sound == "ranges" else 0.0)
            if bool(asked.ranges) != (sound == "ranges"):
                raise H3Error(f"sound_text {sound_text!r} is no {sound}: write e.g. 1-2.5,3-4 or 0=0,1=1,2=0.5")
            notes += asked.past_end(canvas.seconds)
            audio = asked.latents(canvas.audio_t)
        masks = Masks.make(video, audio)
        for name, cells_of in (("picture", video), ("sound", audio)):
            notes.append(f"{(cells_of > 0).float().mean().item():.1%} of the {name} is made anew")
        given = give_latent(taken.clip, masks, overlap=None if taken.carried is None else taken.carried.overlap)
        return cls.report(notes, given, give_images(draw_masks(canvas, masks)[None].copy()))


def fit_mask(mask, canvas, notes: list[str]):
    """A MASK as float [1 or F, H, W] on the canvas. H3Error for a number of frames that fits nothing."""
    from ..h3_runtime import H3Error

    pixels = mask.detach().to("cpu", torch.float32, copy=True).reshape(-1, *mask.shape[-2:]).clamp(0, 1)
    if pixels.shape[0] not in (1, canvas.num_frames):
        if pixels.shape[0] < canvas.num_frames:
            raise H3Error(
                f"the mask has {pixels.shape[0]} frames and the clip {canvas.num_frames}: give one mask, or one "
                "per frame"
            )
        notes.append(f"the mask was cut from {pixels.shape[0]} to {canvas.num_frames} frames")
        pixels = pixels[: canvas.num_frames]
    if tuple(pixels.shape[1:]) != (canvas.height, canvas.width):
        height, width = pixels.shape[1:]
        notes.append(f"the mask was resized from {width}x{height} to {canvas.width}x{canvas.height}")
        size = (canvas.height, canvas.width)
        pixels = torch.nn.functional.interpolate(pixels[:, None], size=size, mode="bilinear")[:, 0]
    return pixels


class ExtendClip(Node):
    """The clip after this one."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeExtendClip",
            display_name="H3 Extend Clip",
            category=FOLDER,
            description="Makes the latent of the clip that follows: its beginning is the end of this one, "
            "handed over as it "
            "is and kept while the rest is made. Sample it, then put both together with H3 Join Clips.",
            search_aliases=["continue video", "outpaint in time", "longer"],
            inputs=[
                io.Latent.Input(
                    "latent", tooltip="A finished clip: from the sampler, a file, or H3 Encode Video and Sound."
                ),
                io.Float.Input(
                    "seconds",
                    optional=True,
                    default=4.25,
                    min=0.04,
                    max=150.0,
                    step=0.001,
                    tooltip="How much longer it shall become.",
                ),
                io.Float.Input(
                    "overlap",
                    optional=True,
                    default=0.917,
                    min=0.04,
                    max=150.0,
                    step=0.001,
                    tooltip="Seconds of this clip that the next one sees. Longer than the clip: all of it is "
                    "kept, and one "
                    "longer clip is made.",
                ),
            ],
            outputs=[
                io.Latent.Output(display_name="latent", tooltip="The next clip with its masks, for the sampler."),
                io.Image.Output("grid", display_name="grid", tooltip="The masks on the token grid, white made anew."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, latent, seconds=4.25, overlap=0.917):
        from ..h3_runtime import H3Error, continue_clip, draw_masks

        taken = take_latent({**latent, "noise_mask": None})
        if taken.clip is None or (taken.carried is not None and not taken.carried.finished):
            raise H3Error("only a finished clip can be made longer: sample it to its end first")
        made = continue_clip(taken.clip, max(1, round(seconds * 24)), max(1, round(overlap * 24)))
        notes = [
            described(made.canvas),
            f"frames 0 to {made.overlap - 1} are those of the clip before from frame {made.begins} on",
            *made.notes,
        ]
        given = give_latent(made.source, made.masks, overlap=made.overlap)
        return cls.report(notes, given, give_images(draw_masks(made.canvas, made.masks)[None].copy()))


class JoinClips(Node):
    """Two clips as one."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeJoinClips",
            display_name="H3 Join Clips",
            category=FOLDER,
            description="Puts a clip and the one that was made from it by H3 Extend Clip into one latent; chain "
            "it for any "
            "length. It is decoded in one stream, so there is no cut between them and picture and sound stay together.",
            search_aliases=["concat video", "append"],
            inputs=[
                io.Latent.Input("first", tooltip="The clip, or the clips joined so far."),
                io.Latent.Input("second", tooltip="The sampled clip that H3 Extend Clip began."),
                io.Int.Input(
                    "overlap",
                    optional=True,
                    default=-1,
                    min=-1,
                    max=100000,
                    tooltip="Frames that both share; -1: as H3 Extend Clip noted it.",
                ),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, first, second, overlap=-1):
        from ..h3_runtime import H3Error, join_clips, weakest

        one, two = take_latent({**first, "noise_mask": None}), take_latent({**second, "noise_mask": None})
        if one.clip is None or two.clip is None:
            raise H3Error("one of the latents is empty: sample both clips first")
        if overlap < 0:
            overlap = None if two.carried is None else two.carried.overlap
            if overlap is None:
                raise H3Error(
                    "the second latent does not tell how much it shares with the first: connect the sampler "
                    "that took H3 "
                    "Extend Clip's latent, or give the frames in overlap"
                )
        notes, begins = [], one.canvas.num_frames - overlap
        joined = join_clips(one.clip, two.clip, begins)
        shared = one.clip.video.shape[2] - begins // 17 * 5
        if not torch.equal(one.clip.video[:, :, -shared:], two.clip.video[:, :, :shared]):
            notes.append("the end of the first and the beginning of the second differ: there may be a jump")
        renders = [taken.carried for taken in (one, two) if taken.carried is not None]
        labels = [
            carried.fidelity or carried.result.fidelity for carried in renders if carried.fidelity or carried.result
        ]
        fidelity = weakest(labels) if labels else None
        given = give_latent(joined, fidelity=fidelity)
        return cls.report([described(take_latent(given).canvas), *notes], given, label=fidelity)


NODES = [NoiseMasks, ExtendClip, JoinClips]
