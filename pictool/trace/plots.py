"""Plots of traces and objects with matplotlib, an optional extra. The same input gives the same bytes."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from pictool.errors import InputError
from pictool.escapes import visible
from pictool.store.store import atomic_write
from pictool.trace.attention_sinks import NUM_OFFSETS
from pictool.trace.format import Trace
from pictool.trace.heatmap import BinnedColumns, bin_columns
from pictool.trace.labels import row_labels, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pictool.trace.attention import AttentionMap
    from pictool.trace.attention_sinks import AttentionSinks
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


def require_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        InputError: it is not.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InputError("--plot: needs matplotlib; install it with: pip install 'pictool[plot]'") from error


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
    maps: Sequence[tuple[Trace, AttentionMap]], layer: int | None = None, head: int | None = None, scale: str = "minmax"
) -> Figure:
    """Draw the attention of tail and generated tokens over the prompt, one map per link (EPIC fig. 4 and 7)."""
    values = [
        attention.minmax(layer, head) if scale == "minmax" else attention.share(layer, head) for _, attention in maps
    ]
    figure, axes = _figure([0.6 + 0.14 * len(rows) for rows in values])
    high = 1.0 if scale == "minmax" else float(max(rows.max() for rows in values))
    for axis, (trace, attention), rows in zip(axes, maps, values, strict=True):
        image = _draw_map(axis, rows, trace, high)
        _set_row_labels(axis, [_label(text) for text in row_labels(trace, attention)])
        axis.axhline(attention.num_tail - 0.5, color="white", linewidth=0.8)
        where = f"layer {'all' if layer is None else layer}, head {'all' if head is None else head}"
        axis.set_title(f"{visible(trace.label)}: {_answer(trace)}   ({where})")
    figure.colorbar(image, ax=axes, fraction=0.02, pad=0.01, label="QK, min-max" if scale == "minmax" else "share")
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


@styled
def draw_attention_sinks(sinks: AttentionSinks, title: str) -> Figure:
    """Draw what the initial tokens of an object draw of its attention, by token and layer, and by layer and head."""
    num_layers, num_heads = sinks.initial_share.shape
    figure, (axis, heads) = _figure([2.2, 0.8 + 0.18 * num_layers])
    for layer, shares in enumerate(sinks.share_by_offset.mean(1)):
        label = f"layer {layer}" if layer in (0, num_layers - 1) or num_layers <= 8 else None
        axis.plot(100 * shares, marker=".", label=label, color=_color(layer, num_layers))
    axis.set(xlabel="token of the chunk", ylabel="% of attention")
    axis.set_title(
        f"{title}: attention of the {sinks.num_rows} rows after the first {sinks.num_initial}, mean of heads"
    )
    axis.legend()
    image = heads.imshow(100 * sinks.initial_share, aspect="auto", cmap="viridis", vmin=0)
    heads.set_xticks(range(0, num_heads, -(-num_heads // 32)))
    _set_row_labels(heads, [str(layer) for layer in range(num_layers)])
    heads.set(xlabel="head", ylabel="layer")
    heads.set_title(
        f"% that the first {sinks.num_initial} tokens draw ({100 * sinks.uniform_share:.1f} if all drew alike)"
    )
    figure.colorbar(image, ax=heads, fraction=0.02, pad=0.01)
    return figure


@styled
def draw_share_by_offset(maps: Sequence[tuple[Trace, AttentionMap]]) -> Figure:
    """Draw the attention of tail and answer to one token of a chunk, by its offset in the chunk; a line per link."""
    figure, (axis,) = _figure([2.6])
    for trace, attention in maps:
        axis.plot(100 * attention.share_by_offset(NUM_OFFSETS).mean(0), marker=".", label=visible(trace.label))
    axis.set(xlabel="token of the chunk", ylabel="% of attention", title="attention of tail and answer on one token of "
             "a chunk (mean of chunks, layers, heads)")  # fmt: skip
    axis.set_ylim(bottom=0)
    axis.legend()
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


def _color(layer: int, num_layers: int) -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis"](layer / max(1, num_layers))
