"""Pictures of traces: the rows that links computed, the distance from full recompute, the attention of tail and answer.

    python -m benchmarks.trace_plots selection naive.trace lego-16.trace blend.trace spec.trace -o selections.png
    python -m benchmarks.trace_plots deviation naive.trace lego-16.trace -o deviation.png
    python -m benchmarks.trace_plots attention naive.trace full.trace --layer 3 --head 0 -o attention.png

The traces are of the embedded model (docs/guides/inspecting-a-link.md). The same input gives the same bytes.
"""

from __future__ import annotations

import argparse
import functools
import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from pictool.escapes import visible
from pictool.runtime.model import load_model
from pictool.store.store import Store, atomic_write
from pictool.trace.analysis import analyse_trace
from pictool.trace.format import Trace, read_trace
from pictool.trace.heatmap import BinnedColumns, bin_columns
from pictool.trace.labels import row_labels, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pictool.trace.attention import AttentionMap
    from pictool.trace.deviation import DeviationFromFull

WIDTH = 9.0  # inches
MAX_COLUMNS = 1200  # of a map; more are binned, and a bin shows its maximum
_MAX_ROW_LABELS = 40
_STYLE: Any = {
    "svg.hashsalt": "pictool", "svg.fonttype": "none", "font.family": ["DejaVu Sans", "sans-serif"], "font.size": 8,
    "axes.titlesize": 9, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "image.interpolation": "nearest", "savefig.facecolor": "white", "legend.frameon": False,
    "text.parse_math": False,
}  # fmt: skip

P = ParamSpec("P")


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorate a function so that it draws in our style, whatever the user's matplotlibrc says."""

    @functools.wraps(draw)
    def draw_styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return draw_styled


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG or PNG, by the suffix; the bytes depend on nothing but the figure."""
    import matplotlib

    kind = path.suffix.lstrip(".")
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a character that the font lacks is drawn as a box
        figure.savefig(buffer, format=kind, dpi=120, metadata=metadata)
    with atomic_write(path) as file:
        file.write(buffer.getvalue())


@styled
def draw_attention(
    maps: Sequence[tuple[Trace, AttentionMap]], layer: int | None = None, head: int | None = None
) -> Figure:
    """Draw the attention of tail and generated tokens over the prompt, one map per link (EPIC fig. 7)."""
    values = [attention.share(layer, head) for _, attention in maps]
    figure, axes = _figure([0.6 + 0.14 * len(rows) for rows in values])
    high = float(max(rows.max() for rows in values))
    for axis, (trace, attention), rows in zip(axes, maps, values, strict=True):
        image = _draw_map(axis, rows, trace, high)
        _set_row_labels(axis, [_label(text) for text in row_labels(trace, attention)])
        axis.axhline(attention.num_prompt - attention.starts[-1] - 0.5, color="white", linewidth=0.8)
        where = f"layer {'all' if layer is None else layer}, head {'all' if head is None else head}"
        axis.set_title(f"{visible(trace.label)}: {_answer(trace)}   ({where})")
    figure.colorbar(image, ax=axes, fraction=0.02, pad=0.01, label="share")
    return figure


@styled
def draw_selection(traces: Sequence[Trace]) -> Figure:
    """Draw the tokens × layers that each link computed, and the policy's scores if it has any."""
    panels = [
        (trace, kind) for trace in traces for kind in ("rows", "scores") if kind == "rows" or trace.scores is not None
    ]
    heights = [0.6 + 0.12 * len(trace.rows) if kind == "rows" else 0.9 for trace, kind in panels]
    figure, axes = _figure(heights)
    for axis, (trace, kind) in zip(axes, panels, strict=True):
        if kind == "rows":
            _draw_map(axis, trace.rows.astype(np.float64), trace, 1.0, "Blues")
            _set_row_labels(axis, [str(layer) for layer in range(len(trace.rows))])
            axis.set_ylabel("layer")
            recomputed, context = trace.report["tokens"]["recomputed"], trace.layout.num_context
            axis.set_title(
                f"{visible(trace.label)}: computed tokens ({recomputed:.0f} of {context} a layer): {_answer(trace)}"
            )
        else:
            assert trace.scores is not None
            axis.vlines(np.arange(len(trace.scores)), 0, trace.scores, linewidth=0.8, color="#2c728e")
            _set_start_ticks(axis, trace, None)
            axis.set_xlim(-0.5, trace.layout.num_tokens - 0.5)
            axis.set_title("scores")
    return figure


