"""`pic link --server`: the same output as a link in this process, and what a server cannot do is told."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve.live import Live, serving

from commands.run import Outcome, pic, without_timing, write
from pictool.linker.grid import parse_policy
from pictool.runtime.model import load_model
from pictool.serve.backends.base import BackendSettings
from pictool.serve.tenants import Keys, Tenant
from pictool.store.store import Store

QUERY = ("-q", "Who knows why?", "--max-new-tokens", 12)
KEYS = Keys({"key-of-a": Tenant("a", "salt of a"), "key-of-b": Tenant("b", "salt of b")})


REPORT: dict[str, Any] = {
    "answer": "x", "algo": "naive", "params": {}, "model": "m", "engine": "torch",
    "tokens": {"head": 1, "context": 2, "tail": 3, "prompt": 5, "recomputed": 0.5, "generated": 1},
    "timing": dict.fromkeys(("load_s", "select_s", "recompute_s", "ttft_s", "decode_s"), 0.1), "compare": None,
}  # fmt: skip


@pytest.fixture
def live(model: Path, texts: tuple[Path, Path]) -> Iterator[Live]:
    """A server of the tiny model for two tenants; commands here send the key of one."""
    settings = BackendSettings(
        parse_policy("legolink-4"), frozenset({"cacheblend", "naive"}), refresh_s=3600, name="tiny"
    )
    served = serving(load_model(str(model)), Store("served"), KEYS, settings)
    with served as live, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIC_SERVER", live.url)
        patch.setenv("PIC_SERVER_KEY", "key-of-a")
        yield live


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--algo", "cacheblend-30", "--temperature", 1.5, "--seed", 4),
        ("--head", "Be brief.", "--chunk-tokens", 8, "-k", 1),
    ],
    ids=["greedy", "sampled", "head and pieces"],
)
def test_a_server_s_output_is_that_of_a_link_here(live: Live, model: Path, more: tuple[object, ...]) -> None:
    asked = ("link", "a.txt", "b.txt", *QUERY, *more)
    there, here = pic(*asked), pic(*asked, "--server", "", "-m", model)
    assert there.code == 0 and there.out == here.out
    notes, here_notes = (re.findall(r"^(pic: .*?)(?:, TTFT.*)?$", outcome.err, re.M) for outcome in (there, here))
    assert notes == here_notes and any("compiled a.txt" in note for note in notes)
    asked = ("link", "a.txt", "-", *QUERY, *more)  # b.txt by stdin
    assert pic(*asked, stdin=Path("b.txt").read_text()).out == here.out
    asked = ("link", "a.txt", "b.txt", *QUERY, *more, "--json", "--compare")
    reports = [pic(*asked).json, pic(*asked, "--server", "", "-m", model).json]
    for report in reports:
        report["compare"] = {name: report["compare"][name] for name in ("answer", "same_answer", "common_prefix")}
    assert without_timing(reports[0]) == without_timing(reports[1]) | {"model": "tiny"}
    assert reports[0]["request"]["server"] == live.url and "store" not in reports[0]["request"]
    assert reports[0]["request"]["query"] == reports[1]["request"]["query"]


def test_several_policies_are_compared_there_too(live: Live) -> None:
    lines = pic("link", "a.txt", *QUERY, "--algo", "naive", "--algo", "cacheblend-30").out.splitlines()
    assert [line.split()[0] for line in lines] == ["policy", "naive", "cacheblend-30", "full"]


def test_a_key_names_an_object_of_the_tenant_alone(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    (named,) = pic("link", "a.txt", *QUERY, "--algo", "naive", "--json").json["request"]["objects"]
    by_key = pic("link", named["key"][:10], *QUERY, "--algo", "naive")
    assert by_key.code == 0 and by_key.out == pic("link", "a.txt", *QUERY, "--algo", "naive").out
    monkeypatch.setenv("PIC_SERVER_KEY", "key-of-b")
    foreign = pic("link", named["key"], *QUERY, "--algo", "naive")
    absent = pic("link", "0" * 64, *QUERY, "--algo", "naive")
    assert foreign.code == absent.code == 1
    assert foreign.err.replace(named["key"][:12], "0" * 12) == absent.err and "no such thing here" in absent.err


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (("--trace", "t.trace"), 2, "--trace: cannot be used with a server (PIC_SERVER); --server '' links here"),
        (("--ratio", "auto", "--algo", "cacheblend"), 2, "--ratio auto: cannot be used with a server"),
        (("--engine", "torch"), 2, "--engine: cannot be used with a server"),
        (("--store", "st"), 2, "--store: cannot be used with a server"),
        (("--salt", "0123456789abcdef"), 2, "--salt: cannot be used with a server"),
        (("--algo", "prefix"), 1, "policy: prefix is not one of this server's"),
        (("--server", "localhost:8000"), 2, "--server localhost:8000: must be a URL"),
        (("--query-template", "no place"), 1, "{query}"),
    ],
)
def test_what_a_server_does_not_do_is_refused(live: Live, more: tuple[str, ...], code: int, says: str) -> None:
    outcome = pic("link", "a.txt", *QUERY, *more)
    assert outcome.code == code and says in outcome.err and not outcome.out.strip()


def test_another_s_key_and_an_object_file_are_refused(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.kvo", b"x")
    assert (
        "a.kvo: a server cannot read your files; name the object's key, or the text" in pic("link", "a.kvo", *QUERY).err
    )
    monkeypatch.setenv("PIC_SERVER_KEY", "key-of-nobody")
    assert "nobody has" in pic("link", "a.txt", *QUERY).err


def test_no_server_and_what_is_none_are_told_in_a_line(texts: tuple[Path, Path]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        outcome = pic("link", "a.txt", *QUERY, "--server", url)
        assert outcome.code == 1 and f"{url}: no server answers (Connection refused)" in outcome.err
        listener.listen()
        for reply, says in (
            (b"hello\r\n\r\n", "does not answer like pic serve"),
            (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "has no /v1/link (404 Not Found)"),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 32, "does not answer like pic serve"),
            (b"HTTP/1.1 200 OK\r\n\r\nnot JSON\n", "does not answer like pic serve"),
            (b"HTTP/1.1 200 OK\r\n\r\ndata: {\"text\": \"half\"}\n\n", "ended in the middle of an answer"),
        ):  # fmt: skip
            thread = threading.Thread(target=_reply, args=(listener, reply))
            thread.start()
            outcome = pic("link", "a.txt", *QUERY, "--server", url)
            thread.join()
            assert outcome.code == 1 and says in outcome.err and outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({"report": {}, "origin": {}}, "report: answer is None"),
        ({"report": REPORT | {"tokens": 5}, "origin": {}}, "report: tokens is no object"),
        ({"report": REPORT | {"timing": REPORT["timing"] | {"ttft_s": "x"}}, "origin": {}}, "timing.ttft_s is 'x'"),
        ({"report": REPORT | {"tokens": REPORT["tokens"] | {"head": 10**400}}, "origin": {}}, "tokens.head is"),
        ({"report": REPORT, "origin": {}}, "report: compare is no object"),
        ({"report": REPORT | {"compare": {"answer": "x"}}, "origin": {}}, "compare.ttft_s is None"),
        ({"report": [], "origin": []}, "ended in the middle"),
        ([[]], "ended in the middle"),
        ("[" * 100_000, "does not answer like pic serve"),
        ('{"report": NaN}', "does not answer like pic serve"),
    ],
)  # fmt: skip
def test_what_is_no_report_is_told_in_a_line(event: object, says: str, texts: tuple[Path, Path]) -> None:
    data = event if isinstance(event, str) else json.dumps(event)
    outcome = answered(b"HTTP/1.1 200 OK\r\n\r\ndata: %b\n\n" % data.encode())
    assert outcome.code == 1 and says in outcome.err and outcome.err.count("\n") == 1


def test_the_key_does_not_follow_a_redirect(texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIC_SERVER_KEY", "key-of-a")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        other.settimeout(0)
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        for status in (301, 302, 303, 307, 308):
            outcome = answered(b"HTTP/1.1 %d X\r\nLocation: %b/x\r\nContent-Length: 0\r\n\r\n" % (status, url.encode()))
            assert outcome.code == 1 and outcome.err.count("\n") == 1
        with pytest.raises(BlockingIOError):
            other.accept()


def answered(reply: bytes) -> Outcome:
    """What `pic link --compare --server` says of a server that answers so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_reply, args=(listener, reply))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        outcome = pic("link", "a.txt", *QUERY, "--compare", "--json", "--server", url)
        thread.join()
    return outcome


def _reply(listener: socket.socket, reply: bytes) -> None:
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as sent:
        headers = iter(sent.readline, b"\r\n")
        (length,) = [int(line.split()[1]) for line in headers if line.lower().startswith(b"content-length")]
        sent.read(length)
        connection.sendall(reply)
