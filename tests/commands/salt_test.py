"""`--salt`, `--salt-file` and `--algo prefix`: where a salt comes from, what it hides, and who sees it."""

from __future__ import annotations

import base64
import os
import secrets
import sys
import uuid
from pathlib import Path

import pytest

from commands.run import pic, write
from pictool.commands.bench import BenchOptions, command_line, open_bench_model
from pictool.commands.settings.salt import is_weak, most_bits
from pictool.commands.settings.settings import Settings, read_settings
from pictool.commands.tui_process.worker import TuiWorker
from pictool.errors import InputError, TraceError
from pictool.store.store import Store
from pictool.trace.format import read_trace

QUERY = ("-q", "Who knows why?", "--max-new-tokens", 2, "--json")


def recomputed(*arguments: object) -> float:
    found: float = pic("link", "a.txt", "b.txt", *arguments, *QUERY).json["tokens"]["recomputed"]
    return found


def test_a_second_prompt_reuses_the_first_one_s_blocks(model: Path, texts: tuple[Path, Path]) -> None:
    named = ("-m", model, "--algo", "prefix:block=4")
    first, second = recomputed(*named), recomputed(*named)
    assert first >= 8 and second == first % 4
    stats = pic("store", "ls", "--stats", "--json").json
    assert stats["chains"]["count"] == stats["objects"] >= first // 4
    assert pic("store", "ls", "--json").json == [] and len(pic("store", "ls", "--chains", "--json").json) >= 2
    assert pic("store", "verify").code == 0
    one = pic("inspect", pic("store", "ls", "--chains", "--json").json[0]["key"], "--json").json
    assert one["tokens"] == 4 and one["parent"]


