"""A render on a server of the user's own: the same inputs as here, sent to SGLang or vLLM-Omni.

server (a name) + prompt, frames, references, source and mask ─▶ H3 Render on a Server ─▶ IMAGE, AUDIO, VIDEO, report
                                                                 output/h3/remote_00001_.mp4 with the workflow

A workflow holds the name alone: origin and key stand in the user's settings.
"""

from __future__ import annotations

import torch

from . import host
from .condition import prompt_input
from .latent import RATIOS, canvas_of
from .mask import fit_mask
from .media import give_audio, give_images, take_frames, take_media
from .references import collect, media_inputs
from .render import shift_inputs
from .save import FOLDER, PREFIX_TOOLTIP
from .sockets import Node, io, video_of_file

NO_SERVER = "no server set up"
QUALITIES = ["lossless", "high"]


def server_names() -> list[str]:
    """The names to choose from; never an address."""
    from ..h3_runtime import H3Error, load_servers

    try:
        return sorted(load_servers().found) or [NO_SERVER]
    except H3Error as error:
        host.log.warning("H3 Runtime: %s", error)
        return [NO_SERVER]


def server_of(name: str):
    """The server of this name. H3Error with how to add one for an address, or a name that is not set up."""
    from ..h3_runtime import H3Error, load_servers

    servers = load_servers()
    if name == NO_SERVER:
        raise H3Error(f"{NO_SERVER}: {servers.how_to_add()}, then press R and choose it")
    return servers.get(name)


def canvas_inputs() -> list:
    """Length and shape, as H3 Empty Latent has them."""
    return [
        io.Float.Input(
            "seconds",
            optional=True,
            default=5.167,
            min=0.04,
            max=150.0,
            step=0.001,
            tooltip="Length; raised to the next 17k + 5 frames. Servers render 4 to 15 seconds.",
        ),
        io.Combo.Input("ratio", optional=True, options=RATIOS, default="16:9", tooltip="Width to height."),
        io.Int.Input(
            "width",
            optional=True,
            default=0,
            min=0,
            max=8192,
            step=32,
            tooltip="An exact width in place of the ratio, with height; 0: not used.",
        ),
        io.Int.Input(
            "height",
            optional=True,
            default=0,
            min=0,
            max=8192,
            step=32,
            tooltip="An exact height in place of the ratio, with width; 0: not used.",
        ),
    ]


def run_inputs() -> list:
    """Seed, steps and quality."""
    return [
        io.Int.Input(
            "seed",
            optional=True,
            default=0,
            min=0,
            max=0x7FFFFFFFFFFFFFFF,
            control_after_generate=True,
            tooltip="Chooses the noise. A server draws its own: the same seed gives another clip there than here.",
        ),
        io.Int.Input(
            "steps",
            optional=True,
            default=49,
            min=1,
            max=1000,
            tooltip="Calls of the model, counted as here; what the server's version counts is taken care of.",
        ),
        io.Combo.Input(
            "quality",
            optional=True,
            options=QUALITIES,
            default="lossless",
            tooltip="The engine's own word. high is faster and leaves out work; SGLang gives it for one workload only.",
        ),
        *shift_inputs(),
        io.Boolean.Input(
            "resume",
            optional=True,
            default=True,
            tooltip="Take up the job of the same request when it already runs on the server, after a restart too.",
        ),
        io.String.Input(
            "job",
            optional=True,
            default="",
            tooltip="Fetch the job with this id in place of a new render; the inputs are not sent then.",
        ),
    ]


