"""``python -m h3_runtime compare``: how far B lies from A, as figures, a page and videos.

    compare lossless.mp4 int8.mp4 --threshold psnr=30 ssim=0.95 --out report

Frames that ``render --keep-frames`` left beside both clips are measured in place of the encoded ones. Exit status 1
when a threshold is not met or could not be measured. The work is imported when it is asked for.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .errors import H3Error


def add_compare(commands) -> argparse.ArgumentParser:
    command = commands.add_parser("compare", help="measure one clip against another; writes a page that opens offline")
    command.add_argument("a", metavar="A.mp4", help="the clip that counts as right")
    command.add_argument("b", metavar="B.mp4", help="the clip that is measured against it")
    command.add_argument("--out", metavar="DIR", help="folder for report.html, report.json, videos and plots")
    command.add_argument(
        "--reports", nargs=2, metavar=("A.json", "B.json"), help="their reports (default: .report.json beside each)"
    )
    command.add_argument(
        "--threshold", nargs="+", action="extend", default=[], metavar="NAME=NUMBER",
        help="what B must meet: psnr=30 ssim=0.95 snr=20 lag=8 ...; the exit status says whether it does",
    )  # fmt: skip
    command.add_argument("--resize", action="store_true", help="measure a B of another size, resized to A's")
    command.add_argument("--drop-kept", action="store_true", help="remove the kept frames of both when it is done")
    command.set_defaults(run=run_compare)
    return command


def run_compare(arguments, say) -> tuple[list[dict], int]:
    from .compare.report import compare_files, forget_kept, results
    from .compare.verdict import parse_thresholds

    thresholds = parse_thresholds(arguments.threshold)
    paths = [Path(arguments.a), Path(arguments.b)]
    if all(path.exists() for path in paths) and paths[0].samefile(paths[1]):
        raise H3Error(f"A and B are one file, {paths[0]}: give two clips")
    if arguments.out is not None:
        keep_clips(Path(arguments.out), paths)
    elif arguments.drop_kept:
        raise H3Error("--drop-kept without --out would remove frames and leave nothing to look at: add --out DIR")
    made = compare_files(
        *paths, arguments.out, arguments.reports or (None, None), thresholds=thresholds, progress=say.progress,
        resize=arguments.resize,
    )  # fmt: skip
    for line in made.lines():
        say(line)
    if arguments.drop_kept:
        for line in forget_kept(made):
            say(line)
    if made.page is not None:
        say(f"wrote {made.page}")
    return results(made), 1 if made.passed is False else 0


def keep_clips(out: Path, clips: list[Path]) -> None:
    """H3Error when the report's own files would replace a clip that it reads."""
    for clip in clips:
        for name in ("a.mp4", "b.mp4", "side_by_side.mp4", "difference.mp4"):
            if (out / name).exists() and clip.exists() and (out / name).samefile(clip):
                raise H3Error(f"--out {out} would replace {clip.name}, which is compared: choose another folder")
