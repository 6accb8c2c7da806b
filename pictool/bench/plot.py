"""Pictures of benches, each as SVG and PNG: the same bytes from the same numbers."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.bench.options import TRANSFORMERS
from pictool.errors import InputError
from pictool.linker.policies.base import PlotStyle
from pictool.store.store import atomic_write
from pictool.trace.labels import picture_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pictool.bench.context import ContextResult, Curve

_STYLE: Any = {
    "svg.hashsalt": "pictool", "font.family": "DejaVu Sans", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e6e6", "axes.axisbelow": True,
    "legend.frameon": False,
}  # fmt: skip
DPI = 150


def picture_paths(name: str | Path) -> tuple[Path, Path]:
    """The SVG and the PNG that `--plot NAME` writes; NAME may end in .svg, .png or neither.

    Raises:
        InputError: another kind of file.
    """
    path = Path(name)
    if path.suffix and path.suffix not in (".svg", ".png"):
        raise InputError(f"--plot {name}: must end in .svg or .png; both are written")
    return path.with_suffix(".svg"), path.with_suffix(".png")


@contextmanager
def picture(name: str | Path, width: float, height: float) -> Iterator[Figure]:
    """A figure in inches to draw on; it is written as SVG and PNG when the block ends without an error."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        for path in picture_paths(name):
            metadata: Any = {"Date": None} if path.suffix == ".svg" else {"Software": None}
            drawn = io.BytesIO()
            figure.savefig(drawn, format=path.suffix[1:], dpi=DPI, metadata=metadata)
            with atomic_write(path) as file:
                file.write(drawn.getvalue())


def line_colours(styles: Mapping[str, PlotStyle]) -> dict[str, str]:
    """A colour for each label: those of one style take its colours one after another."""
    chosen: dict[str, str] = {}
    counts: dict[tuple[str, ...], int] = {}
    for label, style in styles.items():
        number = counts.setdefault(style.line_colors, 0)
        chosen[label] = style.line_colors[number % len(style.line_colors)]
        counts[style.line_colors] += 1
    return chosen


def plot_context(result: ContextResult, title: str, name: str | Path) -> None:
    """TTFT by length, both logarithmic, with the exponents (EPIC fig. 9)."""
    with picture(name, 8.4, 4.2) as figure:
        axes = figure.subplots()
        by_label = line_colours({curve.label: curve.style for curve in result.curves})
        for curve in result.curves:
            _draw_curve(axes, curve, by_label[curve.label])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(result.lengths, [_short(tokens) for tokens in result.lengths])
        axes.xaxis.minorticks_off()
        axes.yaxis.set_major_formatter(lambda seconds, _: _time(seconds))
        axes.yaxis.set_minor_formatter(lambda *_: "")
        axes.set(xlabel="tokens of the prompt", ylabel="TTFT")
        axes.set_title(picture_text(title), loc="left")
        title = "exponent over all lengths;\nover the longer half of them"
        figure.legend(loc="outside right upper", title=title, alignment="left", labelspacing=0.8)


def _draw_curve(axes: Axes, curve: Curve, colour: str) -> None:
    """Medians, with the least and the most of the repeats; a cross where memory was not enough."""
    tokens = [point.tokens for point in curve.points]
    ttft = [point.ttft for point in curve.points]
    label = f"{picture_text(curve.label)}\n{curve.ttft or '-'}; {curve.long_ttft or '-'}"
    is_baseline = curve.label == TRANSFORMERS
    axes.plot(
        tokens, [spread.median for spread in ttft], label=label, color=colour, marker="o", markersize=4,
        linestyle="--" if is_baseline else "-", zorder=3 if is_baseline else 2,
    )  # fmt: skip
    low, high = [spread.low for spread in ttft], [spread.high for spread in ttft]
    axes.fill_between(tokens, low, high, color=colour, alpha=0.15, lw=0)
    if curve.out_of_memory and ttft:
        axes.plot(tokens[-1], ttft[-1].median, marker="x", markersize=10, color=colour)
        axes.annotate("out of memory behind", (tokens[-1], ttft[-1].median), fontsize=7, color=colour)


def _time(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
