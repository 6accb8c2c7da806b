"""`pic serve`: what it refuses, and what a killed one leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import tiny

from commands.run import pic, write
from pictool.cluster import session
from pictool.commands import serve
from pictool.commands.settings.file import write_setting
from pictool.commands.settings.settings import read_settings
from pictool.errors import InputError
from pictool.linker.grid import label_of, parse_policy
from pictool.serve.tenants import read_keys

ROOT = Path(__file__).parents[2]
KEY, SALT = "k" * 20, "0123456789abcdef" * 4


def keys_file(content: str, mode: int = 0o600) -> Path:
    path = write("keys", content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("content", "mode", "word"),
    [
        (f"a {KEY} {SALT}", 0o644, "chmod 600"),
        ("", 0o600, "no keys"),
        ("a b", 0o600, "line 1: has 2 words"),
        (f"# one\na short {SALT}", 0o600, "line 2: the key of a has fewer"),
        (f"a {KEY} {SALT}\nb {KEY} -", 0o600, "line 2: b and a"),
        (f"a {KEY} {SALT}\na {KEY}2 other", 0o600, "line 2: a"),
        ("a \xff", 0o600, "line 1"),
        (f"a {KEY} sa\0lt", 0o600, "line 1: has control characters"),
        (f"a\x1b[31m {KEY} {SALT}", 0o600, "line 1: has control characters"),
        ("# much\n" * (1 << 18), 0o600, "larger than 1 MiB"),
    ],
)
def test_files_of_keys_that_are_refused(content: str, mode: int, word: str) -> None:
    path = keys_file(content, mode)
    done = pic("serve", "--port", "0", "--keys", path)
    assert done.code == 1 and word in done.err and SALT not in done.err and KEY not in done.err


def test_keys_and_their_tenants() -> None:
    keys = read_keys(keys_file(f"a {KEY} {SALT}\n\n# more\na {KEY}2 {SALT}\nb {KEY}3 -\n"))
    a, also, b = (keys.find(key) for key in (KEY, f"{KEY}2", f"{KEY}3"))
    assert a is not None and b is not None and a == also and (a.name, a.salt, b.salt) == ("a", SALT, "")
    assert a.id != b.id and SALT not in a.id and SALT not in repr(a)
    named = read_keys(keys_file(f"\ufeffa {KEY} {SALT}\r\n")).find(KEY)
    assert named is not None and named.name == "a" and named.salt == SALT
    assert keys.find("x" * 20) is None and keys.find(None) is None
    with pytest.raises(InputError, match=r"^absent: "):
        read_keys(Path("absent"))


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--policy", "magic"], 2, "algorithm"),
        (["--algo", "magic"], 2, "algorithm"),
        (["--allow", "magic"], 2, "--allow"),
        (["--check", "maybe"], 2, "--check"),
        (["--codec", "magic"], 2, "codec"),
        (["--host", "256.0.0.1"], 1, "--host"),
        (["--keys", "absent"], 1, "absent"),
        (["--model", "absent/model/dir"], 1, "absent"),
        (["--replicas", "2"], 2, "--replicas: applies to replicas; add --ray"),
        (["--ray"], 2, "needs --remote"),
        (["--ray", "--remote", "r", "--learn", "1G"], 2, "--learn: cannot be used with --ray"),
        (["--ray", "--remote", "r", "--min-tokens", "4"], 2, "--min-tokens: cannot be used with --ray"),
        (["--upstream", "localhost:8000"], 2, "--upstream localhost:8000"),
        (["--upstream", "http://127.0.0.1:9", "--engine", "torch"], 2, "--engine: cannot be used with --upstream"),
        (["--upstream", "http://127.0.0.1:9", "--ray", "--remote", "r"], 2, "--ray: cannot be used with --upstream"),
        (["--upstream", "http://127.0.0.1:9", "--pool", "1G"], 2, "--pool: cannot be used with --upstream"),
        (["--upstream", "http://127.0.0.1:9"], 1, "--upstream http://127.0.0.1:9"),
        (["--ray", "--remote", "r", "--pool", "1G"], 2, "--pool: cannot be used with --ray"),
        (["--ray", "--remote", "r", "--", "--enforce-eager"], 2, "--enforce-eager: "),
        (["--engine", "vllm", "--max-tokens", "4"], 2, "--max-tokens: cannot be used with --engine"),
        (["--ray", "--remote", "r", "--engine", "vllm"], 2, "--upstream"),
        (["--ray", "--remote", "r", "--replicas", "3:1"], 2, "--replicas 3:1"),
        (["--ray", "ray://a:1", "--remote", "r"], 2, "cannot run as a Ray client"),
        (["--ray", "127.0.0.1:1", "--remote", "r"], 1, "ray start"),
        (["--ray", "--remote", "http://127.0.0.1:1/"], 1, "read-only"),
    ],
)
def test_what_cannot_be_served_is_one_line(options: list[str], code: int, word: str) -> None:
    done = pic("serve", "--port", "0", *options)
    assert done.code == code and word in done.err and len(done.err.splitlines()) == 1


def test_the_policy_that_pic_tune_wrote_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in pic.yaml; the command line comes before it, and who says a wrong one is named."""

    def served(algo: str | None = None) -> str:
        options, settings = serve.ServeOptions(algo=None if algo is None else parse_policy(algo)), read_settings()
        policy = serve.make_backend_settings(options, settings).policy
        return label_of(policy)

    assert served() == "auto"
    write_setting(Path("pic.yaml"), "algo", "legolink-5")
    assert served() == "legolink-5" and served("naive") == "naive"
    monkeypatch.setenv("PIC_ALGO", "cacheblend-30")
    assert served() == "cacheblend-30"
    monkeypatch.setenv("PIC_ALGO", "magic")
    done = pic("serve", "--port", "0")
    assert done.code == 1 and "PIC_ALGO: algo: " in done.err and len(done.err.splitlines()) == 1


