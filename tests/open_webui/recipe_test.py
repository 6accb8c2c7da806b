"""Open WebUI, headless, with the settings of its recipe: chats with three files, the server started again between."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from scripted import save_scripted
from serve.live import END

from benchmarks.open_webui import ask, free_port, open_webui
from benchmarks.recipes import make_notes, measure, serving


def test_a_chat_with_files_goes_on_after_a_restart(tmp_path: Path) -> None:
    said = {"first without tools": [f"One of three.{END}"], "second without tools": [f"All of them.{END}"]}
    model = save_scripted(tmp_path / "model", said, positions=1 << 15, layers=1)
    home, port = make_notes(tmp_path / "home"), free_port()
    answers, counts = list[str](), list[dict[str, Any]]()
    more = ("--keep-prefixes", "1G", "--port", str(port), "-m", str(model), "--name", "said")
    with open_webui(home, f"http://127.0.0.1:{port}") as url:
        for name in ("first", "second"):
            with serving(sys.executable, tmp_path / "store", *more) as client:
                question = f"Which file? (say {name})"
                counts.append(measure(client, partial(_collect, answers, home, url, question)))
    assert "One of three." in answers[0] and "All of them." in answers[1]
    assert counts[0]["reused"] == 0 and counts[1]["requests"] == 1
    assert counts[1]["reused"] > 0.9 * counts[1]["prompt_tokens"]


def _collect(answers: list[str], home: Path, url: str, question: str) -> None:
    answers.append(ask(home, url, question, model="said"))
