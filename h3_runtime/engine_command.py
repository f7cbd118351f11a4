"""``render --engine NAME``, ``engine list`` and ``engine check NAME``: a render on a server of the user's own.

    engine list                                          names, engines, origins; where they are written down
    engine check studio                                  reachable, model, version, partition, what it supports
    render --engine studio --prompt "a cat" --out cat.mp4 --quality high
    render --engine studio --job ID --out cat.mp4        a job that was posted before

The work is imported when it is asked for, so that the command line starts without torch.
"""

from __future__ import annotations

import argparse
import time

from .errors import H3Error

TELL_SECONDS = 15  # between two lines about a wait
OPTIONS = ("quality", "outputs", "job")
LOCAL = (
    "model", "dit", "layout", "device", "embeddings", "no_prompt_cache", "no_media_cache", "place", "resident_layers",
    "ahead", "converted", "manifest", "inputs", "keep_frames", "keep_latent", "resume", "recovery", "no_recovery",
    "no_metadata",
)  # fmt: skip
SPELLED = {"manifest": "--from"}


def add_engine_options(group) -> None:
    """Where render renders."""
    group.add_argument("--engine", metavar="NAME", help="on this server, in place of --model (engine list names them)")
    group.add_argument("--quality", choices=["lossless", "high"], help="the engine's own quality (default lossless)")
    group.add_argument("--outputs", type=int, metavar="N", help="clips with seeds in a row, 1 to 10 (default 1)")
    group.add_argument("--job", action="append", default=[], metavar="ID",
                       help="fetch a job that was posted before; may be repeated")  # fmt: skip


def add_engine(commands) -> argparse.ArgumentParser:
    command = commands.add_parser("engine", help="the servers that render --engine can use")
    actions = command.add_subparsers(dest="action", metavar="list|check", required=True)
    listed = actions.add_parser("list", help="names, engines and origins; nothing is asked of them")
    listed.set_defaults(run=run_list)
    check = actions.add_parser("check", help="reachable, which model and partition, what it supports")
    check.add_argument("name", metavar="NAME")
    check.set_defaults(run=run_check)
    for action in (listed, check):
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return command


def run_list(arguments, say) -> tuple[list[dict], int]:
    from .engines import ENGINES
    from .engines.settings import load_servers

    servers = load_servers()
    rows = [{"name": "settings", "value": str(servers.path), "unit": "path"}]
    for name, server in sorted(servers.found.items()):
        title = ENGINES[server.engine].title
        key = "with a key" if server.key else "without a key"
        say(f"{name}: {title} at {server.origin}, {key} ({server.source})")
        rows.append({"name": name, "value": str(server.origin), "unit": "origin", "engine": server.engine,
                     "key": bool(server.key), "source": server.source})  # fmt: skip
    for name, why in sorted(servers.wrong.items()):
        say(f"{name}: cannot be used: {why}")
        rows.append({"name": name, "value": None, "unit": "origin", "wrong": why})
    for note in servers.notes:
        say(f"note: {note}")
        rows.append({"name": "note", "value": note, "unit": ""})
    if not (servers.found or servers.wrong):
        say(f"no server is configured: {servers.how_to_add()}")
    return rows, 1 if servers.wrong else 0


def run_check(arguments, say) -> tuple[list[dict], int]:
    from .engines import ENGINES
    from .engines.settings import load_servers
    from .engines.wire import Client

    server = load_servers().get(arguments.name)
    engine = ENGINES[server.engine]
    try:
        told = engine.describe(Client(server))
    except H3Error as error:
        say(f"{server.name}: {error}")
        return [{"name": server.name, "value": "not usable", "unit": "", "reason": str(error)}], 1
    rows = [
        {"name": server.name, "value": "reachable", "unit": "", "engine": server.engine, "origin": str(server.origin)},
        {"name": "model", "value": told.model, "unit": ""},
        {"name": "version", "value": told.version or "not told", "unit": ""},
        {"name": "partition", "value": told.partition or "not told", "unit": ""},
        *({"name": "about", "value": line, "unit": ""} for line in told.lines),
        *({"name": "supports", "value": line, "unit": ""} for line in engine.supports),
    ]
    say(f"{server.name}: {engine.title} at {server.origin} is reachable")
    for row in rows[1:]:
        say(f"  {row['name']}: {row['value']}")
    try:
        engine.check_version(told)
    except H3Error as error:
        say(f"  no render can be sent yet: {error}")
        return [*rows, {"name": "not usable yet", "value": str(error), "unit": ""}], 1
    return rows, 0


