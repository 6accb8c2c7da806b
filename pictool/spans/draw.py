"""Pictures of query trees, as the paper draws them, in SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pictool.spans.optimise import label
from pictool.spans.query import Query, nodes

_STEP_X, _STEP_Y, _RADIUS, _MARGIN = 52, 64, 17, 30
_COLORS = {
    "g": "#9ecae9", "chat": "#9ecae9", "repeat": "#9ecae9", "map": "#9ecae9", "plus": "#a1d99b", "cross": "#fdae6b",
    "retrieve": "#dadaeb", "augment": "#dadaeb", "file": "#f2f0c4", "message": "#f2f0c4",
}  # fmt: skip


_MEANINGS = {
    "S": "system message", "U": "user message", "A": "assistant message", "F": "text of a file", "R": "retrieval",
    "G": "model call", "G¹": "prepares what is below it", "C": "chat: a model call", "+": "parts whose order is free",
    "⋈": "parts in their order", "M": "runs, and gives nothing",
}  # fmt: skip
_LEGEND_WIDTH = 240


def draw(trees: Sequence[tuple[str, Query]]) -> str:
    """Trees side by side, each with its title, and what symbols mean, as an SVG file. Tooltips have the fields."""
    parts: list[str] = []
    left, height = 0.0, 0.0
    for title, query in trees:
        width = _draw(query, left, parts)
        parts.append(f'<text x="{left + width / 2:g}" y="20" class="title">{_visible(title)}</text>')
        left += width
        height = max(height, 2 * _MARGIN + 20 + query.depth * _STEP_Y)
    legend = _legend([query for _, query in trees])
    for line, entry in enumerate(legend):
        parts.append(f'<text x="{_MARGIN}" y="{height + 16 * line:g}" class="legend">{_visible(entry)}</text>')
    left, height = max(left, _LEGEND_WIDTH), height + 16 * len(legend)
    style = (
        "text{font:13px sans-serif;text-anchor:middle}.title{font-weight:bold}.legend{text-anchor:start;font-size:11px}"
        "line{stroke:#888}circle{stroke:#555}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{left:g}" height="{height:g}">'
    return "\n".join([head, f"<style>{style}</style>", *parts, "</svg>", ""])


def _legend(trees: Sequence[Query]) -> list[str]:
    """A line for each symbol in the trees."""
    symbols = {node.symbol for tree in trees for _, node in nodes(tree)}
    return [f"{symbol}: {meaning}" for symbol, meaning in _MEANINGS.items() if symbol in symbols]


def _visible(text: str) -> str:
    """A text without the characters that XML does not have."""
    return escape("".join(character if character.isprintable() else " " for character in text))


def _draw(query: Query, left: float, parts: list[str]) -> float:
    """Draw one tree; returns its width. Leaves are a step apart, every other node is above its children's middle."""
    circles: list[str] = []
    next_leaf = left + _MARGIN + _RADIUS

    def place(node: Query, level: int) -> float:
        nonlocal next_leaf
        y = _MARGIN + 30 + level * _STEP_Y
        below = [place(child, level + 1) for child in node.children]
        if below:
            x = (below[0] + below[-1]) / 2
        else:
            x, next_leaf = next_leaf, next_leaf + _STEP_X
        parts.extend(f'<line x1="{x:g}" y1="{y:g}" x2="{child:g}" y2="{y + _STEP_Y:g}"/>' for child in below)
        color = _COLORS.get(node.kind, "#e8e8e8")
        circles.append(
            f'<g><title>{_visible(label(node))}</title><circle cx="{x:g}" cy="{y:g}" r="{_RADIUS}" fill="{color}"/>'
            f'<text x="{x:g}" y="{y + 5:g}">{escape(node.symbol)}</text></g>'
        )
        return x

    place(query, 0)
    parts.extend(circles)
    return next_leaf - _STEP_X - left + _RADIUS + _MARGIN
