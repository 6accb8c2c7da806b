"""Pictures (matplotlib, an optional extra): attention maps, selections, deviation, sinks. Same input, same bytes."""

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
from pictool.store.store import atomic_write
from pictool.trace.format import Trace
from pictool.trace.heatmap import Binned, binned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pictool.trace.attention import AttentionMap
    from pictool.trace.deviation import Against
    from pictool.trace.sinks import SinkProfile

WIDTH = 9.0  # inches
MOST_COLUMNS = 1200  # of a map; more are put together, the largest shown
OFFSETS = 16
_MOST_ROW_LABELS = 40
_STYLE: Any = {
    "svg.hashsalt": "pictool", "svg.fonttype": "none", "font.family": ["DejaVu Sans", "sans-serif"], "font.size": 8,
    "axes.titlesize": 9, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "image.interpolation": "nearest", "savefig.facecolor": "white", "legend.frameon": False,
    "text.parse_math": False,
}  # fmt: skip


P = ParamSpec("P")


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw in our own style, whatever the user's matplotlibrc says."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return drawn


def require_matplotlib() -> None:
    """Refuse a picture where nothing can draw it.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InputError("--plot: needs matplotlib; install it with: pip install 'pictool[plot]'") from error


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG or PNG, by its suffix; the bytes depend on nothing but the figure."""
    import matplotlib

    kind = path.suffix.lstrip(".")
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # of a script that the font lacks; it is drawn as a box
        figure.savefig(buffer, format=kind, dpi=120, metadata=metadata)
    with atomic_write(path) as file:
        file.write(buffer.getvalue())


@_styled
def draw_attention(
    maps: Sequence[tuple[Trace, AttentionMap]], layer: int | None = None, head: int | None = None, scale: str = "minmax"
) -> Figure:
    """Attention of tail and generated tokens over the prompt, one map a link (EPIC fig. 4 and 7)."""
    values = [seen.scaled(layer, head) if scale == "minmax" else seen.share(layer, head) for _, seen in maps]
    heights = [0.6 + 0.14 * len(one) for one in values]
    figure, axes = _figure(heights)
    most = 1.0 if scale == "minmax" else float(max(one.max() for one in values))
    for axis, (trace, seen), one in zip(axes, maps, values, strict=True):
        image = _map(axis, one, trace, most)
        texts = [*trace.pieces[trace.layout.num_context :], *(token.text for token in trace.generated)]
        _row_labels(axis, [_label(text) for text in texts[: len(one)]])
        axis.axhline(seen.num_tail - 0.5, color="white", linewidth=0.8)
        where = f"layer {'all' if layer is None else layer}, head {'all' if head is None else head}"
        axis.set_title(f"{trace.label}: {_answer(trace)}   ({where})")
    figure.colorbar(image, ax=axes, fraction=0.02, pad=0.01, label="QK, min-max" if scale == "minmax" else "share")
    return figure


@_styled
def draw_selection(traces: Sequence[Trace]) -> Figure:
    """Tokens × layers that each link computed; and the policy's scores, if it has any."""
    panels = [
        (trace, kind) for trace in traces for kind in ("rows", "scores") if kind == "rows" or trace.scores is not None
    ]
    heights = [0.6 + 0.12 * len(trace.rows) if kind == "rows" else 0.9 for trace, kind in panels]
    figure, axes = _figure(heights)
    for axis, (trace, kind) in zip(axes, panels, strict=True):
        if kind == "rows":
            _map(axis, trace.rows.astype(np.float64), trace, 1.0, "Blues")
            _row_labels(axis, [str(layer) for layer in range(len(trace.rows))])
            axis.set_ylabel("layer")
            recomputed, context = trace.report["tokens"]["recomputed"], trace.layout.num_context
            axis.set_title(f"{trace.label}: computed tokens ({recomputed:.0f} of {context} a layer): {_answer(trace)}")
        else:
            assert trace.scores is not None
            axis.vlines(np.arange(len(trace.scores)), 0, trace.scores, linewidth=0.8, color="#2c728e")
            _starts(axis, trace, None)
            axis.set_xlim(-0.5, trace.layout.num_tokens - 0.5)
            axis.set_title("scores")
    return figure


@_styled
def draw_deviation(links: Sequence[tuple[Trace, Against]]) -> Figure:
    """Per link: KV deviation and attention gained, layers × tokens (CacheBlend fig. 7), and KL per generated token."""
    heights = [
        height for trace, _ in links for height in (0.6 + 0.12 * len(trace.rows), 0.6 + 0.12 * len(trace.rows), 1.1)
    ]
    figure, axes = _figure(heights)
    most = max(float(one.kv.both.max()) for _, one in links) or 1.0
    gained = max(float(np.abs(one.attention.gained).max()) for _, one in links) or 1.0
    kl_most = max(token.kl for _, one in links for token in one.generated) or 1.0
    for index, (trace, against) in enumerate(links):
        kv, attention, kl = axes[3 * index : 3 * index + 3]
        layers = [str(layer) for layer in range(len(trace.rows))]
        left = _map(kv, against.kv.both, trace, most)
        kv.set_title(f"{trace.label}: KV deviation from full, |Δ(K, V)|")
        right = _map(attention, against.attention.gained, trace, gained, "RdBu_r", least=-gained)
        attention.set_title("share of the tail's attention, more (red) or less (blue) than under full")
        for axis, image in ((kv, left), (attention, right)):
            _row_labels(axis, layers)
            axis.set_ylabel("layer")
            figure.colorbar(image, ax=axis, fraction=0.02, pad=0.01)
        _bars(kl, [_label(one.text) for one in trace.generated], [one.kl for one in against.generated], kl_most)
        kl.set_title("KL(full || linked) of each generated token, nats")
    return figure


