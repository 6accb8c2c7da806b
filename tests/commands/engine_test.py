"""`--engine`: which there are, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pictool.engines import engine_class
from pictool.errors import InputError

from .run import pic, write


@pytest.mark.parametrize(
    "command", ["link a.txt --query Who?", "ask . --query Who?", "compile a.txt", "query q.json", "sync ."]
)
def test_vllm_answers_behind_a_server(command: str) -> None:
    write("a.txt", "It holds a festival.")
    write("q.json", '{"g": {"user": "Who?"}}')
    done = pic(*command.split(), "--engine", "vllm")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "pic serve --engine vllm" in done.err and "--upstream" in done.err


def test_there_is_no_such_engine(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("It holds a festival.")
    done = pic("link", str(tmp_path / "a.txt"), "--query", "Who?", "--engine", "onnx")
    assert done.code == 2 and "must be llamacpp or torch" in done.err
    with pytest.raises(InputError, match="--upstream"):
        engine_class("vllm")


def test_a_server_needs_vllm_installed(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    monkeypatch.setattr("pictool.engines.vllm.needs.find_spec", lambda name: None)
    done = pic("serve", "-m", model_dir, "--engine", "vllm")
    assert done.code == 1 and "pip install 'vllm>=0.32'" in done.err
