"""A linked prompt as HTML, for notebooks: its text, the computed tokens coloured, and where its parts come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from pictool.escapes import visible, visible_lines

if TYPE_CHECKING:
    from pictool.trace.format import Trace

_COLOUR = "255, 140, 0"  # on light and dark pages
_MONOSPACE = "white-space: pre-wrap; font-family: monospace; margin: 0 0 0.5em 1em"


def trace_html(trace: Trace) -> str:
    """The answer, then each part of the prompt with its tokens coloured by the share of layers that computed them."""
    shares = trace.rows.mean(0)
    bounds = pairwise([*trace.layout.starts, trace.layout.num_tokens])
    parts = []
    for source, (start, end) in zip(trace.sources, bounds, strict=True):
        if start == end:
            continue
        computed = f"{shares[start:end].sum():.0f} of {end - start} tokens computed"
        text = "".join(_marked(zip(trace.pieces[start:end], shares[start:end].tolist(), strict=True)))
        summary = f"<summary>{escape(visible(source))}: {computed}</summary>"
        parts.append(f'<details open>{summary}<div style="{_MONOSPACE}">{text}</div></details>')
    ttft = trace.report["timing"]["ttft_s"] * 1e3
    facts = f"{trace.report['model']}, {trace.policy}, TTFT {ttft:.1f} ms"
    legend = f"<small>{_span('computed at all layers', 1)} {_span('at some', 0.5)} reused</small>"
    return f"{answer_html(trace.answer, facts)}{legend}{''.join(parts)}"


def answer_html(answer: str, facts: str) -> str:
    """An answer, and facts on it in one line."""
    return f"<p><b>{escape(visible_lines(answer))}</b><br><small>{escape(visible(facts))}</small></p>"


def table_html(values: Mapping[str, Any]) -> str:
    """Names and values, one row each."""
    rows = (
        f"<tr><th>{escape(visible(name))}</th><td>{escape(visible(str(value)))}</td></tr>"
        for name, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>"


def list_html(title: str, items: Iterable[str]) -> str:
    """A title and lines below it."""
    return f"<p>{escape(visible(title))}</p><ul>{''.join(f'<li>{escape(visible(item))}</li>' for item in items)}</ul>"


def _marked(pieces: Iterable[tuple[str, float]]) -> Iterable[str]:
    for share, group in groupby(pieces, key=lambda piece: piece[1]):
        yield _span("".join(text for text, _ in group), share)


def _span(text: str, share: float) -> str:
    text = escape(visible_lines(text))
    return f'<span style="background: rgba({_COLOUR}, {0.2 + 0.6 * share:.2f})">{text}</span>' if share else text
