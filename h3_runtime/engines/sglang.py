"""SGLang Diffusion: JSON to /v1/videos, media as ``data:`` URIs, one partition a server, several outputs a job.

Read in SGLang 0.5.23 (wheel), below sglang/multimodal_gen/runtime:
    entrypoints/openai/video_api.py, protocol.py, common_api.py, entrypoints/http_server.py     endpoints, answers
    pipelines_core/stages/model_specific_stages/minimax_h3/request_validation.py, video_adapter.py    fields
    .../minimax_h3/resolved_plan.py, time_request.py, release_metadata.py      canvas, frames and steps, quality high
and time_request.py again in 0.5.19 to 0.5.22: until 0.5.21 num_inference_steps counts grid points, one more than the
forwards; from 0.5.22 on it counts forwards.
"""

from __future__ import annotations

import base64
import json
import math

from ..errors import H3Error
from ..geometry import MAX_AREA, PIXELS_PER_TOKEN, SHORT_EDGE, Canvas
from .base import Engine, Submission, Told, check_partition, first_model, healthy, number_of, version_of
from .shipment import Shipment, Thing, seconds_for
from .wire import Client, job_path

OLDEST, COUNTS_FORWARDS, NEWEST_READ = (0, 5, 19), (0, 5, 22), (0, 5, 23)
PIPELINE = "MiniMaxH3Pipeline"
RATIOS = ("21:9", "16:9", "4:3", "1:1", "3:4", "9:16")
SECONDS = (4.0, 15.0)
HIGH = {"width": 1344, "height": 768, "frames": 124, "video_shift": 12.0, "audio_shift": 3.0}
HIGH_STEPS = 50


class SGLang(Engine):
    """POST /v1/videos, GET /v1/videos/{id}, GET /v1/videos/{id}/content?variant=k."""

    name = "sglang"
    title = "SGLang"
    supports = (
        "text; first and last frame, beside references too; references",
        "several outputs; quality lossless, and high on its one audited workload",
        "not: masks, guides in the middle, prompt embeddings, LoRA files",
    )

    def describe(self, client: Client) -> Told:
        healthy(client)
        server, model = client.server, first_model(client)
        pipeline = model.get("pipeline_name")
        if pipeline is not None and pipeline != PIPELINE:
            raise H3Error(f"server {server.name} runs {server.clean(pipeline, 60)}: start it with MiniMaxAI/MiniMax-H3")
        answer = client.get("/server_info")
        info = client.object(answer) if answer.status == 200 else {}
        version = version_of(server, info.get("version") if isinstance(info.get("version"), str) else "")
        path = str(info.get("model_path") or "").rstrip("/").rpartition("/")[2].lower()
        partition = path if path in ("fl2va", "ref2va") else server.partition
        gpus = model.get("num_gpus")
        lines = (f"{gpus} GPUs",) if isinstance(gpus, int) else ()
        return Told(server.clean(model["id"], 120), version, partition, lines)

    def check_version(self, told: Told) -> None:
        steps_of(1, told)

    def check(self, shipment: Shipment, told: Told) -> None:
        check_partition(shipment, told, "this server")
        if shipment.masks is not None:
            raise H3Error("mask: SGLang takes no masks; use a vLLM-Omni server, or render here")
        steps_of(shipment.request.num_forwards, told)
        target_of(shipment.canvas, shipment.task)
        if shipment.quality == "high":
            _check_high(shipment, told)

    def notes(self, shipment: Shipment, told: Told) -> list[str]:
        said = super().notes(shipment, told)
        if number_of(told.version) > NEWEST_READ:
            newest = ".".join(map(str, NEWEST_READ))
            said.append(f"the server is SGLang {told.version}: the newest whose sources were read is {newest}")
        if not told.partition:
            said.append("the server does not tell its partition: it refuses a request that needs the other one")
        return said

    def submissions(self, shipment: Shipment, told: Told) -> list[Submission]:
        request = shipment.request
        conditions = [
            {"type": thing.kind, "uri": uri(thing), "role": "keyframe", "frame_index": place}
            for place, thing in shipment.keyframes
        ]
        conditions += [{"type": thing.kind, "uri": uri(thing), "role": "reference"} for thing in shipment.references]
        body = {
            "prompt": request.prompt,
            "task": shipment.task,
            "conditions": conditions,
            "target": target_of(shipment.canvas, shipment.task),
            "num_inference_steps": steps_of(request.num_forwards, told),
            "flow_shift": float(request.video_shift),
            "audio_flow_shift": float(request.audio_shift),
            "seed": int(request.seed),
            "num_outputs_per_prompt": shipment.outputs,
            "quality": shipment.quality,
        }
        return [Submission("application/json", json.dumps(body).encode(), request.seed, shipment.outputs)]

    def content(self, job: str, output: int) -> str:
        return f"{job_path(job, 'content')}?variant={output}"


