"""vLLM-Omni: multipart to /v1/videos, media told apart by MIME type, masks on the latent grid, one clip a job.

Read in vLLM-Omni 0.30.0 (wheel), below vllm_omni:
    entrypoints/openai/api_server.py, protocol/videos.py, video/generation/helpers.py     endpoints, answers, the form
    entrypoints/openai/serving_video.py        a job of several outputs gives only the first: each output is a job here
    model_executor/models/minimax_h3/encoder_processing.py, preprocessing.py, reference_video.py   canvas, masks, limits
    diffusion/models/minimax_h3/time_request.py, latent_mask.py        steps count forwards; mask 1 is generated
and time_request.py again in 0.28.0, 0.29.0rc1 and 0.30.0rc1, where steps count grid points. A server does not tell its
version, so its settings must.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from ..errors import H3Error
from .base import Engine, Submission, Told, check_partition, first_model, healthy, number_of
from .shipment import Shipment, Thing, count_kinds, seconds_for
from .wire import Client, job_path

if TYPE_CHECKING:
    from torch import Tensor

OLDEST = (0, 30, 0)
RATIOS = {"21:9": 21 / 9, "16:9": 16 / 9, "4:3": 4 / 3, "1:1": 1.0, "3:4": 3 / 4, "9:16": 9 / 16}
SECONDS = (4.0, 15.0)
MAX_STEPS = 200
MIB = 1 << 20
MASK_BYTES = 8 * MIB
SOURCE_BYTES = 512 * MIB
THING_BYTES = {"image": 30 * MIB, "video": 50 * MIB, "audio": 15 * MIB}
EDGES, SIDES, LENGTHS = (256, 5760), (0.4, 2.5), (2.0, 15.0)
ENDINGS = {"image/png": ".png", "video/mp4": ".mp4", "audio/wav": ".wav"}


class VllmOmni(Engine):
    """POST /v1/videos, GET and DELETE /v1/videos/{id}, GET /v1/videos/{id}/content."""

    name = "vllm-omni"
    title = "vLLM-Omni"
    supports = (
        "text; first and last frame; references; masks of picture and sound",
        "several outputs, a job each; quality lossless and high; a running job can be ended",
        "not: first or last frame beside references, guides in the middle, prompt embeddings, LoRA files",
    )
    stops = True

    def describe(self, client: Client) -> Told:
        healthy(client)
        server = client.server
        return Told(server.clean(first_model(client)["id"], 120), server.version, server.partition)

    def check_version(self, told: Told) -> None:
        number = number_of(told.version)
        if number is None or number < OLDEST:
            given = f"version {told.version}" if told.version else "no version"
            raise H3Error(
                f"steps: the settings give {given}, and vLLM-Omni before 0.30.0 counts one more than it runs; a server "
                'does not tell its version, so write it there once: "version": "0.30.0"'
            )

    def check(self, shipment: Shipment, told: Told) -> None:
        self.check_version(told)
        check_partition(shipment, told, "this server")
        request, canvas = shipment.request, shipment.canvas
        seconds_for(canvas, *SECONDS)
        if request.num_forwards > MAX_STEPS:
            raise H3Error(f"steps {request.num_forwards}: vLLM-Omni takes 1 to {MAX_STEPS}")
        if not 0.25 <= canvas.width / canvas.height <= 4:
            raise H3Error(f"size {canvas.width}x{canvas.height} is outside 1:4 to 4:1, which is all vLLM-Omni makes")
        if shipment.references and shipment.keyframes:
            raise H3Error("first or last frame: vLLM-Omni takes none beside references; leave one of the two out")
        for _, thing in shipment.keyframes:
            _check_picture(thing)
        _check_references(shipment.references)
        if shipment.masks is not None:
            _check_size("source", shipment.source, SOURCE_BYTES)
            masks_of(shipment)

    def notes(self, shipment: Shipment, told: Told) -> list[str]:
        said = super().notes(shipment, told)
        if number_of(told.version) > OLDEST:
            said.append(f"the server is vLLM-Omni {told.version}: the newest whose sources were read is 0.30.0")
        if shipment.outputs > 1:
            said.append(f"{shipment.outputs} jobs were sent, because a job of vLLM-Omni gives one clip")
        return said

    def submissions(self, shipment: Shipment, told: Told) -> list[Submission]:
        files = files_of(shipment)
        seeds = range(shipment.request.seed, shipment.request.seed + shipment.outputs)
        return [Submission(*form([*fields_of(shipment, seed), *files]), seed, 1) for seed in seeds]

    def content(self, job: str, output: int) -> str:
        return job_path(job, "content")

    def stop(self, client: Client, job: str) -> str:
        name = client.server.name
        try:
            answer = client.delete(job_path(job))
        except H3Error as error:
            return f"job {job} could not be ended ({error})"
        if answer.status in (200, 404):
            return f"job {job} was ended at server {name}"
        return f"job {job} could not be ended at server {name} (status {answer.status}: {client.says(answer)})"


def fields_of(shipment: Shipment, seed: int) -> list[tuple[str, str]]:
    """The text fields of the form, in the engine's own spelling."""
    request, canvas = shipment.request, shipment.canvas
    extra: dict = {"task": shipment.task, "duration": seconds_for(canvas, *SECONDS)}
    extra["audio_flow_shift"] = float(request.audio_shift)
    fields = {
        "prompt": request.prompt,
        "width": canvas.width,
        "height": canvas.height,
        "fps": 24,
        "num_inference_steps": request.num_forwards,
        "flow_shift": float(request.video_shift),
        "seed": int(seed),
        "quality": shipment.quality,
    }
    if shipment.task == "fl2va":
        extra["frame_indices"] = [place for place, _ in shipment.keyframes]
    else:  # width and height decide; the ratio is asked for all the same
        ratio = canvas.width / canvas.height
        fields["aspect_ratio"] = min(RATIOS, key=lambda name: abs(RATIOS[name] - ratio))
    fields["extra_params"] = json.dumps(extra)
    return [(name, str(value)) for name, value in fields.items()]