def without_engine(arguments) -> None:
    """H3Error for options of a server where none is chosen."""
    for name in OPTIONS:
        if getattr(arguments, name):
            raise H3Error(f"--{name} is for a render on a server: add --engine NAME, or leave it out")
    if arguments.model is None:
        raise H3Error("no model was given: add --model DIR, or --engine NAME to render on a server")


def run_remote(arguments, say, request_of, inputs) -> tuple[list[dict], int]:
    """``render --engine``: ``request_of`` reads the request off the command line, ``inputs`` are its options."""
    from .engines.packing import MAX_OUTPUTS
    from .engines.run import RemoteOptions, output_path, render_remote, resume_remote
    from .engines.settings import load_servers
    from .save import check_output, keep_inputs

    for name in LOCAL:
        if getattr(arguments, name) not in (None, [], False):
            option = SPELLED.get(name, f"--{name.replace('_', '-')}")
            raise H3Error(f"{option} has no meaning on a server: leave it out, or render here without --engine")
    server, out = load_servers().get(arguments.engine), check_output(arguments.out)
    outputs = 1 if arguments.outputs is None else arguments.outputs
    options = RemoteOptions(arguments.quality or "lossless", outputs, bool(arguments.fresh))
    watch, told = _Watch(say), []

    def tell(sentence: str) -> None:
        told.append(sentence)
        say(f"note: {sentence}")

    try:
        if arguments.job:
            _only_the_job(arguments, inputs)
            result = resume_remote(arguments.job, server, out, options, tell, watch)
        else:
            request = request_of(arguments)
            reads = [medium.path for medium in request.media.values() if medium.path is not None]
            for number in range(min(max(outputs, 1), MAX_OUTPUTS)):
                keep_inputs(output_path(out, number), reads)
            result = render_remote(request, server, out, options, tell, watch)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped: nothing half-written was left") from None
    for note in result.notes:
        if note not in told:
            say(f"note: {note}")
    say(f"label: {result.fidelity.title}")
    for cause in result.fidelity.causes:
        say(f"  {cause.label}: {cause.reason}")
    for clip in result.clips:
        for note in clip.notes:
            say(f"note: {note}")
        say(f"wrote {clip.path}")
    return describe(result), 0


def _only_the_job(arguments, inputs) -> None:
    given = [name for name in (*inputs, "quality", "outputs") if getattr(arguments, name) not in (None, [])]
    if given:
        option = "--ref-..." if given[0] == "references" else f"--{given[0].replace('_', '-')}"
        raise H3Error(f"--job fetches what was asked for before, so {option} cannot change it: leave it out")


def describe(result) -> list[dict]:
    """The results block of a render on a server."""
    rows = []
    for clip in result.clips:
        facts = clip.facts
        rows += [
            {"name": "video", "value": str(clip.path), "unit": "path"},
            {"name": "frames", "value": facts.frames, "unit": "frames"},
            {"name": "size", "value": f"{facts.width}x{facts.height}", "unit": "px"},
            *({"name": "note", "value": note, "unit": ""} for note in clip.notes),
        ]
    reasons = [cause.reason for cause in result.fidelity.causes]
    rows.append({"name": "label", "value": result.fidelity.title, "unit": "", "reasons": reasons})
    rows += [{"name": "job", "value": job, "unit": ""} for job in result.jobs]
    rows.append({"name": "seconds/remote", "value": result.seconds, "unit": "s"})
    return rows + [{"name": "note", "value": note, "unit": ""} for note in result.notes]


class _Watch:
    """A wait in words: when its status changes, and every now and then."""

    def __init__(self, say):
        self.say, self.words, self.told = say, "", 0.0

    def __call__(self, waiting) -> None:
        now = time.monotonic()
        if waiting.words != self.words or now - self.told >= TELL_SECONDS:
            self.say(f"{waiting.words}, {waiting.percent} %, waited {waiting.seconds:.0f} s")
            self.words, self.told = waiting.words, now