def uri(thing: Thing) -> str:
    return f"data:{thing.mime};base64,{base64.b64encode(thing.data).decode()}"


def steps_of(forwards: int, told: Told) -> int:
    """num_inference_steps for this many forwards. H3Error where the server's version does not tell how it counts."""
    number = number_of(told.version)
    if number is None or number < OLDEST:
        given = f"SGLang {told.version}" if told.version else "no version"
        oldest = ".".join(map(str, OLDEST))
        raise H3Error(
            f"steps: the server tells {given}, and SGLang before 0.5.22 counts one more than it runs; a release from "
            f"{oldest} on is needed, or its version in the settings"
        )
    return forwards if number >= COUNTS_FORWARDS else forwards + 1


def resolve(short_edge: int, ratio: float) -> tuple[int, int]:
    """(width, height) that the engine makes of a short edge and a ratio (its resolved_plan.py)."""
    width, height = (short_edge * ratio, float(short_edge)) if ratio >= 1 else (float(short_edge), short_edge / ratio)
    if width * height > MAX_AREA:
        scale = math.sqrt(MAX_AREA / (width * height))
        width, height = width * scale, height * scale
    edges = (max(PIXELS_PER_TOKEN, round(edge / PIXELS_PER_TOKEN) * PIXELS_PER_TOKEN) for edge in (width, height))
    return tuple(edges)


def target_of(canvas: Canvas, task: str) -> dict:
    """The ``target`` that makes exactly this canvas. H3Error, naming the size, where there is none."""
    seconds = seconds_for(canvas, *SECONDS)
    size, low = (canvas.width, canvas.height), min(canvas.width, canvas.height)
    edges = sorted(range(max(1, low - 31), low + 32), key=lambda edge: (edge != SHORT_EDGE, abs(edge - low)))
    ratios = [f"{canvas.width}:{canvas.height}"] if task == "fl2va" else RATIOS
    for edge in [SHORT_EDGE, *edges]:
        for ratio in ratios:
            across, down = map(int, ratio.split(":"))
            if resolve(edge, across / down) == size:
                return {"short_edge": edge, "aspect_ratio": ratio, "duration_seconds": seconds}
    allowed = "up to 1344x768 pixels in area" if task == "fl2va" else f"the ratios {', '.join(RATIOS)}"
    raise H3Error(
        f"size {canvas.width}x{canvas.height} is off the canvas of SGLang, which makes {allowed}; leave the size out, "
        "or give a ratio"
    )


def _check_high(shipment: Shipment, told: Told) -> None:
    request, canvas = shipment.request, shipment.canvas
    have = {"width": canvas.width, "height": canvas.height, "frames": canvas.num_frames}
    have |= {"video_shift": request.video_shift, "audio_shift": request.audio_shift}
    wrong = [f"{name.replace('_', ' ')} {have[name]:g}" for name, value in HIGH.items() if have[name] != value]
    if shipment.task != "t2va":
        wrong.append("pictures or references")
    if steps_of(request.num_forwards, told) != HIGH_STEPS:
        wrong.append(f"steps {request.num_forwards}")
    if wrong:
        forwards = HIGH_STEPS if number_of(told.version) >= COUNTS_FORWARDS else HIGH_STEPS - 1
        raise H3Error(
            f"quality high: SGLang gives it for text alone at 1344x768, 124 frames, {forwards} steps, shifts 12 and 3, "
            f"and this has {', '.join(wrong)}; take quality lossless"
        )
