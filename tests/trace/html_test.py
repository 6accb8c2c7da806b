"""Traces, answers and comparisons as HTML: every token once, computed ones marked, and nothing of a text is markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traces import make_trace

import pictool
from pictool.trace.html import answer_html, list_html, table_html, trace_html

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "documents.ipynb"
HOSTILE = "<script>alert(1)</script>&amp;\x1b[2J\u202e"


class Page(HTMLParser):
    """The tags of a page, its text, and the text that has a background."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.text, self.marked, self._marks = list[str](), "", "", list[bool]()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "span":
            self._marks.append("background" in (dict(attrs)["style"] or ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "span":
            self._marks.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        if any(self._marks):
            self.marked += data


def test_every_token_is_shown_once_and_those_that_were_computed_are_marked() -> None:
    pieces = tuple(f"token{number:02d} " for number in range(10))
    page = Page(trace_html(replace(make_trace(rows=((2, 3), (2,), ())), pieces=pieces)))
    assert re.findall(r"token\d\d", page.text) == [piece.strip() for piece in pieces]
    assert re.findall(r"token\d\d", page.marked) == ["token02", "token03", "token08", "token09"]


def test_a_token_that_more_layers_computed_is_marked_more() -> None:
    trace = make_trace(rows=((2, 3), (2,), ()))
    parts = trace_html(trace).split("</small>")[-1]
    shares = [float(found) for found in re.findall(r"rgba\(.*?, ([\d.]+)\)", parts)]
    assert shares == [round(0.2 + 0.6 * share, 2) for share in (2 / 3, 1 / 3, 1)]
    assert np.allclose(trace.rows.mean(0)[[2, 3, 8]], [2 / 3, 1 / 3, 1])


@pytest.mark.parametrize(
    "html",
    [
        answer_html(HOSTILE, HOSTILE), table_html({HOSTILE: HOSTILE}), list_html(HOSTILE, [HOSTILE]),
        trace_html(replace(make_trace(), pieces=(HOSTILE,) * 10, texts=(HOSTILE,) * 4)),
    ],
    ids=["answer", "table", "list", "trace"],
)  # fmt: skip
def test_no_text_becomes_markup_or_steers_what_shows_it(html: str) -> None:
    page = Page(html)
    assert "script" not in page.tags and "<script>" in page.text and "\u202e" not in page.text


def test_the_notebook_runs_and_shows_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)
    assert isinstance(names["reply"], pictool.Reply)
    page = Page(names["reply"]._repr_html_())
    assert names["reply"].text in page.text and "sources" in page.text and page.marked
    compared = names["answer"].compare
    assert compared is not None and f"{compared.kl}" in Page(compared._repr_html_()).text
    assert f"{compared.kl}" in Page(names["answer"]._repr_html_()).text
