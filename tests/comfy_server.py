"""A real ComfyUI on a free port with this package in it, in a base folder of its own: the checkout is left as it is.

    base/custom_nodes/minimax-h3-runtime ─▶ this repository       base/models/diffusion_models/dit.safetensors ...
    ComfyServer(base).start() ─▶ run(graph) ─▶ Done(status, outputs, messages, what ran, what was cached)

COMFYUI_PATH names the checkout (or this repository lies in its custom_nodes); COMFYUI_PYTHON the interpreter that has
its packages (default: the one that runs the tests).
"""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 180


def find_checkout() -> tuple[Path | None, str]:
    """(the ComfyUI checkout or None, why there is none)."""
    named = os.environ.get("COMFYUI_PATH")
    if named:
        path = Path(named)
        return (path, "") if (path / "main.py").is_file() else (None, f"COMFYUI_PATH {named} holds no main.py")
    if ROOT.parent.name == "custom_nodes" and (ROOT.parents[1] / "main.py").is_file():
        return ROOT.parents[1], ""
    return None, "COMFYUI_PATH names no ComfyUI"


def find_python() -> str:
    return os.environ.get("COMFYUI_PYTHON") or sys.executable


@dataclass
class Done:
    """What became of a queued graph. ``refused``: the answer to a graph that was not queued."""

    status: str
    outputs: dict = field(default_factory=dict)
    messages: list = field(default_factory=list)
    refused: dict | None = None

    @property
    def error(self) -> str:
        """The sentence that the page shows, or the refusal's details."""
        if self.refused is not None:
            return json.dumps(self.refused)
        return next((m[1]["exception_message"].strip() for m in self.messages if m[0] == "execution_error"), "")

    @property
    def failed_node(self) -> str | None:
        return next((m[1]["node_type"] for m in self.messages if m[0] == "execution_error"), None)

    @property
    def cached(self) -> set[str]:
        return {name for m in self.messages if m[0] == "execution_cached" for name in m[1]["nodes"]}

    def notes(self, name: str) -> str:
        return "\n".join(self.outputs[name]["h3_notes"])


class ComfyServer:
    """One server process. ``options`` go to its command line, ``environment`` to its variables."""

    def __init__(self, checkout: Path, base: Path, *options: str, package: bool = True, **environment: str):
        self.checkout, self.base, self.options, self.environment = checkout, base, options, environment
        for name in ("models/diffusion_models", "input", "output", "temp", "user"):
            (base / name).mkdir(parents=True, exist_ok=True)
        nodes = base / "custom_nodes"
        nodes.mkdir(exist_ok=True)
        link = nodes / "minimax-h3-runtime"
        if package and not link.exists():
            link.symlink_to(ROOT, target_is_directory=True)
        self.process: subprocess.Popen | None = None
        self.port = 0

    @property
    def output(self) -> Path:
        return self.base / "output"

    @property
    def log(self) -> str:
        return (self.base / "server.log").read_text(errors="replace")

    def start(self) -> ComfyServer:
        """Start and wait until it answers. RuntimeError with the end of its log when it does not."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [find_python(), "main.py", "--cpu", "--port", str(self.port), "--base-directory", str(self.base)]
        command += ["--database-url", "sqlite:///:memory:", "--disable-auto-launch", *self.options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "H3_RECOVERY": str(self.base / "recovery")}
        environment |= {"H3_CONDITIONS": str(self.base / "conditions"), **self.environment}
        with (self.base / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.checkout, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            try:
                self.get("/system_stats")
                return self
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
        self.kill()
        lines = [line for line in self.log.strip().splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else "it printed nothing")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    stop = kill

    def resident_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    # --- the API

    def request(self, path: str, data: dict | None = None) -> dict:
        body = None if data is None else json.dumps(data).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", body, {"Content-Type": "application/json"} if body else {}
        )
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            return json.loads(error.read() or b"{}")

    def get(self, path: str) -> dict:
        return self.request(path)

    def queue(self, graph: dict, **extra) -> tuple[str | None, dict]:
        answer = self.request("/prompt", {"prompt": graph, **extra})
        return answer.get("prompt_id"), answer

    def wait(self, prompt_id: str, seconds: float = 120) -> Done:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = self.get(f"/history/{prompt_id}").get(prompt_id)
            if found:
                status = found["status"]
                return Done(status["status_str"], found["outputs"], status["messages"])
            time.sleep(0.05)
        raise AssertionError(f"the graph did not end in {seconds} s:\n{self.log[-3000:]}")

    def run(self, graph: dict, seconds: float = 120, **extra) -> Done:
        """Queue ``graph`` and wait for its end."""
        prompt_id, answer = self.queue(graph, **extra)
        if prompt_id is None:
            return Done("refused", refused=answer)
        return self.wait(prompt_id, seconds)


class Listener:
    """A page's ear: the server's websocket, text messages and binary ones, as they come."""

    TEXT, BINARY = 1, 2

    def __init__(self, server: ComfyServer, client_id: str):
        self.client_id = client_id
        self.events: list[dict] = []
        self.binary: list[bytes] = []
        self.socket = socket.create_connection(("127.0.0.1", server.port))
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET /ws?clientId={client_id} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.stream = self.socket.makefile("rb")
        while self.stream.readline().strip():
            pass
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        try:
            while True:
                first, second = self.stream.read(2)
                length = second & 0x7F
                if length == 126:
                    length = struct.unpack(">H", self.stream.read(2))[0]
                elif length == 127:
                    length = struct.unpack(">Q", self.stream.read(8))[0]
                payload = self.stream.read(length)
                if first & 0x0F == self.TEXT:
                    self.events.append(json.loads(payload))
                elif first & 0x0F == self.BINARY:
                    self.binary.append(payload)
        except (OSError, ValueError):
            return

    def of_type(self, name: str) -> list[dict]:
        return [event["data"] for event in list(self.events) if event["type"] == name]

    def texts(self) -> list[str]:
        """What nodes showed as text: event 3, then the length of the node's id, the id, the words."""
        found = []
        for payload in list(self.binary):
            kind, length = struct.unpack(">II", payload[:8])
            if kind == 3:
                found.append(payload[8 + length :].decode())
        return found

    def previews(self) -> int:
        return sum(struct.unpack(">I", payload[:4])[0] in (1, 4) for payload in list(self.binary))

    def close(self) -> None:
        self.socket.close()
