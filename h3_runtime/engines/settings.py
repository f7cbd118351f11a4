"""Servers of the user's own: a name, its engine, its origin, its key. A workflow and a command name them, no more.

    engines.json  {"studio": {"engine": "sglang", "origin": "http://127.0.0.1:30010"},        H3_ENGINES, else the
                   "farm": {"engine": "vllm-omni", "origin": "https://gpu.example",            user's settings folder
                            "key": "...", "version": "0.30.0"}}
    environment   H3_ENGINE_STUDIO="sglang http://127.0.0.1:30010"   H3_ENGINE_STUDIO_KEY="..."   (a version may follow)
                      └─▶ Servers: {name: Server}, {name: why it cannot be used}

A key belongs to its origin: it goes over https, or over plain http to this machine itself, and nowhere else.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import H3Error

FILE = "engines.json"
VARIABLE = "H3_ENGINES"
PREFIX = "H3_ENGINE_"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
VERSION = re.compile(r"\d{1,6}\.\d{1,6}\.\d{1,6}[A-Za-z0-9.+_-]{0,40}")
FIELDS = ("engine", "origin", "key", "version", "partition")
PARTITIONS = ("fl2va", "ref2va", "both")
LARGEST = 1 << 20


@dataclass(frozen=True)
class Origin:
    """Scheme, host and port: what a key is bound to."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether it is this machine itself."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @staticmethod
    def parse(text: str) -> Origin:
        """``http://host:port`` or ``https://host[:port]``. H3Error for anything more than that."""
        cure = "give http://HOST:PORT or https://HOST, nothing behind it"
        try:
            parts = urlsplit(text.strip())
            port = parts.port
        except ValueError:
            raise H3Error(f"the origin {text[:80]!r} cannot be read: {cure}") from None
        if "@" in parts.netloc:  # the text may hold a password: it is not repeated
            raise H3Error(f"an origin with a user name or password was given: {cure}, and the key in its own field")
        host = parts.hostname or ""
        more = parts.path not in ("", "/") or parts.query or parts.fragment
        labels = host.rstrip(".").split(".")
        named = ":" in host or all(0 < len(label) < 64 for label in labels)  # an IPv6 address has none
        if (
            parts.scheme not in ("http", "https")
            or more
            or port == 0
            or not (named and re.fullmatch(r"[A-Za-z0-9.:_-]+", host))
        ):
            raise H3Error(f"the origin {text[:80]!r} cannot be used: {cure}")
        return Origin(parts.scheme, host.lower(), port or (443 if parts.scheme == "https" else 80))


@dataclass(frozen=True)
class Server:
    """One server. ``version``, ``partition``: what the user says of it where the server itself does not tell."""

    name: str
    engine: str
    origin: Origin
    key: str = field(default="", repr=False)
    version: str = ""
    partition: str = ""
    source: str = ""

    def __post_init__(self):
        if self.key and not re.fullmatch(r"[!-~]+", self.key):
            raise H3Error(f"the key of server {self.name} holds a space or a character that no key has: copy it again")
        if self.key and self.origin.scheme == "http" and not self.origin.loopback:
            raise H3Error(
                f"server {self.name} has a key and the origin {self.origin}: a key goes over https, or over http to "
                "this machine only; use https or an ssh tunnel to 127.0.0.1"
            )
        if self.version and not VERSION.fullmatch(self.version):
            raise H3Error(f"the version {self.version[:40]!r} of server {self.name} cannot be read: give e.g. 0.30.0")
        if self.partition not in ("", *PARTITIONS):
            raise H3Error(f"server {self.name} has partition {self.partition[:40]!r}: give {', '.join(PARTITIONS)}")

    def clean(self, text: Any, longest: int = 300) -> str:
        """What a server wrote, as one short line that may be shown: no control characters, and never the key."""
        line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
        if self.key:
            line = line.replace(self.key, "***")
        return line if len(line) <= longest else line[: longest - 3] + "..."


