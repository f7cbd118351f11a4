"""Servers of the user's own: where they are written down, what a key may do, and the commands that use them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from h3_runtime import cli
from h3_runtime.engines.settings import Origin, Server, load_servers
from h3_runtime.engines.wire import job_path
from h3_runtime.errors import H3Error

from .engine_server import serving

KEY = "sk-secret-0123456789"


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("H3_REMOTE_JOBS", str(tmp_path / "jobs"))
    monkeypatch.setenv("H3_ENGINES", str(tmp_path / "engines.json"))


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "clip.mp4"


def files(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- the command line


def run(*arguments, capsys) -> tuple[int, list[dict], str]:
    status = cli.main([*map(str, arguments), "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out)["results"] if captured.out else [], captured.err


def test_the_command_line_renders_lists_and_checks(out, tmp_path, capsys, monkeypatch):
    with serving("sglang", key=KEY) as stand, serving("vllm-omni") as other:
        entries = {
            "studio": {"engine": "sglang", "origin": stand.url, "key": KEY},
            "farm": {"engine": "vllm-omni", "origin": other.url, "version": "0.30.0"},
            "bad": {"engine": "x", "origin": "y"},
        }
        (tmp_path / "engines.json").write_text(json.dumps(entries), encoding="utf-8")
        (tmp_path / "engines.json").chmod(0o644)
        given = ("render", "--engine", "studio", "--prompt", "a cat", "--size", "96x96", "--frames", 107, "--out", out)
        status, rows, words = run(*given, "--outputs", 2, "--seed", 4, capsys=capsys)
        assert status == 0, words
        assert [row["value"] for row in rows if row["name"] == "video"] == [str(out), str(out.with_name("clip_2.mp4"))]
        assert "in progress, 40 %, waited 0 s" in words and "label: APPROXIMATE (SGLang quality lossless" in words
        assert json.loads(stand.posts()[0][3])["num_inference_steps"] == 49
        job = next(row["value"] for row in rows if row["name"] == "job")
        status, rows, words = run("render", "--engine", "studio", "--job", job, "--out", out, capsys=capsys)
        assert status == 0 and rows[0]["value"] == str(out)
        status, rows, words = run("engine", "list", capsys=capsys)
        named = {row["name"]: row for row in rows}
        assert status == 1 and named["studio"]["key"] and named["farm"]["engine"] == "vllm-omni"
        assert "engine 'x': give sglang or vllm-omni" in named["bad"]["wrong"] and "chmod 600" in words
        assert KEY not in words + json.dumps(rows)
        status, rows, words = run("engine", "check", "studio", capsys=capsys)
        values = {row["name"]: row["value"] for row in rows}
        assert (status, values["studio"], values["version"]) == (0, "reachable", "0.5.23")
        assert values["partition"] == "not told" and "4 GPUs" in words
        status, rows, words = run("engine", "check", "farm", capsys=capsys)
        assert status == 0 and "masks of picture and sound" in words
        monkeypatch.setenv("H3_ENGINE_ENV_NAMED", f"vllm-omni {other.url} 0.30.0")
        assert run("engine", "check", "env-named", capsys=capsys)[0] == 0
        monkeypatch.setenv("H3_ENGINE_NEW", f"vllm-omni {other.url}")
        status, rows, words = run("engine", "check", "new", capsys=capsys)
        assert status == 1 and 'write it there once: "version": "0.30.0"' in words
        stand.trouble["health"] = ["503 html"]
        status, rows, _ = run("engine", "check", "studio", capsys=capsys)
        assert status == 1 and "is not ready (status 503)" in rows[0]["reason"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--engine", "http://10.0.0.1:30010"], "chosen by its name, not by an address: add it to"),
        (["--engine", "nobody"], "no server is called nobody: there are studio"),
        (["--engine", "studio", "--model", "x"], "--model has no meaning on a server"),
        (["--engine", "studio", "--from", "x"], "--from has no meaning on a server"),
        (["--engine", "studio", "--keep-frames"], "--keep-frames has no meaning"),
        (["--engine", "studio", "--job", "x", "--seed", "1"], "--seed cannot change it"),
        (["--engine", "studio"], "no prompt was given"),
        (["--engine", "studio", "--prompt", "x", "--preset", "fast"], "accelerate: "),
        (["--engine", "studio", "--prompt", "x", "--size", "96x96", "--frames", "107"], "is not running"),
        (["--quality", "high"], "--quality is for a render on a server"),
        (["--prompt", "x"], "add --model DIR, or --engine NAME"),
    ],
)
def test_the_command_line_refuses_in_a_sentence(arguments, words, out, tmp_path, capsys):
    entries = {"studio": {"engine": "sglang", "origin": "http://127.0.0.1:9"}}
    (tmp_path / "engines.json").write_text(json.dumps(entries), encoding="utf-8")
    status, rows, said = run("render", *arguments, "--out", out, capsys=capsys)
    assert status == 2 and not rows and words in said and said.count("error: ") == 1
    assert files(out.parent) == []


# ---- settings


@pytest.mark.parametrize(
    "entry, words",
    [
        ({"origin": "http://10.0.0.5:30010", "key": "k"}, "over https, or over http to this machine only"),
        ({"origin": "http://localhost.evil.example", "key": "k"}, "over https"),
        ({"origin": "ftp://host"}, "cannot be used"),
        ({"origin": "https://host/v1"}, "nothing behind it"),
        ({"origin": "https://user:pass@host"}, "user name or password"),
        ({"origin": "http://host:99999"}, "cannot be read"),
        ({"origin": "https://host", "key": "two words"}, "a space or a character that no key has"),
        ({"origin": "https://host", "key": "a\r\nX-Evil: 1"}, "a space or a character"),
        ({"origin": "https://host", "password": "x"}, "has the field 'password'"),
        ({"origin": "https://host", "version": "new"}, "version 'new'"),
        ({"origin": "https://host", "partition": "all"}, "partition 'all'"),
        ({"origin": 5}, "no object of texts"),
        ({}, "has no origin"),
    ],
)
def test_an_entry_that_cannot_be_used_costs_itself_only(entry, words, tmp_path):
    good = {"engine": "sglang", "origin": "https://gpu.example", "key": KEY}
    (tmp_path / "engines.json").write_text(json.dumps({"bad": {"engine": "sglang", **entry}, "good": good}))
    servers = load_servers()
    assert list(servers.found) == ["good"] and words in servers.wrong["bad"]
    assert str(servers.found["good"].origin) == "https://gpu.example:443" and KEY not in repr(servers)
    assert "pass" not in servers.wrong["bad"] or "password" in servers.wrong["bad"]
    with pytest.raises(H3Error, match=r"server|origin"):
        servers.get("bad")


@pytest.mark.parametrize("origin", ["http://a..b:80", "http://" + "a" * 64 + ".b", "http://x:0", "http://.."])
def test_a_host_that_no_name_server_takes_is_no_origin(origin):
    """Python's own look-up would end with UnicodeError."""
    with pytest.raises(H3Error, match="cannot be used"):
        Origin.parse(origin)
    assert str(Origin.parse("https://gpu.example.")) == "https://gpu.example.:443"