@styled
def draw_deviation(links: Sequence[tuple[Trace, DeviationFromFull]]) -> Figure:
    """Draw per link the KV deviation and attention gained, layers × tokens (CacheBlend fig. 7), and KL per token."""
    heights = [
        height for trace, _ in links for height in (0.6 + 0.12 * len(trace.rows), 0.6 + 0.12 * len(trace.rows), 1.1)
    ]
    figure, axes = _figure(heights)
    max_kv = max(float(deviation.kv.both.max()) for _, deviation in links) or 1.0
    max_gained = max(float(np.abs(deviation.attention.gained).max()) for _, deviation in links) or 1.0
    max_kl = max(token.kl for _, deviation in links for token in deviation.generated) or 1.0
    for index, (trace, deviation) in enumerate(links):
        kv, attention, kl = axes[3 * index : 3 * index + 3]
        layers = [str(layer) for layer in range(len(trace.rows))]
        kv_image = _draw_map(kv, deviation.kv.both, trace, max_kv)
        kv.set_title(f"{visible(trace.label)}: KV deviation from full, |Δ(K, V)|")
        gained_image = _draw_map(attention, deviation.attention.gained, trace, max_gained, "RdBu_r", low=-max_gained)
        attention.set_title("share of the tail's attention, more (red) or less (blue) than under full")
        for axis, image in ((kv, kv_image), (attention, gained_image)):
            _set_row_labels(axis, layers)
            axis.set_ylabel("layer")
            figure.colorbar(image, ax=axis, fraction=0.02, pad=0.01)
        labels = [_label(token.text) for token in trace.generated]
        _draw_bars(kl, labels, [token.kl for token in deviation.generated], max_kl)
        kl.set_title("KL(full || linked) of each generated token, nats")
    return figure


def _figure(heights: Sequence[float]) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, sum(heights) + 0.3), layout="constrained")
    return figure, list(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])


def _draw_map(
    axis: Axes, values: NDArray[Any], trace: Trace, high: float, colors: str = "viridis", low: float = 0.0
) -> Any:
    """Draw rows over the prompt's tokens, with ticks where head, chunks and tail start."""
    bins = _bin_signed(values, MAX_COLUMNS) if low < 0 else bin_columns(values, MAX_COLUMNS)
    image = axis.imshow(bins.values, aspect="auto", cmap=colors, vmin=low, vmax=high)
    _set_start_ticks(axis, trace, bins)
    return image


def _bin_signed(values: NDArray[Any], width: int) -> BinnedColumns:
    """Bin columns by the number that is farthest from 0."""
    high, low = bin_columns(values, width), bin_columns(-values, width)
    return BinnedColumns(np.where(high.values >= low.values, high.values, -low.values), high.edges)


def _set_start_ticks(axis: Axes, trace: Trace, bins: BinnedColumns | None) -> None:
    """Set a tick where each part starts, labelled unless labels overlap, and draw thin lines between the parts."""
    starts = trace.layout.starts
    ticks = [start if bins is None else bins.bin_of(start) for start in starts]
    width, last, labels = trace.layout.num_tokens if bins is None else bins.values.shape[1], -1.0, []
    for tick, start in zip(ticks, starts, strict=True):
        fits = last < 0 or (tick - last) / width > 0.035
        labels.append(str(start) if fits else "")
        last = tick if fits else last
    axis.set_xticks(ticks, labels)
    if bins is not None:
        for tick in ticks[1:]:
            axis.axvline(tick - 0.5, color="#999999", linewidth=0.4)


def _set_row_labels(axis: Axes, labels: Sequence[str]) -> None:
    step = -(-len(labels) // _MAX_ROW_LABELS)
    axis.set_yticks(range(0, len(labels), step), labels[::step])


def _draw_bars(axis: Axes, labels: Sequence[str], values: Sequence[float], high: float) -> None:
    """Draw bars on an axis that ends above `high`; few bars are as wide as if there were twelve."""
    step = -(-len(labels) // _MAX_ROW_LABELS)
    axis.bar(range(len(values)), values, color="#2c728e", width=0.6)
    axis.set_xticks(range(0, len(labels), step), labels[::step], rotation=0 if len(labels) <= 12 else 90)
    axis.set(xlim=(-0.5, max(len(values), 12) - 0.5), ylim=(0, 1.2 * high))
    if len(values) <= 12:
        for index, value in enumerate(values):
            axis.text(index, value, f"{value:.2g}", ha="center", va="bottom")


def _label(text: str) -> str:
    return short(text, 12)


def _answer(trace: Trace) -> str:
    return f'"{_label(trace.answer)}"'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("selection", "deviation", "attention"))
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--layer", type=int)
    parser.add_argument("--head", type=int)
    parser.add_argument("--store", default=".pic")
    parser.add_argument("-o", "--out", type=Path, required=True, help="ends in .svg or .png")
    options = parser.parse_args()
    traces = [read_trace(path) for path in options.traces]
    if options.kind == "selection":
        save(draw_selection(traces), options.out)
        return
    model, store = load_model("embedded", "cpu"), Store(options.store)
    found = [(trace, analyse_trace(model, store, trace, trace.label)) for trace in traces]
    if options.kind == "attention":
        maps = [(trace, analysis.attention) for trace, analysis in found if analysis.attention]
        save(draw_attention(maps, options.layer, options.head), options.out)
    else:
        save(draw_deviation([(trace, each.deviation) for trace, each in found if each.deviation]), options.out)


if __name__ == "__main__":
    main()
