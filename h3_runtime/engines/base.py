"""What an engine has to say of itself: which requests it takes, how they are written down, what its answers mean.

    Shipment ─check─▶ Submission, Submission ... (one job each) ─▶ POST ─▶ job id
    GET job ─▶ State (status, percent, reason)                     GET content k ─▶ mp4

One file per engine with one class; the table is in ``__init__``. Facts come from the engines' own sources, named there
with their versions: what a version does that nobody has read is refused, not guessed.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..errors import H3Error
from .settings import Server
from .shipment import Shipment
from .wire import Answer, Client, Lost, job_path

RUNNING = ("queued", "in_progress")
DONE = "completed"
FAILED = "failed"


@dataclass(frozen=True)
class Told:
    """What a server says of itself, or its settings say for it. ``version`` and ``partition`` may be ""."""

    model: str = ""
    version: str = ""
    partition: str = ""
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Submission:
    """One job as it is posted; it gives ``outputs`` clips, with seeds from ``seed`` on."""

    kind: str
    body: bytes
    seed: int
    outputs: int


@dataclass(frozen=True)
class State:
    """A job: ``status`` of RUNNING, DONE or FAILED; ``percent`` 0..100; ``reason`` of a failure, in the server's
    words."""

    status: str
    percent: int = 0
    reason: str = ""


class Engine(ABC):
    """One kind of server."""

    name: str
    title: str
    supports: tuple[str, ...]
    stops = False  # whether a running job can be ended

    @abstractmethod
    def describe(self, client: Client) -> Told:
        """Ask what it serves. H3Error where it is not this engine or not this model."""

    @abstractmethod
    def check_version(self, told: Told) -> None:
        """H3Error where it is not known how this version counts steps: nothing can be sent to it."""

    @abstractmethod
    def check(self, shipment: Shipment, told: Told) -> None:
        """H3Error, naming the input, for what this engine cannot do; nothing has been sent yet."""

    @abstractmethod
    def submissions(self, shipment: Shipment, told: Told) -> list[Submission]:
        """The jobs that make the request's outputs."""

    @abstractmethod
    def content(self, job: str, output: int) -> str:
        """The path of a clip of a finished job."""

    def notes(self, shipment: Shipment, told: Told) -> list[str]:
        """What this engine does otherwise than a render here."""
        return [f"{self.title} draws its noise its own way: seed {shipment.request.seed} gives another clip there"]

    def stop(self, client: Client, job: str) -> str:
        """End a running job where the engine can; a sentence."""
        return f"job {job} goes on at server {client.server.name}, which cannot end a running job"

    def state(self, client: Client, job: str) -> State:
        """How a job stands. Lost where the server cannot say now; H3Error where it knows no such job."""
        answer = client.get(job_path(job))
        name = client.server.name
        if answer.status == 404:
            raise H3Error(
                f"server {name} does not know job {client.server.clean(job, 80)} (any more): it was restarted, or the "
                "job was removed; render again"
            )
        made = _object_of(client, answer)
        status = made.get("status")
        if answer.status != 200 and status != FAILED:  # a failed job is told with the status of its failure
            if answer.status in (401, 403):
                raise H3Error(f"server {name} refuses this key (status {answer.status}): check its settings")
            raise Lost(f"server {name} has trouble (status {answer.status}): {client.says(answer)}")
        if status not in (*RUNNING, DONE, FAILED):
            word = client.server.clean(status, 40)
            raise H3Error(f"server {name} says that the job is {word!r}, which is not known here")
        progress = made.get("progress")
        percent = min(100, max(0, progress)) if isinstance(progress, int) else 0
        reason = ""
        if status == FAILED:
            error = made.get("error")
            reason = error.get("message") if isinstance(error, dict) else error
            reason = client.server.clean(reason or "no reason given")
        return State(status, percent, reason)


def _object_of(client: Client, answer: Answer) -> dict:
    """The JSON of an answer; of one that is an error, {} where it has none."""
    if answer.status == 200:
        return client.object(answer)
    try:
        return client.object(answer)
    except H3Error:
        return {}


def number_of(version: str) -> tuple[int, int, int] | None:
    """(0, 5, 23) of 0.5.23, 0.5.23.post1, 0.5.23+cu129; None for a pre-release, which may be either."""
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:\.post\d+)?(?:\+[A-Za-z0-9.]+)?", version)
    return None if match is None else tuple(map(int, match.groups()))


def version_of(server: Server, told: str) -> str:
    """The server's own word, else the settings'."""
    return server.clean(told, 60) if told else server.version


def healthy(client: Client) -> None:
    """H3Error or Lost where /health does not say that requests are taken."""
    name, answer = client.server.name, client.get("/health")
    if answer.status in (401, 403):
        raise H3Error(f"server {name} refuses this key (status {answer.status}): check its settings")
    if answer.status != 200:
        raise Lost(f"server {name} is not ready (status {answer.status}): {client.says(answer)}")


def first_model(client: Client) -> dict:
    """The first entry of /v1/models."""
    answer, name = client.get("/v1/models"), client.server.name
    if answer.status in (401, 403):
        raise H3Error(f"server {name} refuses this key (status {answer.status}): check its settings")
    if answer.status != 200:
        raise Lost(f"server {name} does not tell its model (status {answer.status}): {client.says(answer)}")
    data = client.object(answer).get("data")
    if not (isinstance(data, list) and data and isinstance(data[0], dict) and isinstance(data[0].get("id"), str)):
        raise H3Error(f"server {name} serves no model: start it with MiniMaxAI/MiniMax-H3")
    return data[0]


def check_partition(shipment: Shipment, told: Told, server: str) -> None:
    """H3Error where the weights served are known and are not those this request needs."""
    needed = "ref2va" if shipment.task == "ref2va" else "fl2va"
    if told.partition in ("fl2va", "ref2va") and told.partition != needed:
        names = {"fl2va": "FL2VA", "ref2va": "Ref2VA"}
        what = "references: they need" if needed == "ref2va" else "a request without references needs"
        raise H3Error(f"{what} {names[needed]} weights, and {server} serves {names[told.partition]} weights")