@_styled
def draw_sinks(profile: SinkProfile, title: str) -> Figure:
    """An object's sink: what its first tokens draw, by token and layer, and by layer and head."""
    num_layers, num_heads = profile.share.shape
    figure, (axis, heads) = _figure([2.2, 0.8 + 0.18 * num_layers])
    for layer, row in enumerate(profile.by_offset.mean(1)):
        label = f"layer {layer}" if layer in (0, num_layers - 1) or num_layers <= 8 else None
        axis.plot(100 * row, marker=".", label=label, color=_color(layer, num_layers))
    axis.set(xlabel="token of the chunk", ylabel="% of attention")
    axis.set_title(f"{title}: attention of the {profile.num_rows} rows behind, mean of heads")
    axis.legend()
    image = heads.imshow(100 * profile.share, aspect="auto", cmap="viridis", vmin=0)
    heads.set_xticks(range(0, num_heads, -(-num_heads // 32)))
    _row_labels(heads, [str(layer) for layer in range(num_layers)])
    heads.set(xlabel="head", ylabel="layer")
    heads.set_title(f"% that the first {profile.first} tokens draw ({100 * profile.if_even:.1f} if all drew alike)")
    figure.colorbar(image, ax=heads, fraction=0.02, pad=0.01)
    return figure


@_styled
def draw_offsets(maps: Sequence[tuple[Trace, AttentionMap]]) -> Figure:
    """What one token of a chunk draws of the tail and the answer, by its place in the chunk; a line a link."""
    figure, (axis,) = _figure([2.6])
    for trace, seen in maps:
        axis.plot(100 * seen.by_offset(OFFSETS).mean(0), marker=".", label=trace.label)
    axis.set(xlabel="token of the chunk", ylabel="% of attention", title="attention of tail and answer on one token of "
             "a chunk (mean of chunks, layers, heads)")  # fmt: skip
    axis.set_ylim(bottom=0)
    axis.legend()
    return figure


def _figure(heights: Sequence[float]) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, sum(heights) + 0.3), layout="constrained")
    return figure, list(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])


def _map(
    axis: Axes, values: NDArray[Any], trace: Trace, most: float, colors: str = "viridis", least: float = 0.0
) -> Any:
    """An image of rows over the prompt's tokens, with ticks where head, chunks and tail start."""
    shown = _signed(values, MOST_COLUMNS) if least < 0 else binned(values, MOST_COLUMNS)
    image = axis.imshow(shown.values, aspect="auto", cmap=colors, vmin=least, vmax=most)
    _starts(axis, trace, shown)
    return image


def _signed(values: NDArray[Any], width: int) -> Binned:
    """As `binned`, by the number that is farthest from 0."""
    high, low = binned(values, width), binned(-values, width)
    return Binned(np.where(high.values >= low.values, high.values, -low.values), high.edges)


def _starts(axis: Axes, trace: Trace, shown: Binned | None) -> None:
    """Ticks, labelled where they do not run into each other, and thin lines between the parts."""
    starts = trace.layout.starts
    at = [start if shown is None else shown.bin_of(start) for start in starts]
    width, last, labels = trace.layout.num_tokens if shown is None else shown.values.shape[1], -1.0, []
    for one, start in zip(at, starts, strict=True):
        fits = last < 0 or (one - last) / width > 0.035
        labels.append(str(start) if fits else "")
        last = one if fits else last
    axis.set_xticks(at, labels)
    if shown is not None:
        for one in at[1:]:
            axis.axvline(one - 0.5, color="#999999", linewidth=0.4)


def _row_labels(axis: Axes, labels: Sequence[str]) -> None:
    step = -(-len(labels) // _MOST_ROW_LABELS)
    axis.set_yticks(range(0, len(labels), step), labels[::step])


def _bars(axis: Axes, labels: Sequence[str], values: Sequence[float], most: float) -> None:
    """Bars of at most `most`, as wide as if there were a dozen."""
    step = -(-len(labels) // _MOST_ROW_LABELS)
    axis.bar(range(len(values)), values, color="#2c728e", width=0.6)
    axis.set_xticks(range(0, len(labels), step), labels[::step], rotation=0 if len(labels) <= 12 else 90)
    axis.set(xlim=(-0.5, max(len(values), 12) - 0.5), ylim=(0, 1.2 * most))
    if len(values) <= 12:
        for index, value in enumerate(values):
            axis.text(index, value, f"{value:.2g}", ha="center", va="bottom")


def _label(text: str) -> str:
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    return shown if len(shown) <= 12 else shown[:10] + ".."


def _answer(trace: Trace) -> str:
    return f'"{_label(trace.answer)}"'


def _color(layer: int, num_layers: int) -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis"](layer / max(1, num_layers))
