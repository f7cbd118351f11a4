"""How far one clip lies from another: figures, a page, both clips side by side, and a viewer on the node.

IMAGE + AUDIO (+ LATENT, report) of A and of B ─▶ H3 Compare ────────┐
VIDEO A, VIDEO B (kept frames beside them, if any) ─▶ H3 Compare Videos ┴▶ report, side by side, whether it passed
                                                                           output/h3/compare_00001_/report.html
"""

from __future__ import annotations

from pathlib import Path

from . import host
from .av_latent import take_latent
from .media import take_sound, video_file
from .save import PREFIX_TOOLTIP
from .sockets import CATEGORY, Node, io, video_of_file

FOLDER = f"{CATEGORY}/compare"
LABELS = ("LOSSLESS", "EXACT MATH", "APPROXIMATE")


def shared_inputs():
    return [
        io.String.Input(
            "thresholds",
            optional=True,
            default="",
            tooltip="What B must meet, for example: psnr=30 ssim=0.95 snr=20 lag=8. Empty: nothing is judged.",
        ),
        io.Boolean.Input(
            "resize",
            optional=True,
            default=False,
            tooltip="Measure a B of another size, resized to A's; otherwise such clips are refused.",
        ),
        io.String.Input("filename_prefix", optional=True, default="h3/compare", tooltip=PREFIX_TOOLTIP),
    ]


def shared_outputs():
    return [
        io.String.Output("report", display_name="report", tooltip="Figures, flags and notes, as text."),
        io.Video.Output(
            "side_by_side", display_name="side by side", tooltip="Both clips with captions and both sound tracks."
        ),
        io.Boolean.Output(
            "passed", display_name="passed", tooltip="Whether B meets every threshold; true without any."
        ),
    ]


def finish(node, a, b, prefix: str, options: dict):
    """Measure two sides into a numbered folder and show them on the node."""
    from ..h3_runtime import compare_sides, parse_thresholds, viewer_data

    thresholds = parse_thresholds([options.get("thresholds", "")])
    path, shown = host.output_file(prefix, "")
    teller = host.Teller(node, 1, "comparing")

    def progress(stage: str, done: int, total: int) -> None:
        host.poll()
        teller.steps(done, total)

    made = compare_sides(a, b, path, thresholds, progress, options.get("resize", False))
    inside = "/".join(part for part in (shown["subfolder"], shown["filename"]) if part)
    there = {"subfolder": inside, "type": shown["type"]}
    clips = {letter: {"filename": proxy.name, **there} for letter, proxy in zip("ab", made.proxies)}
    ui = {"h3_compare": [{**viewer_data(made), "clips": clips, "page": {"filename": "report.html", **there}}]}
    lines = [*made.lines(), f"saved {inside}/report.html"]
    passed = made.passed is not False
    outputs = ("\n".join(lines), video_of_file(made.side_by_side), passed)
    return node.report(lines, *outputs, ui=ui, sound=passed and not made.data["flags"])


def side_of(images, audio, latent, report: str | None, name: str):
    """One side from what is connected: the frames and sound as they are, before any encoding."""
    from ..h3_runtime import make_manifest, make_report, side_of_frames

    notes: list[str] = []
    if images.shape[-1] == 1:
        images = images.expand(*images.shape[:-1], 3)
    elif images.shape[-1] > 3:
        notes.append(f"{name}: its alpha channel is left out")
    carried = None if latent is None else take_latent({**latent, "noise_mask": None}).carried
    result = None if carried is None else carried.result
    told = {} if result is None else make_report(result, list(result.notes))
    lines = [line for line in (report or "").splitlines() if line.strip()]
    if lines and lines[0].startswith(LABELS):  # the decoder's report: it knows the VAEs, the latent does not
        told["label"] = lines[0]
    sound = take_sound(audio, f"{name}'s sound", notes)
    manifest = make_manifest(result) if result is not None and host.metadata_allowed() else {}
    return side_of_frames(images[..., :3], sound, name, told, manifest, notes)


class Compare(Node):
    """Two clips in memory."""

    @classmethod
    def define_schema(cls):
        sides = []
        for letter, role in (("a", "the clip that counts as right"), ("b", "the clip that is measured against A")):
            big = letter.upper()
            sides += [
                io.Image.Input(f"images_{letter}", tooltip=f"Frames of {big}, {role}."),
                io.Audio.Input(f"audio_{letter}", optional=True, tooltip=f"Sound of {big}."),
                io.Latent.Input(
                    f"latent_{letter}",
                    optional=True,
                    tooltip=f"The latent that {big} was decoded from: label and cost.",
                ),
                io.String.Input(
                    f"report_{letter}",
                    optional=True,
                    force_input=True,
                    tooltip=f"The report of the node that decoded {big}: its first line is the label.",
                ),
                io.String.Input(
                    f"name_{letter}", optional=True, default=big, tooltip=f"What {big} is called in the report."
                ),
            ]
        sides.sort(key=lambda given: bool(given.optional))
        return io.Schema(
            node_id="H3RuntimeCompare",
            display_name="H3 Compare",
            category=FOLDER,
            description="Measures one clip against another before any encoding: picture, sound, cost, and what is "
            "plainly wrong (silence, frozen or black pictures, an accelerator that changed nothing). Writes a page "
            "that opens without network, and shows both clips on the node.",
            search_aliases=["a/b", "psnr", "ssim", "difference", "quality"],
            inputs=[*sides, *shared_inputs()],
            outputs=shared_outputs(),
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, images_a, images_b, filename_prefix="h3/compare", **options):
        a, b = (
            side_of(
                images,
                options.get(f"audio_{letter}"),
                options.get(f"latent_{letter}"),
                options.get(f"report_{letter}"),
                options.get(f"name_{letter}") or letter.upper(),
            )
            for letter, images in (("a", images_a), ("b", images_b))
        )
        return finish(cls, a, b, filename_prefix, options)


class CompareVideos(Node):
    """Two files."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3RuntimeCompareVideos",
            display_name="H3 Compare Videos",
            category=FOLDER,
            description="Measures one video file against another. Files that H3 Decode and Save Video saved with "
            "keep_frames are measured as before encoding; of others the figures hold what the encoder changed too, and "
            "say so.",
            search_aliases=["a/b", "psnr", "ssim", "compare files"],
            inputs=[
                io.Video.Input("video_a", tooltip="The clip that counts as right."),
                io.Video.Input("video_b", tooltip="The clip that is measured against A."),
                *shared_inputs(),
            ],
            outputs=shared_outputs(),
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    @host.runtime_mode
    def execute(cls, video_a, video_b, filename_prefix="h3/compare", **options):
        from ..h3_runtime import open_pair

        a, b = open_pair((file_of(video_a, "a"), file_of(video_b, "b")))
        return finish(cls, a, b, filename_prefix, options)


def file_of(video, letter: str) -> Path:
    """The file behind a VIDEO, or one written for it in the host's temporary folder."""
    path = video_file(video)
    if path is None:
        folder = host.temp_folder()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"h3_compare_{letter}.mp4"
        video.save_to(str(path))
    return path


NODES = [Compare, CompareVideos]
