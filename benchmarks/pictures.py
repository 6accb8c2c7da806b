"""Pictures of results, each as SVG and PNG: the same bytes from the same numbers. Needs matplotlib."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.errors import InputError
from pictool.escapes import visible
from pictool.store.store import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class PlotStyle:
    """How a policy is drawn: its points by a marker of matplotlib, and its lines.

    Fields:
        colors: of points: a colour map of matplotlib, of which variants of one policy take different shades, or one
            colour (#rrggbb).
        size: of the marker, in points.
        line_colors: of lines: variants of one policy take one after another.
    """

    marker: str = "P"
    colors: str = "Purples"
    size: float = 8.0
    line_colors: tuple[str, ...] = ("#a50f15", "#8c6d31", "#e377c2", "#7f7f7f")


_STYLES = {
    "full": PlotStyle("o", "#1a1a1a", line_colors=("#111111",)),
    "naive": PlotStyle("X", "#1a1a1a", line_colors=("#9467bd",)),
    "legolink": PlotStyle("*", "Blues", 13.0, ("#08519c", "#3182bd", "#6baed6", "#9ecae1")),
    "legolink-0": PlotStyle("*", "#1a1a1a", 13.0, ("#17becf",)),
    "cacheblend": PlotStyle("s", "Oranges", 7.0, ("#d94801", "#fd8d3c", "#fdae6b", "#fdd0a2")),
    "speccache": PlotStyle("^", "Greens", line_colors=("#006d2c", "#31a354", "#74c476")),
    "prophet": PlotStyle("v", "Reds"),
    "transformers": PlotStyle(line_colors=("#8c8c8c",)),
}
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


def plot_style(name: str) -> PlotStyle:
    """How the policy of this name is drawn."""
    return _STYLES.get(name, PlotStyle())


def picture_text(text: str) -> str:
    """A visible text that matplotlib draws as it is: no dollar sign begins a formula."""
    return visible(text).replace("$", r"\$")


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


def line_colours(names: Mapping[str, str]) -> dict[str, str]:
    """A colour for each label, by the name of its policy: variants of one take its colours one after another."""
    chosen: dict[str, str] = {}
    counts = Counter[tuple[str, ...]]()
    for label, name in names.items():
        colours = plot_style(name).line_colors
        chosen[label] = colours[counts[colours] % len(colours)]
        counts[colours] += 1
    return chosen