def test_without_its_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_PACKAGES", ("fastapi", "no_such_package"))
    done = pic("serve")
    assert done.code == 1 and "no_such_package" in done.err and "pip install 'pictool[serve]'" in done.err


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "PACKAGES", ("ray", "no_such_package"))
    done = pic("serve", "--ray", "--remote", "r")
    assert done.code == 1 and "no_such_package" in done.err and "pip install 'pictool[ray]'" in done.err


@contextmanager
def running(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server in a process of its own, and its address."""
    with subprocess.Popen(
        [sys.executable, "-m", "pictool", "serve", "--port", "0", "-m", "model", "--check", "off", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            found = next(found for line in lines if (found := re.search(r"serving .* on (http\S+)/v1", line)))
            yield found[1], process
        finally:
            process.kill()


def test_leases_and_objects_outlive_a_kill_and_at_the_end_a_stream_says_so(tmp_path: Path) -> None:
    """By SIGTERM. The answer that runs is longer than the time that is left to it; one request runs at a time."""
    config = tiny.CONFIGS["llama"]()
    config.max_position_embeddings = 1 << 18
    tiny.save_model(tmp_path / "model", config)
    cache = {"model": "model", "text": "The harbour was quiet. It holds a festival in the spring; nobody knows why.\n"}
    ask = {"model": "model", "temperature": 0, "messages": [{"role": "user", "content": "Really?"}]}
    short = ask | {"max_tokens": 4}
    with running() as (url, process):
        kept, brief = (
            httpx.post(f"{url}/v1/caches", json=cache | {"ttl": ttl}, timeout=60).json()["id"] for ttl in (900, 0.01)
        )
        first = httpx.post(f"{url}/v1/chat/completions", json=short | {"cache_ids": [kept]}, timeout=60).json()
        process.send_signal(signal.SIGKILL)
        process.wait()
    with (
        running("--active", "1") as (url, process),
        ThreadPoolExecutor(2) as threads,
        httpx.Client(timeout=60) as client,
    ):
        assert [entry["id"] for entry in client.get(f"{url}/v1/caches").json()["data"]] == [kept]
        assert client.get(f"{url}/v1/caches/{brief}").status_code == 404
        again = client.post(f"{url}/v1/chat/completions", json=short | {"cache_ids": [kept]}).json()
        assert again["choices"] == first["choices"] and again["pic"] == first["pic"] != {}

        with client.stream("POST", f"{url}/v1/chat/completions", json=ask | {"n": 16, "stream": True}) as stream:
            lines = stream.iter_lines()
            assert '"delta"' in next(lines)
            waiting = [
                threads.submit(httpx.post, f"{url}/v1/chat/completions", json=ask, timeout=60),
                threads.submit(httpx.post, f"{url}/v1/caches", json={"model": "model", "text": "Quiet. "}, timeout=60),
            ]
            while httpx.get(f"{url}/health", timeout=60).json()["waiting"] < 2:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_ends"
        for refused in waiting:
            response = refused.result(60)
            assert response.status_code == 503 and response.json()["error"]["code"] == "server_ends"
        assert process.wait(60) == 0, "it ends in good order"
        prompt, reused = again["usage"]["prompt_tokens"], again["pic"]["linked_tokens"]
        assert process.stderr is not None
        said = process.stderr.read()
        counted = re.search(rf"{reused} of (\d+) prompt tokens reused .* in 2 requests", said)
        assert counted and int(counted[1]) > prompt and "Traceback" not in said