class RemoteRender(Node):
    """Render elsewhere."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeRemoteRender",
            display_name="H3 Render on a Server",
            category=FOLDER.rpartition("/")[0] + "/server",
            description="Renders on an SGLang or vLLM-Omni server of yours that serves MiniMax H3, with the same "
            "inputs as here, and brings the clip back. What the server's engine cannot do is refused before anything "
            "is sent. The result is the engine's own: it is not verified here.",
            search_aliases=["sglang", "vllm", "remote", "api", "cluster"],
            inputs=[
                io.Combo.Input(
                    "server",
                    options=server_names(),
                    tooltip="A server by the name it has in your settings; python -m h3_runtime engine list says where "
                    "they are. Press R after a change.",
                ),
                prompt_input(),
                io.Image.Input("first_frame", optional=True, tooltip="The picture that the clip begins with."),
                io.Image.Input("last_frame", optional=True, tooltip="The picture that the clip ends with."),
                *media_inputs(),
                io.MultiType.Input(
                    "source",
                    types=[io.Video, io.Image],
                    optional=True,
                    tooltip="A clip of which the masks keep parts (vLLM-Omni). Frames count as 24 a second.",
                ),
                io.Mask.Input(
                    "mask",
                    optional=True,
                    tooltip="White is made anew, one mask or one per frame. Without it all of the source's picture is "
                    "kept.",
                ),
                io.String.Input(
                    "sound_mask",
                    optional=True,
                    default="keep",
                    tooltip="With a source: keep, all, seconds that are made anew (1-2.5,3-4), or a curve (0=0,1=1).",
                ),
                *canvas_inputs(),
                *run_inputs(),
                io.String.Input("filename_prefix", optional=True, default="h3/remote", tooltip=PREFIX_TOOLTIP),
            ],
            outputs=[
                io.Image.Output("images", display_name="images", tooltip="The frames, after H.264."),
                io.Audio.Output("audio", display_name="audio", tooltip="The sound, after AAC."),
                io.Video.Output("video", display_name="video", tooltip="The saved file."),
                io.String.Output("report", display_name="report", tooltip="Label and notes, for H3 Compare."),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, server=None, images=None, videos=None, video_sounds=None, sounds=None):
        """Stands in for the host's check against the list: a refusal that says how a server is added. The host hands
        growing lists over whether they are asked for or not."""
        from ..h3_runtime import H3Error

        try:
            return True if server is None else bool(server_of(server))
        except H3Error as error:
            return str(error)

    @classmethod
    def fingerprint_inputs(cls, server=None, **others):
        """A name that stands for another server now gives another clip."""
        from ..h3_runtime import H3Error

        try:
            found = server_of(server)
        except H3Error as error:
            return str(error)
        return f"{found.engine} {found.origin} {found.version}"

    @classmethod
    @host.runtime_mode
    def execute(cls, server, prompt, filename_prefix="h3/remote", **options):
        from ..h3_runtime import RemoteOptions, audio_samples, read_clip, render_remote, resume_remote

        found, notes = server_of(server), []
        request = make_request(prompt, options, notes)
        path, shown = host.output_file(filename_prefix, ".mp4", *request.size)
        chosen = RemoteOptions(
            quality=options.get("quality", "lossless"),
            fresh=not options.get("resume", True),
            tags=host.workflow_tags(cls.hidden),
        )
        teller = host.Teller(cls, 100, f"on {found.name}")

        def watch(waiting) -> None:
            words = f"{waiting.words}, {waiting.percent} %, waited {host.clock(waiting.seconds)}"
            teller.steps(waiting.percent, 100, words=words)

        calls = {"tell": lambda sentence: host.show_text(cls, sentence), "watch": watch, "poll": host.poll}
        job = options.get("job", "").strip()
        if job:
            result = resume_remote([job], found, path, chosen, **calls)
        else:
            result = render_remote(request, found, path, chosen, **calls)
        (made,) = result.clips
        clip = read_clip(made.path)
        sound = clip.audio
        if sound is None:
            sound = torch.zeros(2, audio_samples(len(clip.frames)))  # what stands for a sound that is not there
        notes += [*result.notes, *made.notes, f"saved {made.path.name}: {made.facts.frames} frames"]
        notes.append(f"job {', '.join(result.jobs)} took {host.clock(result.seconds)}")
        report = "\n".join([result.fidelity.title, *notes])
        ui = {"images": [{**shown, "filename": made.path.name}], "animated": (True,)}
        outputs = (give_images(clip.frames), give_audio(sound), video_of_file(made.path), report)
        return cls.report(notes, *outputs, ui=ui, label=result.fidelity, sound=not made.notes)


def make_request(prompt: str, options: dict, notes: list[str]):
    """The RenderRequest of the node's inputs; sentences about what was changed on the way go to ``notes``."""
    from ..h3_runtime import Media, RenderRequest, SoundMask

    size = [options.get(name, 0) for name in ("width", "height")]
    canvas = canvas_of(options.get("seconds", 5.167), options.get("ratio", "16:9"), 0.0, *size, 0)
    notes += canvas.notes
    given = {}
    for name in ("first_frame", "last_frame"):
        image = options.get(name)
        if image is not None:
            words = name.replace("_", " ")
            if len(image) > 1:
                notes.append(f"{words}: the first of {len(image)} pictures is used")
            given[name] = Media(frames=take_frames(image[:1], words, notes), name=words)
    if options.get("source") is not None:
        given["source"] = take_media(options["source"], "source", notes)
        mask, sound = options.get("mask"), options.get("sound_mask", "keep").strip()
        given["mask"] = "keep" if mask is None else Media(frames=fit_mask(mask, canvas, notes), name="mask")
        given["sound_mask"] = sound if sound in ("keep", "all") else SoundMask.parse(sound)
    elif options.get("mask") is not None:
        notes.append("the mask has no effect: no source is connected that it could keep parts of")
    return RenderRequest(
        prompt,
        size=(canvas.width, canvas.height),
        frames=canvas.num_frames,
        references=collect(options, notes),
        seed=options.get("seed", 0),
        num_forwards=options.get("steps", 49),
        video_shift=options.get("video_shift", 12.0),
        audio_shift=options.get("audio_shift", 3.0),
        **given,
    )


def label_of(up, step):
    """The label that the node's result will have, from its widgets."""
    from ..h3_runtime import label_of_engine

    found = server_of(up.value(step.inputs, "server", NO_SERVER))
    return label_of_engine(found.engine, up.value(step.inputs, "quality", "lossless"))


NODES = [RemoteRender]
