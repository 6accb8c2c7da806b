"""The page of `pic evidence`: one HTML file with all in it, which loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from html import escape
from typing import Any

from pictool.commands.console.page import make_page, picture_html

_STATUSES = ("failed", "partial", "left out")
# For each command: what is said of its result, where its rows are, and their columns; all by paths in its JSON.
_TABLES: Mapping[str, tuple[Mapping[str, str], str, Mapping[str, str]]] = {
    "doctor": ({}, "verdicts", {"of": "section", "": "status", "check": "check", "found": "text"}),
    "bench-sync": (
        {"tokens of the prompt": "results.prompt_tokens"}, "results.methods",
        {
            "policy": "label", "rows": "median.rows", "TTFT, s": "ttft.median", "least": "ttft.low",
            "most": "ttft.high", "speedup": "speedup", "÷ roofline": "ttft_by_floor",
            "tokens/s": "median.decode_tokens_per_s",
        },
    ),
    "bench-breakdown": (
        {"tokens of the prompt": "results.prompt_tokens"}, "results.methods",
        {
            "policy": "label", "TTFT, s": "ttft.median", "load": "parts.load", "scoring": "parts.scoring",
            "select": "parts.select", "layers": "parts.layers", "checks": "parts.checks", "logits": "parts.logits",
        },
    ),
    "tune": (
        {
            "questions": "questions", "measured": "units", "of": "available", "target": "target.measure",
            "at most": "target.limit", "chosen": "chosen", "by the means alone": "by_mean", "note": "no_answers",
        },
        "lines",
        {
            "policy": "label", "rows": "rows", "KL, first token": "kl", "KL, answer": "answer_kl",
            "bound": "finding.high", "same answers": "same_answer", "TTFT, s": "ttft_s", "target": "finding.status",
        },
    ),
    "answers": (
        {
            "dataset": "header.dataset.name", "content": "header.dataset.sha256", "questions": "questions",
            "sets of documents": "units", "tokens of a prompt": "tokens", "too long": "skipped", "metric": "metric",
        },
        "lines",
        {
            "policy": "label", "score": "score.mean", "to full": "difference.mean", "KL, first token": "kl.mean",
            "KL, answer": "answer_kl.mean", "same answers": "same_answer", "rows": "row_share",
            "TTFT, s": "timing.ttft_s", "speedup": "speedup",
        },
    ),
}  # fmt: skip


def evidence_page(report: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The page of a report; `pictures` are SVG files, by the part's name."""
    parts = report["parts"]
    facts = [(name, report["model"].get(name)) for name in ("name", "architecture", "weights", "fingerprint", "dtype")]
    facts += [("device", report["model"].get("device")), *report["machine"].items()]
    facts += [(name, report[name]) for name in ("written", "minutes", "seconds")]
    summary = [(part["title"], part["status"], part["seconds"], part["why"]) for part in parts]
    body = [_table((), facts), _table(("part", "result", "seconds", ""), summary)]
    body += [_section(part, pictures.get(part["name"])) for part in parts if part["rounds"]]
    name = report["model"].get("name", "a model that was not loaded")
    return make_page(f"pictool evidence: {name}", "".join(body))


def _section(part: Mapping[str, Any], picture: bytes | None) -> str:
    """A part's tables: of all rounds of a bench, else of the largest."""
    kind = part["name"] if part["name"] in _TABLES else part["name"].rpartition("-")[0]
    facts, place, columns = _TABLES[kind]
    shown = [f"\n<h2>{escape(part['title'])}</h2>\n"]
    for each in part["rounds"] if kind.startswith("bench") else part["rounds"][-1:]:
        rows = [[_at(row, path) for path in columns.values()] for row in _at(each["result"], place)]
        shown.append(_table((), [(name, _at(each["result"], path)) for name, path in facts.items()]))
        shown.append(_table((*columns,), rows))
    if picture is not None:
        shown.append(picture_html(picture))
    return "".join(shown)


def _at(values: Any, path: str) -> Any:
    """What is at a path of keys; None if something before it is."""
    return reduce(lambda found, key: None if found is None else found[key], path.split("."), values)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; a cell that is a status has its name as class."""
    lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"] if head else []
    for row in rows:
        texts = [(f' class="{value}"' if value in _STATUSES else "", escape(_text(value))) for value in row]
        lines.append(f"<tr>{''.join(f'<td{mark}>{text}</td>' for mark, text in texts)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _text(value: Any) -> str:
    """A value as a cell shows it: three digits of a number, the sum of a list of numbers, the length of any other."""
    if isinstance(value, list):
        return _text(sum(value) if all(isinstance(each, float) for each in value) else len(value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
