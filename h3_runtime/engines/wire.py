"""HTTP to one origin, with guards: what a server may cost in bytes and seconds, and where a key may go.

    Client(server).get / post / delete ─▶ one connection each, no proxy, no redirect followed
          │ worker: connect, send in blocks, read in blocks into memory or a file, counting
          └ here:   poll() ten times a second (Cancel), the clock, and the scissors for the connection

Every failure is a sentence without the key. ``Lost`` may be tried again, ``H3Error`` may not.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

from ..errors import H3Error
from .settings import Server

BLOCK = 1 << 16
TICK = 0.1


class Lost(H3Error):
    """The connection failed or the server was busy: the same call may succeed later."""


@dataclass(frozen=True)
class Limits:
    """Seconds and bytes that one server may cost. ``pace``: seconds between two looks at a job, first and longest;
    ``patience``: how long a server may be away while its job runs; ``job``: the longest wait for one job."""

    connect: float = 10.0
    idle: float = 60.0
    answer: float = 120.0
    upload: float = 1800.0
    download: float = 3600.0
    answer_bytes: int = 4 << 20
    clip_bytes: int = 1 << 30
    request_bytes: int = 512 << 20
    pace: tuple[float, float] = (1.0, 5.0)
    patience: float = 180.0
    job: float = 6 * 3600.0


@dataclass(frozen=True)
class Answer:
    """What came back: ``data`` is empty where it went to a file."""

    status: int
    kind: str
    data: bytes
    nbytes: int


@dataclass
class _Exchange:
    """One request on its way, shared by the worker and the one who waits."""

    connection: http.client.HTTPConnection
    socket: socket.socket | None = None
    cut: bool = False
    answer: Answer | None = None
    error: BaseException | None = None


def job_path(job: str, *more: str) -> str:
    """The path of a job: its id percent-encoded, so that it stays one part of the path. H3Error for what is no id."""
    if not (isinstance(job, str) and 0 < len(job) <= 200 and job.isprintable() and set(job) - {"."}):
        raise H3Error("the server gave a job id that cannot be used: empty, too long, or no plain text")
    return "/".join(["/v1/videos", quote(job, safe=""), *more])


class Client:
    """Calls to one server. ``poll`` is called while anything waits, and may raise to stop it."""

    def __init__(self, server: Server, poll: Callable[[], None] = lambda: None, limits: Limits = Limits()):
        self.server, self.poll, self.limits = server, poll, limits

    def get(self, path: str) -> Answer:
        return self._call("GET", path, seconds=self.limits.answer)

    def delete(self, path: str) -> Answer:
        return self._call("DELETE", path, seconds=self.limits.answer)

    def post(self, path: str, kind: str, body: bytes) -> Answer:
        if len(body) > self.limits.request_bytes:
            raise H3Error(
                f"the request is {len(body) >> 20} MiB with its media: at most {self.limits.request_bytes >> 20} MiB "
                "are sent, give smaller pictures or shorter clips"
            )
        return self._call("POST", path, (kind, body), seconds=self.limits.upload)

    def download(self, path: str, sink: BinaryIO) -> Answer:
        """The body of a 200 goes to ``sink``; that of any other status to memory."""
        return self._call("GET", path, seconds=self.limits.download, sink=sink)

    def object(self, answer: Answer) -> dict[str, Any]:
        """The JSON object of an answer. H3Error for anything else."""
        name = self.server.name
        if answer.kind != "application/json":
            kind = self.server.clean(answer.kind or "nothing", 60)
            raise H3Error(f"server {name} answered with {kind} in place of JSON: is its origin right?")
        try:
            made = json.loads(answer.data)
        except (ValueError, RecursionError):
            raise H3Error(f"server {name} answered with damaged JSON: is its origin right?") from None
        if not isinstance(made, dict):
            raise H3Error(f"server {name} answered with JSON that is no object: is its origin right?")
        return made

    def says(self, answer: Answer) -> str:
        """The server's own words about an error, in one short line."""
        try:
            made: Any = json.loads(answer.data)
        except (ValueError, RecursionError):
            return self.server.clean(answer.data[:2000].decode("utf-8", "replace")) or "no reason given"
        for _ in range(4):
            if isinstance(made, dict) and isinstance(made.get("loc"), list) and made.get("msg"):
                made = f"{'.'.join(map(str, made['loc']))}: {made['msg']}"
            elif isinstance(made, dict):
                made = next((made[key] for key in ("error", "detail", "message", "msg") if made.get(key)), "")
            elif isinstance(made, list):
                made = made[0] if made else ""
        return self.server.clean(made) or "no reason given"

    def sleep(self, seconds: float) -> None:
        """Wait, polled."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.poll()
            time.sleep(min(TICK, left))

    # --- one exchange -------------------------------------------------------------------------------------------

    def _call(
        self, method: str, path: str, body: tuple[str, bytes] | None = None, seconds: float = 60.0, sink=None
    ) -> Answer:
        exchange = _Exchange(self._connection())
        work = threading.Thread(target=self._work, args=(exchange, method, path, body, sink), daemon=True)
        work.start()
        end = time.monotonic() + seconds
        try:
            while work.is_alive():
                work.join(TICK)
                self.poll()
                if work.is_alive() and time.monotonic() > end:
                    raise Lost(f"server {self.server.name} took longer than {seconds:g} s to answer")
        except BaseException:
            _cut(exchange)
            work.join(2.0)
            raise
        if exchange.error is not None:
            raise self._told(exchange.error) from None
        return exchange.answer

    def _connection(self) -> http.client.HTTPConnection:
        origin = self.server.origin
        given = {"timeout": self.limits.connect, "blocksize": BLOCK}
        if origin.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(origin.host, origin.port, context=context, **given)
        return http.client.HTTPConnection(origin.host, origin.port, **given)

    def _work(self, exchange: _Exchange, method: str, path: str, body, sink) -> None:
        try:
            exchange.answer = self._talk(exchange, method, path, body, sink)
        except BaseException as error:
            exchange.error = error
        finally:
            exchange.connection.close()

    def _talk(self, exchange: _Exchange, method: str, path: str, body, sink) -> Answer:
        connection = exchange.connection
        connection.connect()
        exchange.socket = connection.sock
        connection.sock.settimeout(self.limits.idle)
        if exchange.cut:
            raise ConnectionAbortedError
        headers = {"Accept-Encoding": "identity", "Connection": "close", "User-Agent": "minimax-h3-runtime"}
        if self.server.key:
            headers["Authorization"] = f"Bearer {self.server.key}"
        stream = None
        if body is not None:
            headers |= {"Content-Type": body[0], "Content-Length": str(len(body[1]))}
            stream = io.BytesIO(body[1])  # sent in blocks: each has the idle time, not the whole
        with suppress(BrokenPipeError, ConnectionResetError):  # a server may refuse before it has read all
            connection.request(method, path, stream, headers)
        response = connection.getresponse()
        if 300 <= response.status < 400:
            raise H3Error(self._redirected(response.getheader("Location")))
        if response.getheader("Content-Encoding", "identity").lower() != "identity":
            raise H3Error(f"server {self.server.name} packed its answer, which was not asked for: it is not read")
        return self._read(exchange, response, sink if response.status == 200 else None)

    def _read(self, exchange: _Exchange, response: http.client.HTTPResponse, sink) -> Answer:
        kind = response.getheader("Content-Type", "").split(";")[0].strip().lower()
        most = self.limits.answer_bytes if sink is None else self.limits.clip_bytes
        told = response.length
        if told is not None and told > most:
            raise self._too_much(most)
        if sink is not None and kind != "video/mp4":
            kind = self.server.clean(kind or "nothing", 60)
            raise H3Error(f"server {self.server.name} sent {kind} in place of video/mp4: it is not kept")
        blocks, count = [], 0
        while block := response.read1(BLOCK):
            count += len(block)
            if exchange.cut:
                raise ConnectionAbortedError
            if count > most:
                raise self._too_much(most)
            if sink is None:
                blocks.append(block)
            else:
                sink.write(block)
        if told is not None and count < told:
            raise http.client.IncompleteRead(b"", told - count)
        return Answer(response.status, kind, b"".join(blocks), count)

    def _too_much(self, most: int) -> H3Error:
        return H3Error(f"server {self.server.name} sends more than {most >> 20} MiB: that is not what was asked for")

    def _redirected(self, location: str | None) -> str:
        try:
            parts = urlsplit(location or "")
            where = f" to {self.server.clean(f'{parts.scheme}://{parts.hostname}', 80)}" if parts.hostname else ""
        except ValueError:
            where = ""
        return (
            f"server {self.server.name} redirects{where}: no redirect is followed, and no key goes with one; if that "
            "is where it really is, write that origin into its settings"
        )

    def _told(self, error: BaseException) -> BaseException:
        """A failure in the wire as a sentence; what is one already, and what is a fault of ours, as it is."""
        name, origin = self.server.name, self.server.origin
        if isinstance(error, H3Error):
            return error
        if isinstance(error, ssl.SSLCertVerificationError):
            return H3Error(f"server {name} at {origin} has a certificate that cannot be trusted: nothing was sent")
        if isinstance(error, ssl.SSLError):
            return Lost(f"server {name} at {origin} does not speak https as it should: is it http?")
        if isinstance(error, socket.gaierror):
            return Lost(f"server {name} at {origin}: this host name is not known here")
        if isinstance(error, ConnectionRefusedError):
            return Lost(f"server {name} at {origin} is not running, or another port")
        if isinstance(error, TimeoutError):
            return Lost(f"server {name} at {origin} does not answer")
        if isinstance(error, http.client.IncompleteRead):
            return Lost(f"server {name} dropped the connection before all had come")
        if isinstance(error, http.client.HTTPException):
            return Lost(f"what answers at {origin} is no server of this kind ({type(error).__name__})")
        if isinstance(error, OSError) and error.errno in _DISK:
            return H3Error(f"the clip of server {name} could not be written ({error.strerror}): free some space")
        if isinstance(error, OSError):
            return Lost(f"the connection to server {name} at {origin} was lost")
        return error


def _disk_errors() -> frozenset[int]:
    import errno

    return frozenset(
        getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EROFS", "EFBIG", "EIO") if hasattr(errno, name)
    )


_DISK = _disk_errors()


def _cut(exchange: _Exchange) -> None:
    """End an exchange that somebody waits in, from outside."""
    exchange.cut = True
    if exchange.socket is not None:
        with suppress(OSError):
            exchange.socket.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            exchange.socket.close()
