"""`--engine`: which there are, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from .run import pic


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--engine", "onnx"], 2, "--engine onnx: "),
        (["--engine", "vllm", "--trace", "t"], 2, "--trace"),
        (["--engine", "vllm", "--auto-ratio", "--algo", "cacheblend"], 2, "--auto-ratio"),
    ],
)
def test_what_an_engine_cannot_do(tmp_path: Path, options: list[str], code: int, says: str) -> None:
    (tmp_path / "a.txt").write_text("It holds a festival.")
    done = pic("link", str(tmp_path / "a.txt"), "--query", "Who?", *options)
    assert done.code == code and says in done.err


def test_vllm_measures_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before vLLM is started, of `--probes` and of a text that has no object with a table yet."""
    monkeypatch.setattr("pictool.engines.vllm.client.offline.find_spec", lambda name: True)
    text = tmp_path / "a.txt"
    text.write_text("It holds a festival.")
    more = (text, "--engine", "vllm", "--device", "cpu", "--store", tmp_path / "s")
    compiled = pic("compile", *more, "--probes", 8)
    assert (compiled.code, compiled.err.count("\n")) == (1, 1)
    assert "--probes 8: vLLM " in compiled.err
    linked = pic("link", *more, "--query", "Who?", "--algo", "fixup", "--head", "You know.")
    assert (linked.code, linked.err.count("\n")) == (1, 1)
    assert 'the object of "It holds a festival.…" has no table' in linked.err and "fallback=" in linked.err


def test_vllm_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pictool.engines.vllm.client.offline.find_spec", lambda name: None)
    (tmp_path / "a.txt").write_text("It holds a festival.")
    for command in (["link", "--query", "Who?"], ["compile"]):
        done = pic(*command, str(tmp_path / "a.txt"), "--engine", "vllm")
        assert done.code == 1 and "pip install 'vllm==0.32.*'" in done.err