def test_a_word_too_many_in_the_environment_is_told():
    given = {"H3_ENGINES": "nowhere.json", "H3_ENGINE_A": "sglang http://127.0.0.1:1 0.5.23 0.5.24"}
    assert "0.5.23 0.5.24" in load_servers(given).wrong["a"]
    assert load_servers(given | {"H3_ENGINE_A": "sglang http://127.0.0.1:1"}).found["a"].version == ""


def test_no_further_output_replaces_what_is_sent(out, tmp_path, capsys, monkeypatch):
    source = out.with_name(f"{out.stem}_3.mp4")
    source.write_bytes(b"a clip")
    monkeypatch.setenv("H3_ENGINE_A", "sglang http://127.0.0.1:1 0.5.23")
    asked = ["render", "--engine", "a", "--prompt", "a", "--source", str(source), "--mask", "keep", "--out", str(out)]
    assert cli.main([*asked, "--outputs", "3"]) == 2
    assert f"would replace {source.name}" in capsys.readouterr().out and source.read_bytes() == b"a clip"


def test_a_key_may_go_over_plain_http_to_this_machine_only(tmp_path):
    for origin in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "http://127.9.9.9:1"):
        assert Server("a", "sglang", Origin.parse(origin), key=KEY).origin.loopback
    for origin in ("http://0.0.0.0:1", "http://192.168.0.2:1", "http://[2001:db8::1]:1", "http://gpu:1"):
        with pytest.raises(H3Error, match="ssh tunnel"):
            Server("a", "sglang", Origin.parse(origin), key=KEY)
        assert not Server("a", "sglang", Origin.parse(origin)).origin.loopback


def test_reading_the_servers_loads_no_torch():
    """The host asks for them while it starts."""
    words = "import sys; from h3_runtime import load_servers; load_servers(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff\xfe", b"[" * 5000])
def test_settings_that_are_no_settings_are_told(content, tmp_path):
    (tmp_path / "engines.json").write_bytes(content)
    with pytest.raises(H3Error, match=r"the settings .*engines.json"):
        load_servers()


@pytest.mark.parametrize("job", ["../../v1/set_lora", "a/b?c#d", "..", "", "x" * 300, "a\nb", "%2e%2e"])
def test_ids_of_jobs_stay_one_part_of_the_path(job):
    if job in ("..", "", "x" * 300, "a\nb"):
        with pytest.raises(H3Error, match="a job id that cannot be used"):
            job_path(job)
    else:
        path = job_path(job, "content")
        assert path.count("/") == 4 and "?" not in path and "#" not in path and "%2F" in path + "%2F"