def test_another_salt_never_hits(model: Path, texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    named = ("-m", model, "--algo", "prefix:block=4")
    first = recomputed(*named, "--salt", "mine")
    assert recomputed(*named) == recomputed(*named, "--salt", "other") == first
    monkeypatch.setenv("PIC_SALT", "mine")
    assert recomputed(*named) == first % 4
    (compiled,) = pic("compile", "a.txt", "-m", model, "--json").json["objects"]
    assert pic("compile", "a.txt", "-m", model, "--json").json["objects"][0]["key"] == compiled["key"]
    monkeypatch.setenv("PIC_SALT", "other")
    assert pic("compile", "a.txt", "-m", model, "--json").json["objects"][0]["key"] != compiled["key"]
    refused = pic("link", compiled["path"], "-m", model, *QUERY)
    assert refused.code == 1 and "salt" in refused.err
    monkeypatch.delenv("PIC_SALT")
    write("pic.yaml", "salt: mine\n")
    assert pic("link", compiled["key"], "-m", model, *QUERY).code == 0


QUESTION = '{"documents": [{"text": "Here."}], "query": "Where?", "answers": ["here"]}'


@pytest.mark.parametrize("command", ["eval", "bench"])
def test_what_depends_on_what_was_asked_before_is_not_compared(command: str, model: Path) -> None:
    given = ("eval", write("q.jsonl", QUESTION)) if command == "eval" else ("bench",)
    refused = pic(*given, "--algo", "prefix", "-m", model)
    assert refused.code == 2 and "depends on earlier requests" in refused.err


SALT = secrets.token_hex(16)


def test_a_salt_comes_from_one_place(model: Path, texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line comes before the environment, that before pic.yaml; each may name a file instead."""
    for name in ("yaml", "env", "line"):
        write(f"{name}.salt", f"{name}-{SALT}\n")
    write("pic.yaml", "salt_file: yaml.salt\n")
    assert read_settings().salt == f"yaml-{SALT}"
    monkeypatch.setenv("PIC_SALT_FILE", "env.salt")
    assert read_settings().salt == f"env-{SALT}"
    monkeypatch.delenv("PIC_SALT_FILE")
    monkeypatch.setenv("PIC_SALT", "plain")
    assert read_settings().salt == "plain"
    assert read_settings().override(salt_file="line.salt").salt == f"line-{SALT}"
    assert read_settings().override(salt="").salt == ""
    by_file = pic("compile", "a.txt", "-m", model, "--salt-file", "line.salt", "--json")
    by_text = pic("compile", "a.txt", "-m", model, "--salt", f"line-{SALT}", "--json")
    assert by_file.json["objects"][0]["key"] == by_text.json["objects"][0]["key"] and "weak" not in by_text.err
    both = pic("compile", "a.txt", "-m", model, "--salt-file", "line.salt", "--salt", SALT)
    assert both.code == 2 and "--salt and --salt-file: " in both.err and SALT not in both.err
    monkeypatch.setenv("PIC_SALT_FILE", "env.salt")
    refused = pic("store", "ls")
    assert refused.code == 2 and "PIC_SALT and PIC_SALT_FILE: " in refused.err and "plain" not in refused.err


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "cannot be read"), (b"\n", "no salt"), (b"a\xffb", "not UTF-8"), (b"secret" * 1000, "larger than")],
)
def test_a_file_without_a_salt_is_refused(content: bytes | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if content is not None:
        write("salt", content)
    monkeypatch.setenv("PIC_SALT_FILE", "salt")
    with pytest.raises(InputError, match=f"^salt: .*{why}") as refused:
        read_settings()
    assert "secret" not in str(refused.value)


def test_a_pipe_that_nobody_writes_to_has_no_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo("salt")
    monkeypatch.setenv("PIC_SALT_FILE", "salt")
    with pytest.raises(InputError, match=r"^salt: "):
        read_settings()


def test_weak_salts_are_named_so() -> None:
    makers = (
        secrets.token_hex,
        secrets.token_urlsafe,
        lambda size: base64.b64encode(secrets.token_bytes(size)).decode(),
    )
    assert not any(is_weak(make(16)) for make in makers for _ in range(200))
    assert not is_weak(str(uuid.uuid4())) and not is_weak("")
    assert all(map(is_weak, ("tenant-a", "a" * 100, "ab" * 30, "0123456789", "acme corporation")))
    assert most_bits("abcd") == 8


def test_a_weak_salt_is_warned_of_but_not_shown(model: Path, texts: tuple[Path, Path]) -> None:
    outcome = pic("compile", "a.txt", "-m", model, "--salt", "hunter2")
    assert outcome.code == 0 and outcome.err.count("the salt is weak") == 1 and "openssl rand -hex 32" in outcome.err
    assert "hunter2" not in outcome.out + outcome.err


def test_another_tenant_s_object_is_as_good_as_absent(model: Path, texts: tuple[Path, Path]) -> None:
    """One message and one exit code, for keys and their beginnings, of documents and of blocks; nothing is counted."""
    (key,) = (done["key"] for done in pic("compile", "a.txt", "-m", model, "--salt", SALT, "--json").json["objects"])
    pic("link", "b.txt", "-m", model, "--salt", SALT, "--algo", "prefix:block=4", *QUERY)
    block = next(one["key"] for one in pic("store", "ls", "--chains", "--json").json if one.get("parent") is not None)
    used = {path: path.stat().st_mtime_ns for path in Path(".pic/objects").rglob("*.kvo")}
    hits = pic("store", "ls", "--stats", "--json").json["counts"]["hits"]
    said = {}
    for name in (key, key[:8], block, block[:8], "c" * 64, "c" * 8):
        for salt in ((), ("--salt", secrets.token_hex(16))):
            outcome = pic("link", name, "-m", model, *salt, *QUERY)
            assert outcome.code == 1 and outcome.out == ""
            said[name, bool(salt)] = outcome.err.replace(name, "KEY")
    assert len(set(said.values())) == 1, said
    assert used == {path: path.stat().st_mtime_ns for path in used}
    assert pic("store", "ls", "--stats", "--json").json["counts"]["hits"] == hits
    for name in (key, key[:8]):
        assert pic("link", name, "-m", model, "--salt", SALT, *QUERY).code == 0


@pytest.fixture
def salted_trace(model: Path, texts: tuple[Path, Path]) -> Path:
    named = ("-m", model, "--salt", SALT, "--store", "st", "--trace", "salted.trace")
    assert pic("link", *texts, *named, *QUERY).code == 0
    return Path("salted.trace")


def test_a_salted_trace_is_replayed_with_its_salt_only(salted_trace: Path) -> None:
    """Without it nothing is compiled: its texts would be found by everybody."""
    before = Store("st").keys()
    for salt in ((), ("--salt", "another")):
        refused = pic("inspect", salted_trace, "--against", "full", "--store", "st", *salt)
        assert refused.code == 1 and "--salt-file" in refused.err
        assert Store("st").keys() == before
    assert pic("inspect", salted_trace, "--against", "full", "--store", "st", "--salt", SALT).code == 0
    assert Store("st").keys() == before and SALT.encode() not in salted_trace.read_bytes()


def test_the_screens_model_has_the_salt(salted_trace: Path) -> None:
    trace, settings = read_trace(salted_trace), Settings().override(store="st", device="cpu")
    assert TuiWorker(lambda *_: None, settings.override(salt=SALT)).analyse(trace, "t").deviation is not None
    with pytest.raises(TraceError, match=r"^t: a\.txt "):
        TuiWorker(lambda *_: None, settings).analyse(trace, "t")


def test_evaluations_compile_with_the_salt(model: Path, texts: tuple[Path, Path]) -> None:
    write("q.jsonl", '{"documents": ["a.txt"], "query": "Who?", "answers": ["she"], "id": "one"}\n')
    named = ("eval", "q.jsonl", "-m", model, "--algo", "naive", "--max-new-tokens", 2, "--store", "st")
    keys = []
    for salt in ((), ("--salt", SALT)):
        outcome = pic(*named, *salt, "-o", f"{len(salt)}.jsonl")
        assert outcome.code == 0 and SALT not in outcome.out + outcome.err + Path(f"{len(salt)}.jsonl").read_text()
        keys.append({path.stem for path in Path("st/eval").rglob("*.kvo")})
    assert len(keys[1]) == 2 * len(keys[0]) > 0


def test_benches_have_the_salt_and_do_not_keep_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings().override(salt=SALT, device="cpu")
    for options in (BenchOptions(shape="tiny"), BenchOptions(model=str(model))):
        assert open_bench_model(options, settings).salt == SALT
    monkeypatch.setattr(sys, "argv", ["pic", "bench", "--salt", SALT, f"--salt={SALT}", "--salt-file", "f"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # a program, and no module of -m
    assert command_line() == "pic bench --salt ... --salt=... --salt-file f"
    assert SALT not in repr(settings)


def test_every_command_with_a_model_takes_a_salt() -> None:
    commands = ("compile", "link", "plan", "inspect", "eval", "tui", "bench")
    for command in commands:
        assert pic(command, "--help").out.count("--salt") == 2, command