def files_of(shipment: Shipment) -> list[tuple[str, str, str, bytes]]:
    """(field, file name, MIME type, bytes) of all files; the names are ours, never those of the user's files."""
    things = [thing for _, thing in shipment.keyframes] or list(shipment.references)
    files = [
        ("input_references", f"reference_{number}{ENDINGS[thing.mime]}", thing.mime, thing.data)
        for number, thing in enumerate(things, 1)
    ]
    if shipment.masks is not None:
        source = shipment.source
        files.append(("source_video", "source.mp4", source.mime, source.data))
        files += [(f"{stream}_noise_mask", f"{stream}.json", "application/json", data)
                  for stream, data in masks_of(shipment)]  # fmt: skip
    return files


def masks_of(shipment: Shipment) -> list[tuple[str, bytes]]:
    """("video", JSON [T][h][w]) and ("audio", JSON [2][A]) of the masks there are: 1 is made anew, as in ours."""
    made = []
    for stream, mask in (("video", shipment.masks.video), ("audio", shipment.masks.audio)):
        if mask is not None:
            data = json.dumps(numbers(mask), separators=(",", ":")).encode()
            if len(data) > MASK_BYTES:
                raise H3Error(
                    f"mask: that of the {stream} is {len(data) / MIB:.1f} MiB, vLLM-Omni takes 8; use a smaller size"
                )
            made.append((stream, data))
    return made


def numbers(mask: Tensor) -> list:
    """A mask as nested lists; whole numbers short."""

    def short(value):
        return [short(one) for one in value] if isinstance(value, list) else int(value) if value in (0, 1) else value

    return short(mask.tolist())


def form(parts: list[tuple]) -> tuple[str, bytes]:
    """(Content-Type, body) of a multipart form: texts (name, value) and files (name, file name, MIME type, bytes)."""
    digest = hashlib.sha256()
    for part in parts:
        for value in part:
            digest.update(value if isinstance(value, bytes) else value.encode())
    mark = f"h3-{digest.hexdigest()[:40]}"  # the same request gives the same bytes
    lines = []
    for name, *rest in parts:
        head = f'--{mark}\r\nContent-Disposition: form-data; name="{name}"'
        if len(rest) == 1:
            lines += [f"{head}\r\n\r\n".encode(), rest[0].encode(), b"\r\n"]
        else:
            file, mime, data = rest
            lines += [f'{head}; filename="{file}"\r\nContent-Type: {mime}\r\n\r\n'.encode(), data, b"\r\n"]
    return f"multipart/form-data; boundary={mark}", b"".join([*lines, f"--{mark}--\r\n".encode()])


def _check_size(name: str, thing: Thing, most: int) -> None:
    if len(thing.data) > most:
        raise H3Error(
            f"{name} {thing.name} is {len(thing.data) / MIB:.1f} MiB as it is sent: {most // MIB} MiB are taken"
        )


def _check_picture(thing: Thing) -> None:
    width, height = thing.size
    if not (EDGES[0] <= min(thing.size) and max(thing.size) <= EDGES[1] and SIDES[0] <= width / height <= SIDES[1]):
        raise H3Error(
            f"{thing.name} is {width}x{height} as it is sent: vLLM-Omni takes {EDGES[0]} to {EDGES[1]} pixels an edge "
            f"and ratios of {SIDES[0]} to {SIDES[1]}"
        )
    kind = "video" if thing.kind.startswith("video") else thing.kind
    _check_size("picture" if kind == "image" else "clip", thing, THING_BYTES[kind])


def _check_references(things: tuple[Thing, ...]) -> None:
    order = ["image", "video", "audio"]
    places = [order.index("video" if thing.kind == "video_audio" else thing.kind) for thing in things]
    if places != sorted(places):
        raise H3Error("references: vLLM-Omni takes pictures first, then clips, then sounds; give them in this order")
    for kind, group in count_kinds(things).items():
        for thing in group:
            if kind != "audio":
                _check_picture(thing)
            else:
                _check_size("sound", thing, THING_BYTES[kind])
            if kind != "image" and not LENGTHS[0] <= thing.seconds <= LENGTHS[1]:
                raise H3Error(
                    f"{thing.name} lasts {thing.seconds:.3f} s as it is sent: vLLM-Omni takes {LENGTHS[0]:g} to "
                    f"{LENGTHS[1]:g} s"
                )
        total = sum(thing.seconds for thing in group)
        if kind != "image" and total > LENGTHS[1]:
            what = "clips" if kind == "video" else "sounds"
            raise H3Error(f"the reference {what} last {total:.3f} s together: vLLM-Omni takes {LENGTHS[1]:g} s")