@dataclass(frozen=True)
class Servers:
    """All that is configured: ``found`` can be used, ``wrong`` says why others cannot; ``notes`` about the file."""

    path: Path
    found: dict[str, Server]
    wrong: dict[str, str]
    notes: tuple[str, ...] = ()

    def how_to_add(self) -> str:
        """One sentence: where a server is written down."""
        return (
            f'add it to {self.path}: {{"NAME": {{"engine": "sglang", "origin": "http://127.0.0.1:30010"}}}}, engine '
            "sglang or vllm-omni"
        )

    def get(self, name: str) -> Server:
        """The server of this name. H3Error: a URL, an unknown name, an entry that cannot be used."""
        if name in self.found:
            return self.found[name]
        if name in self.wrong:
            raise H3Error(self.wrong[name])
        if not NAME.fullmatch(name):
            raise H3Error(f"a server is chosen by its name, not by an address: {self.how_to_add()}; then give NAME")
        known = f"there are {', '.join(sorted(self.found))}" if self.found else "none is configured"
        raise H3Error(f"no server is called {name}: {known}; {self.how_to_add()}")


def settings_path(environment: Mapping[str, str] = os.environ) -> Path:
    """The file that names the servers: H3_ENGINES, else engines.json in the user's settings folder."""
    if environment.get(VARIABLE):
        return Path(environment[VARIABLE])
    windows = sys.platform == "win32"
    named = Path(environment.get("APPDATA" if windows else "XDG_CONFIG_HOME", ""))
    if not named.is_absolute():
        named = Path.home() / ("AppData/Roaming" if windows else ".config")
    return named / "h3_runtime" / FILE


def load_servers(environment: Mapping[str, str] = os.environ) -> Servers:
    """Every server of the file and of the environment; the environment's come first. An entry that cannot be used
    costs that entry only. H3Error for a file that is no JSON object."""
    path = settings_path(environment)
    entries, notes = _read_file(path), []
    sources = dict.fromkeys(entries, path.name)
    for variable, text in environment.items():
        name = variable[len(PREFIX) :].lower().replace("_", "-")
        if not variable.startswith(PREFIX) or variable.endswith("_KEY") or not NAME.fullmatch(name):
            continue
        engine, origin, *rest = [*text.split(), "", ""]
        version = " ".join(rest).strip()  # more than one word is no version: refused below
        entries[name] = {"engine": engine, "origin": origin, "version": version}
        entries[name]["key"] = environment.get(f"{variable}_KEY", "")
        sources[name] = f"environment {variable}"
    if any(
        isinstance(entry, dict) and entry.get("key") for name, entry in entries.items() if sources[name] == path.name
    ):
        notes += _open_to_others(path)
    found, wrong = {}, {}
    for name, entry in entries.items():
        try:
            found[name] = _server(name, entry, sources[name])
        except H3Error as error:
            wrong[name] = str(error)
    return Servers(path, found, wrong, tuple(notes))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        if not path.exists():
            return {}
        with open(path, "rb") as stream:
            raw = stream.read(LARGEST + 1)
        read = json.loads(raw.decode("utf-8-sig")) if len(raw) <= LARGEST else None
    except (OSError, ValueError, RecursionError) as error:
        place = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise H3Error(f"the settings {path} cannot be read ({place}): write a JSON object of servers") from None
    if not isinstance(read, dict):
        raise H3Error(f"the settings {path} are no JSON object of servers: write {{NAME: {{engine, origin, key}}}}")
    return read


def _server(name: str, entry: Any, source: str) -> Server:
    from . import ENGINES

    if not NAME.fullmatch(name):
        raise H3Error(f"the server name {name[:40]!r} cannot be used: letters, digits, - and _ only, at most 40")
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise H3Error(f"server {name} is no object of texts: write engine, origin and, where there is one, key")
    unknown = sorted(set(entry) - set(FIELDS))
    if unknown:
        raise H3Error(f"server {name} has the field {unknown[0][:40]!r}: known are {', '.join(FIELDS)}")
    if entry.get("engine") not in ENGINES:
        known = " or ".join(ENGINES)
        raise H3Error(f"server {name} has engine {str(entry.get('engine'))[:40]!r}: give {known}")
    if not entry.get("origin"):
        raise H3Error(f"server {name} has no origin: give http://HOST:PORT or https://HOST")
    more = {key: entry[key] for key in ("key", "version", "partition") if key in entry}
    return Server(name, entry["engine"], Origin.parse(entry["origin"]), **more, source=source)


def _open_to_others(path: Path) -> list[str]:
    if sys.platform == "win32":
        return []
    open_to = path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return [f"{path} holds a key and other users may read it: run chmod 600 on it"] if open_to else []
