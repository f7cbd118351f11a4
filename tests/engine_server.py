"""Stand-ins for the two engines: strict about every field of a request, and misbehaving on demand.

    with serving("sglang") as server:      server.url, server.jobs, server.seen (method, path, headers, body)
        server.trouble["content"] = ["drop", "drop"]    the next answers of that kind go wrong, in this order

What is checked, and what is answered, is written from the engines' own sources and independent of ours:
    SGLang 0.5.23 (wheel)       sglang/multimodal_gen/runtime/entrypoints/openai/{video_api,protocol,common_api}.py,
                                .../entrypoints/http_server.py, .../stages/model_specific_stages/minimax_h3/
                                {request_validation,video_adapter,resolved_plan,task_profiles,material_io}.py
    vLLM-Omni 0.30.0 (wheel)    vllm_omni/entrypoints/openai/{api_server,protocol/videos,serving_video}.py,
                                .../video/generation/helpers.py, vllm_omni/model_executor/models/minimax_h3/
                                {encoder_processing,preprocessing,reference_video}.py
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import av
import numpy as np
import torch
from PIL import Image

from h3_runtime.geometry import audio_samples
from h3_runtime.media import Mp4Writer

RATIOS = {"21:9": 21 / 9, "16:9": 16 / 9, "4:3": 4 / 3, "1:1": 1.0, "3:4": 3 / 4, "9:16": 9 / 16}
MAX_PIXELS = 768 * 1344


class Refused(ValueError):
    """Status 400 with this detail."""


def need(holds: bool, detail: str) -> None:
    if not holds:
        raise Refused(detail)


def clip_bytes(width: int, height: int, frames: int, seed: int = 0, sound: bool = True, black: bool = False) -> bytes:
    """A small mp4 as an engine writes it: H.264 at 24 fps, AAC stereo at 32 kHz; other bytes for another seed."""
    return coded(width, height, frames, sound, black) + b"\0\0\0\x10free" + seed.to_bytes(8, "big")


@lru_cache(maxsize=16)
def coded(width: int, height: int, frames: int, sound: bool, black: bool) -> bytes:
    ramp = np.linspace(0, 200, width, dtype=np.uint8)[None, :, None]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.mp4"
        tone = torch.sin(torch.arange(audio_samples(frames)) * 0.05).expand(2, -1) * 0.3 if sound else None
        with Mp4Writer(path, width, height, frames, tone) as writer:
            for index in range(frames):
                picture = np.broadcast_to(ramp + np.uint8(index % 50), (height, width, 3))
                writer.write(np.ascontiguousarray(picture)[None] * np.uint8(not black))
        return path.read_bytes()


def align(frames: int) -> int:
    while frames % 17 != 5:
        frames += 1
    return frames


def canvas_of(short_edge: int, ratio: float) -> tuple[int, int]:
    width, height = (short_edge * ratio, short_edge) if ratio >= 1 else (short_edge, short_edge / ratio)
    if width * height > MAX_PIXELS:
        scale = math.sqrt(MAX_PIXELS / (width * height))
        width, height = width * scale, height * scale
    return tuple(max(32, round(edge / 32) * 32) for edge in (width, height))


def media_facts(data: bytes) -> dict:
    """{streams by type} of a video or sound, by decoding all of it."""
    facts = {}
    with av.open(io.BytesIO(data)) as container:
        for stream in container.streams:
            facts[stream.type] = {"codec": stream.codec_context.name, "count": 0, "format": container.format.name}
        for frame in container.decode():
            kind = "video" if isinstance(frame, av.VideoFrame) else "audio"
            facts[kind]["count"] += 1 if kind == "video" else frame.samples
            facts[kind] |= {"size": (frame.width, frame.height)} if kind == "video" else {"rate": frame.sample_rate}
    return facts


def picture_size(data: bytes, formats: tuple[str, ...]) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        need(image.format in formats, f"a picture of format {image.format}")
        image.load()
        need(not image.info, f"a picture that carries more than pixels: {sorted(image.info)}")
        return image.size


@dataclass
class Job:
    id: str
    width: int
    height: int
    frames: int
    seed: int
    outputs: int
    asked: dict
    looked: int = 0
    status: str = "queued"


@dataclass
class Stand:
    """What a stand-in knows and does."""

    engine: str
    key: str = ""
    version: str = ""
    looks: int = 2  # at a job until it is done
    trouble: dict[str, list] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    seen: list[tuple] = field(default_factory=list)
    url: str = ""
    ids: str = "video/{n} ü"  # an id with characters that have to be encoded
    facts: dict = field(default_factory=dict)  # what /v1/models and /server_info say, changed

    def posts(self) -> list[tuple]:
        return [entry for entry in self.seen if entry[0] == "POST"]


# ---- SGLang


SGLANG_FIELDS = {
    "prompt", "task", "conditions", "target", "num_inference_steps", "flow_shift", "audio_flow_shift", "seed",
    "num_outputs_per_prompt", "quality",
}  # fmt: skip


def take_sglang(stand: Stand, headers, body: bytes) -> Job:
    need(headers["Content-Type"] == "application/json", "the body is no JSON")
    asked = json.loads(body)
    need(set(asked) == SGLANG_FIELDS, f"fields {sorted(set(asked) ^ SGLANG_FIELDS)}")
    need(isinstance(asked["prompt"], str) and asked["prompt"] != "", "prompt must be a non-empty string")
    need(asked["task"] in ("t2va", "fl2va", "ref2va"), "task is required")
    for name in ("flow_shift", "audio_flow_shift"):
        need(type(asked[name]) is float and 0 < asked[name] < math.inf, f"{name} must be a positive finite float")
    for name, low, high in (
        ("num_inference_steps", 1, 10**6),
        ("seed", 0, 2**63 - 1),
        ("num_outputs_per_prompt", 1, 10),
    ):
        need(type(asked[name]) is int and low <= asked[name] <= high, f"{name} {asked[name]!r}")
    need(asked["quality"] in ("exact", "lossless", "high"), "quality")
    target = asked["target"]
    need(set(target) == {"short_edge", "aspect_ratio", "duration_seconds"}, "target")
    need(type(target["short_edge"]) is int and target["short_edge"] > 0, "target.short_edge must be an integer")
    need(4 <= target["duration_seconds"] <= 15, "target.duration_seconds must be in [4, 15]")
    if asked["task"] != "fl2va":
        need(target["aspect_ratio"] in RATIOS, "target.aspect_ratio")
    across, down = map(int, target["aspect_ratio"].split(":"))
    need(0.25 <= across / down <= 4, "ratio must be within 1:4 to 4:1")
    width, height = canvas_of(target["short_edge"], across / down)
    frames = align(round(target["duration_seconds"] * 24))
    if asked["quality"] == "high":
        have = (asked["task"], width, height, frames, asked["num_inference_steps"], asked["flow_shift"])
        need(
            have == ("t2va", 1344, 768, 124, 50, 12.0), f'quality="high" is validated only for one workload, not {have}'
        )
    take_conditions(asked, (width, height))
    return Job("", width, height, frames, asked["seed"], asked["num_outputs_per_prompt"], asked)


def take_conditions(asked: dict, canvas: tuple[int, int]) -> None:
    roles = {"t2va": (), "fl2va": ("keyframe",), "ref2va": ("keyframe", "reference")}[asked["task"]]
    conditions, places = asked["conditions"], []
    need(isinstance(conditions, list) and bool(conditions) == bool(roles), "conditions")
    for one in conditions:
        need(set(one) <= {"type", "uri", "role", "frame_index", "start_time_seconds"}, f"unknown fields {sorted(one)}")
        need(one["role"] in roles, f"role {one['role']}")
        need(("frame_index" in one) == (one["role"] == "keyframe"), "frame_index")
        match = re.fullmatch(r"data:([a-z0-9/]+);base64,([A-Za-z0-9+/]+={0,2})", one["uri"])
        need(match is not None, "uri must be a data URI")
        data = base64.b64decode(match[2], validate=True)
        one["data"] = data
        if one["type"] == "image":
            size = picture_size(data, ("JPEG", "PNG", "WEBP"))
            if one["role"] == "keyframe":
                places.append(one["frame_index"])
                need(size == canvas, f"a keyframe of {size}, which the engine would stretch to {canvas}")
            continue
        need(one["role"] == "reference", "keyframes are pictures")
        facts = media_facts(data)
        need(one["type"] in ("video", "video_audio", "audio"), one["type"])
        need(("video" in facts) == (one["type"] != "audio"), f"{one['type']} with {sorted(facts)}")
        need(("audio" in facts) == (one["type"] != "video"), f"{one['type']} with {sorted(facts)}")
    need(tuple(places) in ((), (0,), (-1,), (0, -1)), f"frame_index {places}")
    if asked["task"] == "ref2va":
        need(any(one["role"] == "reference" for one in conditions), "ref2va requires a reference")


def tell_sglang(job: Job, stand: Stand) -> tuple[int, dict]:
    made = {
        "id": job.id, "object": "video", "model": "MiniMaxAI/MiniMax-H3", "status": job.status, "created_at": 1,
        "progress": {"queued": 0, "in_progress": 40, "completed": 100}.get(job.status, 40), "quality": "lossless",
        "size": f"{job.width}x{job.height}", "seconds": "5", "url": None, "error": None,
        "file_path": "/srv/outputs/../../etc/passwd", "file_paths": ["../../../tmp/evil.mp4"],
    }  # fmt: skip
    if job.status == "failed":
        made["error"] = {"message": f"CUDA out of memory\n\x1b[31m key was {stand.key}"}
    return 200, made


# ---- vLLM-Omni


OMNI_TEXTS = {
    "prompt", "width", "height", "fps", "num_inference_steps", "flow_shift", "seed", "quality", "aspect_ratio",
    "extra_params",
}  # fmt: skip
OMNI_FILES = {"input_references", "source_video", "source_audio", "video_noise_mask", "audio_noise_mask"}
OMNI_EXTRA = {"task", "duration", "audio_flow_shift", "frame_indices"}


def parts_of(headers, body: bytes) -> list[tuple[str, str | None, str, bytes]]:
    """(name, file name, MIME type, bytes) of a multipart body, read strictly."""
    match = re.fullmatch(r"multipart/form-data; boundary=([\w-]+)", headers["Content-Type"])
    need(match is not None, "the body is no form")
    mark = f"--{match[1]}".encode()
    head, *sections, end = body.split(mark)
    need(head == b"" and end == b"--\r\n" and len(sections) > 0, "the form is not closed")
    found = []
    for section in sections:
        need(section.startswith(b"\r\n") and section.endswith(b"\r\n"), "a part is not closed")
        lines, _, data = section[2:-2].partition(b"\r\n\r\n")
        told = re.fullmatch(
            r'Content-Disposition: form-data; name="(\w+)"(?:; filename="([\w.]+)"\r\nContent-Type: ([\w/]+))?',
            lines.decode(),
        )
        need(told is not None, f"a part begins with {lines!r}")
        found.append((told[1], told[2], told[3] or "", data))
    return found


def take_omni(stand: Stand, headers, body: bytes) -> Job:
    parts = parts_of(headers, body)
    texts = {name: data.decode("utf-8") for name, file, _, data in parts if file is None}
    files = [part for part in parts if part[1] is not None]
    need(set(texts) <= OMNI_TEXTS, f"fields {sorted(set(texts) - OMNI_TEXTS)}")
    need(len(texts) == len([part for part in parts if part[1] is None]), "a field twice")
    need({part[0] for part in files} <= OMNI_FILES, "files")
    need(texts["prompt"] != "", "prompt")
    width, height, steps = (int(texts[name]) for name in ("width", "height", "num_inference_steps"))
    need(min(width, height) >= 1 and 1 <= steps <= 200, "width, height, num_inference_steps")
    need(float(texts["fps"]) == 24, "MiniMax H3 output fps is fixed at 24")
    need(-(2**63) <= int(texts["seed"]) <= 2**63 - 1, "seed")
    need(texts["quality"] in ("lossless", "high") and float(texts["flow_shift"]) > 0, "quality, flow_shift")
    extra = json.loads(texts["extra_params"])
    need(set(extra) <= OMNI_EXTRA and 4 <= extra["duration"] <= 15, f"extra_params {extra}")
    width, height, frames = width // 32 * 32, height // 32 * 32, align(round(extra["duration"] * 24))
    asked = {"texts": texts, "extra": extra, "files": files}
    take_omni_references(extra, texts, files, (width, height))
    take_omni_masks(asked, files, (width, height, frames))
    return Job("", width, height, frames, int(texts["seed"]), 1, asked)


def take_omni_references(extra: dict, texts: dict, files: list, canvas: tuple[int, int]) -> None:
    given: dict[str, list] = {"image": [], "audio": [], "video": []}
    for name, file, mime, data in files:
        if name != "input_references":
            continue
        kind = mime.split("/")[0] if mime.split("/")[0] in given else "video"
        most = {"image": 30, "video": 50, "audio": 15}[kind]
        need(0 < len(data) <= most << 20, f"{kind} of {len(data)} bytes")
        suffix = Path(file).suffix
        if kind == "image":
            size = picture_size(data, ("JPEG", "PNG", "WEBP"))
            need(256 <= min(size) and max(size) <= 5760 and 0.4 <= size[0] / size[1] <= 2.5, f"picture of {size}")
            need(extra["task"] != "fl2va" or size == canvas, f"a keyframe of {size} on {canvas}")
        else:
            facts = media_facts(data)
            need(suffix in ((".mp4", ".mov") if kind == "video" else (".wav", ".mp3")), suffix)
            seconds = (
                facts["video"]["count"] / 24 if kind == "video" else facts["audio"]["count"] / facts["audio"]["rate"]
            )
            need(1.99 <= seconds <= 15.01, f"{kind} of {seconds} s")
            if kind == "video":
                size = facts["video"]["size"]
                need(256 <= min(size) and 0.4 <= size[0] / size[1] <= 2.5, f"clip of {size}")
                need(facts["video"]["codec"] == "h264" and "mp4" in facts["video"]["format"], "an H.264 mp4")
        given[kind].append(data)
    counts = {kind: len(things) for kind, things in given.items()}
    need(
        counts["image"] <= 9 and counts["video"] <= 3 and counts["audio"] <= 3 and sum(counts.values()) <= 12,
        f"{counts}",
    )
    task = extra["task"]
    if task == "t2va":
        need(not any(counts.values()) and texts["aspect_ratio"] in RATIOS, "t2va requires an explicit aspect_ratio")
    elif task == "fl2va":
        need(1 <= counts["image"] <= 2 and not counts["video"] and not counts["audio"], "fl2va requires images only")
        need(
            extra["frame_indices"] in ([0], [-1], [0, -1]) and len(extra["frame_indices"]) == counts["image"], "indices"
        )
    else:
        need(task == "ref2va" and counts["image"] + counts["video"] > 0, "ref2va requires an image or video")


def take_omni_masks(asked: dict, files: list, canvas: tuple[int, int, int]) -> None:
    width, height, frames = canvas
    shapes = {"video": ((frames - 5) // 17 * 5 + 2, height // 16, width // 16), "audio": (2, round(frames / 24 * 40))}
    named = {part[0]: part for part in files}
    for stream, shape in shapes.items():
        part = named.get(f"{stream}_noise_mask")
        if part is None:
            continue
        need(len(part[3]) <= 8 << 20, "JSON exceeds the 8 MiB limit")
        mask = np.array(json.loads(part[3].decode("utf-8")), np.float32)
        need(mask.shape == shape and mask.min() >= 0 and mask.max() <= 1, f"{stream}_noise_mask shape {mask.shape}")
        asked[stream] = mask
    if "source_video" in named:
        facts = media_facts(named["source_video"][3])
        need(facts["video"]["count"] == frames and facts["video"]["size"] == (width, height), f"source {facts}")
        need("video" in asked or "audio" in asked, "edit sources require a mask")
        need("audio" not in asked or "audio" in facts, "source_video has no audio track")
    else:
        need("video" not in asked and "audio" not in asked, "video_noise_mask requires source_video")


def tell_omni(job: Job, stand: Stand) -> tuple[int, dict]:
    made = {
        "id": job.id, "object": "video", "model": "MiniMaxAI/MiniMax-H3", "prompt": "x", "status": job.status,
        "progress": 100 if job.status == "completed" else 0, "seconds": "4", "quality": "lossless", "created_at": 1,
        "media_type": "video/mp4", "error": None, "file_name": "../../evil.mp4", "stage_durations": {},
    }  # fmt: skip
    if job.status == "failed":
        made["error"] = {"code": 500, "message": f"worker died, key {stand.key}"}
        return 500, made
    return 200, made


TAKE = {"sglang": take_sglang, "vllm-omni": take_omni}
TELL = {"sglang": tell_sglang, "vllm-omni": tell_omni}


# ---- HTTP


class Handling(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stand: Stand

    def log_message(self, *args) -> None:
        return None

    def handle(self) -> None:
        try:
            super().handle()
        except (BrokenPipeError, ConnectionResetError):  # the client went away
            self.close_connection = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.stand.seen.append(("POST", self.path, dict(self.headers), body))
        if self.path != "/v1/videos" or self.refused():
            return None if self.path == "/v1/videos" else self.json(404, {"detail": "Not Found"})
        if self.misbehave("post"):
            return None
        try:
            job = TAKE[self.stand.engine](self.stand, self.headers, body)
        except Refused as error:
            return self.json(400, {"detail": str(error)})
        job.id = self.stand.ids.format(n=len(self.stand.jobs) + 1)
        self.stand.jobs[job.id] = job
        self.json(*TELL[self.stand.engine](job, self.stand))

    def do_GET(self) -> None:
        self.stand.seen.append(("GET", self.path, dict(self.headers), b""))
        if self.refused():
            return None
        parts = urlsplit(self.path)
        plain = {"/health": self.health, "/v1/models": self.models, "/server_info": self.info}
        if parts.path in plain:
            return None if self.misbehave(parts.path.lstrip("/")) else plain[parts.path]()
        match = re.fullmatch(r"/v1/videos/([^/]+)(/content)?", parts.path)
        job = None if match is None else self.stand.jobs.get(unquote(match[1]))
        kind = "content" if match is not None and match[2] else "status"
        if self.misbehave(kind, job):
            return None
        if job is None:
            return self.json(404, {"detail": "Video not found"})
        if kind == "status":
            job.looked += 1
            if job.status in ("queued", "in_progress"):
                job.status = "completed" if job.looked >= self.stand.looks else "in_progress"
            return self.json(*TELL[self.stand.engine](job, self.stand))
        output = int(parse_qs(parts.query).get("variant", ["0"])[0])
        if job.status != "completed" or output >= job.outputs:
            return self.json(404, {"detail": "Generation is still in-progress"})
        self.clip(clip_bytes(job.width, job.height, job.frames, job.seed + output))

    def do_DELETE(self) -> None:
        self.stand.seen.append(("DELETE", self.path, dict(self.headers), b""))
        job = self.stand.jobs.pop(unquote(self.path.rpartition("/")[2]), None)
        self.json(200 if job else 404, {"id": job.id if job else "", "deleted": True, "object": "video.deleted"})

    # --- plain answers

    def health(self) -> None:
        self.json(200, {"status": "ok"})

    def models(self) -> None:
        card = {"id": "MiniMaxAI/MiniMax-H3", "object": "model"}
        if self.stand.engine == "sglang":
            card |= {"num_gpus": 4, "task_type": "TI2V", "pipeline_name": "MiniMaxH3Pipeline"}
        self.json(200, {"object": "list", "data": [{**card, **self.stand.facts.get("model", {})}]})

    def info(self) -> None:
        if self.stand.engine != "sglang":
            return self.json(404, {"detail": "Not Found"})
        made = {"model_path": "MiniMaxAI/MiniMax-H3", "served_model_name": "MiniMaxAI/MiniMax-H3", "tp_size": 1}
        self.json(200, {**made, "version": self.stand.version or "0.5.23", **self.stand.facts.get("info", {})})

    def refused(self) -> bool:
        if self.stand.key and self.headers.get("Authorization") != f"Bearer {self.stand.key}":
            self.json(401, {"error": "Unauthorized"})
            return True
        return False

    def json(self, status: int, content: dict, kind: str = "application/json") -> None:
        self.whole(status, kind, json.dumps(content).encode())

    def clip(self, data: bytes, kind: str = "video/mp4", length: int | None = None) -> None:
        self.whole(200, kind, data, length, 'attachment; filename="../../../evil.mp4"')

    def whole(self, status: int, kind: str, data: bytes, length: int | None = None, named: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        if named:
            self.send_header("Content-Disposition", named)
        self.end_headers()
        self.wfile.write(data)

    # --- misbehaviour

    def misbehave(self, kind: str, job: Job | None = None) -> bool:
        """The next trouble of this kind, done; False where there is none."""
        waiting = self.stand.trouble.get(kind)
        if not waiting:
            return False
        what = waiting.pop(0) if len(waiting) > 1 or waiting[0] != "always" else "always"
        data = clip_bytes(job.width, job.height, job.frames, job.seed) if kind == "content" and job else b"{}"
        self.close_connection = True
        return self.wrong(what, data, job)

    def wrong(self, what, data: bytes, job: Job | None) -> bool:
        if what == "ok":
            return False
        if what == "slow":
            time.sleep(1.2)
            return False
        if what == "silent":
            time.sleep(5)
        elif what == "500":
            self.json(500, {"error": {"message": f"boom {self.stand.key}"}})
        elif what == "422":
            self.json(422, {"detail": [{"loc": ["body", "seed"], "msg": "Input should be an integer", "type": "int"}]})
        elif what == "503 html":
            self.whole(503, "text/html", b"<html>busy</html>")
        elif what == "drop":  # the connection ends in the middle of a body
            self.clip(data[: len(data) // 2], length=len(data))
        elif what == "hang up":
            pass
        elif what == "html":
            self.whole(200, "text/html", b"<html>hello</html>")
        elif what == "cut":  # a body that is complete by its length, of a file that is not
            self.clip(data[: len(data) * 2 // 3])
        elif what == "noise":
            self.clip(b"this is no video at all " * 50)
        elif what == "endless":
            self.send_response(200)
            self.send_header("Content-Type", "video/mp4")
            self.end_headers()
            for _ in range(4000):
                self.wfile.write(bytes(1 << 16))
        elif what == "large":
            self.clip(b"x", length=1 << 50)
        elif what == "lost":
            self.json(404, {"detail": "Video not found"})
        elif what == "failed":
            job.status = "failed"
            self.json(*TELL[self.stand.engine](job, self.stand))
        elif what == "strange":
            self.json(200, {"id": job.id, "status": "sublimated"})
        elif what == "garbage":
            self.whole(200, "application/json", b"{" * 2000)
        elif isinstance(what, bytes):
            self.clip(what)
        else:
            assert what.startswith("to http"), what
            self.send_response(302)
            self.send_header("Location", what[3:])
            self.send_header("Content-Length", "0")
            self.end_headers()
        return True


@contextmanager
def serving(engine: str, **facts):
    """A stand-in at a free port of this machine; ``facts`` are fields of Stand."""
    stand = Stand(engine, **facts)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handling", (Handling,), {"stand": stand}))
    server.daemon_threads = True
    stand.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield stand
    finally:
        server.shutdown()
        server.server_close()
