"""The trace screen: the prompt as coloured text above a heat map and tables, with the model's analysis on request."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import Footer, Static, TabbedContent, TabPane
from textual.worker import get_current_worker

from pictool.escapes import visible
from pictool.trace.counts import TraceCounts
from pictool.trace.format import Trace
from pictool.trace.labels import position_label, short
from pictool.tui.base import SearchInput
from pictool.tui.text_screen import LOW, TextScreen
from pictool.tui.token_colors import ColorBy, TokenColors, color_modes, legend, token_colors
from pictool.tui.widgets.heatmap import HeatMap
from pictool.tui.widgets.table import Choice, RowTable
from pictool.tui.widgets.token_text import TokensView, TokenText

if TYPE_CHECKING:
    from pictool.trace.analysis import TraceAnalysis
    from pictool.tui.services import LoadedTrace

_PART_COLUMNS = ("part", ">start", ">tokens", ">computed", ">score", "source")


class TraceScreen(TextScreen):
    """The view of one trace."""

    DEFAULT_CSS = """
    TraceScreen #facts { height: 1; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    TraceScreen #choices { height: 1; }
    TraceScreen #legend { height: 1; padding: 0 1; }
    TraceScreen TokensView { padding: 0 1; }
    TraceScreen TabbedContent { height: 13; max-height: 45%; }
    TraceScreen.-folded TabbedContent { display: none; }
    TraceScreen TabPane { padding: 0; }
    TraceScreen HeatMap { height: 1fr; }
    TraceScreen #status { height: 2; padding: 0 1; background: $boost; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "step('mode',1)", "show"),
        Binding("l", "step('layer',1)", "layer"),
        Binding("L", "step('layer',-1)", "layer before", show=False),
        Binding("h", "step('head',1)", "head", show=False),
        Binding("H", "step('head',-1)", "head before", show=False),
        Binding("r", "step('row',1)", "row", show=False),
        Binding("R", "step('row',-1)", "row before", show=False),
        Binding("a", "analyse", "attention"),
    ]

    def __init__(self, loaded: LoadedTrace) -> None:
        super().__init__()
        self.loaded = loaded
        self.analysis: TraceAnalysis | None = None
        self.color_by = ColorBy()
        self.token_colors: TokenColors = token_colors(loaded.trace, None, self.color_by)

    def compose(self) -> ComposeResult:
        text = TokenText.of_trace(self.loaded.trace)
        yield self.title_line(f"Trace {self.loaded.name}: {self.loaded.trace.policy}")
        yield Static(facts(self.loaded.trace), id="facts")
        with Horizontal(id="choices"):
            for name in ("mode", "layer", "head", "row"):
                yield Choice(name)
        yield Static(id="legend")
        yield TokensView(text)
        with TabbedContent():
            with TabPane("map", id="tab-map"):
                yield HeatMap(text.starts)
            with TabPane("parts", id="tab-parts"):
                yield RowTable(*_PART_COLUMNS, id="parts")
        yield Static(id="status")
        yield SearchInput(placeholder="search; enter: next, escape: leave")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.set_class(self.app.size.height < LOW, "-folded")
        self.views[0].focus()
        self.set_color_by(self.color_by)

    def set_color_by(self, by: ColorBy) -> None:
        """Colour by these numbers."""
        attention = None if self.analysis is None else self.analysis.attention
        self.color_by = by
        num_layers = 0 if by.mode == "score" else len(self.loaded.trace.rows)
        heads = rows = range(0)
        if by.mode == "attention" and attention is not None:
            heads, rows = range(attention.scores.shape[1]), range(attention.scores.shape[2])
        modes = color_modes(self.loaded.trace, self.analysis)
        self.query_one("#mode", Choice).choose_from({mode: mode for mode in modes}, by.mode)
        for name, indices, value in (
            ("layer", range(num_layers), by.layer), ("head", heads, by.head), ("row", rows, by.row),
        ):  # fmt: skip
            labels = {None: f"all {name}s"} | {index: f"{name} {index}" for index in indices}
            self.query_one(f"#{name}", Choice).choose_from(labels, value)
        self.recompute(by, self.analysis)

    @work(thread=True, exclusive=True, group="colors")
    def recompute(self, by: ColorBy, analysis: TraceAnalysis | None) -> None:
        """Compute the numbers of the choice in a thread: averaging a large map takes time."""
        colors = token_colors(self.loaded.trace, analysis, by)
        if not get_current_worker().is_cancelled:
            self.show_later(self._show, colors)

    def _show(self, colors: TokenColors) -> None:
        self.token_colors = colors
        self.views[0].set_steps(colors.steps)
        known = colors.map[np.isfinite(colors.map)]  # its maximum may exceed that of the row that colours the text
        high = float(known.max()) if len(known) else colors.high
        self.query_one(HeatMap).show(colors.map, colors.labels, colors.low, high, colors.row)
        words = legend(colors, not self.app.no_color)
        if not colors.steps[: self.loaded.trace.layout.num_context].any():
            words = Text(f"no context token has a colour ({colors.unit}); a: attention")
        self.query_one("#legend", Static).update(words)
        self.query_one("#parts", RowTable).show_rows(part_rows(self.loaded.counts, self.color_by.layer))
        self.show_token()

    def show_token(self) -> None:
        line = token_line(self.loaded.trace, self.analysis, self.token_colors, self.views[0].cursor)
        self.query_one("#status", Static).update(line, layout=False)

    def on_tokens_view_moved(self, event: TokensView.Moved) -> None:
        self.query_one(HeatMap).column = event.token
        self.show_token()

    def on_heat_map_moved(self, event: HeatMap.Moved) -> None:
        self.views[0].cursor = event.column

    def on_select_changed(self) -> None:
        mode, *numbers = [self.query_one(f"#{name}", Choice).value for name in ("mode", "layer", "head", "row")]
        by = ColorBy(str(mode), *(number if isinstance(number, int) else None for number in numbers))
        if by.mode != self.color_by.mode:
            by = ColorBy(by.mode, None if by.mode == "score" else by.layer)
        if by != self.color_by:
            self.set_color_by(by)

    def action_analyse(self) -> None:
        """Ask the model for the attention of all layers."""
        trace, name, job = self.loaded.trace, self.loaded.name, self.pic.job
        self.ask_model(
            lambda listener: job.analyse(trace, name, listener), self.set_analysis, self.query_one("#legend", Static)
        )

    def set_analysis(self, analysis: TraceAnalysis) -> None:
        """Show the attention that the model computed."""
        self.analysis = analysis
        self.set_color_by(ColorBy("attention", self.color_by.layer))


def facts(trace: Trace) -> Text:
    """Return a line: what was computed, and the answer."""
    tokens = trace.report["tokens"]
    counts = f"computed {tokens['recomputed']:.1f} of {tokens['context']} context tokens per layer"
    return Text.assemble(f"{counts}; ", ("answer ", "dim"), visible(trace.answer))


def token_line(trace: Trace, analysis: TraceAnalysis | None, colors: TokenColors, token: int) -> Text:
    """Return everything that is known of one token."""
    num_prompt = trace.layout.num_tokens
    if token >= num_prompt:
        return _generated_line(trace, analysis, colors, token - num_prompt)
    count, num_layers = int(trace.rows[:, token].sum()), len(trace.rows)
    words = [f"id {trace.layout.tokens[token]}", f"position {token}", f"computed at {count} of {num_layers} layers"]
    if trace.scores is not None:
        words.append(f"score {trace.scores[token]:.4g}")
    if analysis is not None and analysis.deviation is not None:
        kv, gained = analysis.deviation.kv.both[:, token], analysis.deviation.attention.gained[:, token]
        words.append(f"|d(K,V)| {kv.mean():.3g}, attention {100 * gained.mean():+.2f} % against full")
    return _line(position_label(trace, token), trace.pieces[token], [*words, *_value(colors, token)])


def _generated_line(trace: Trace, analysis: TraceAnalysis | None, colors: TokenColors, index: int) -> Text:
    token = trace.generated[index]
    words = [f"id {token.id}", f"logprob {token.logprob:.3g}"]
    if analysis is not None and analysis.deviation is not None:
        deviation, choice = analysis.deviation.generated[index], short(analysis.choices[index], 16)
        words.append(f"KL {deviation.kl:.3g}, p {deviation.linked:.4f}, under full {deviation.full:.4f}")
        words.append(f"full's choice {choice!r} {deviation.choice_full:.4f}")
    return _line(f"answer+{index}", token.text, [*words, *_value(colors, trace.layout.num_tokens + index)])


def _value(colors: TokenColors, token: int) -> list[str]:
    value = colors.values[token]
    is_known = "computed" in colors.unit or "score" in colors.unit  # the line has them already
    return [] if is_known or np.isnan(value) else [f"{colors.unit}: {value:.4g}"]


def _line(label: str, piece: str, words: list[str]) -> Text:
    return Text.assemble((label, "bold"), " ", (f"«{short(piece, 24)}»", "bold"), "  ", ", ".join(words))


def part_rows(counts: TraceCounts, layer: int | None) -> list[tuple[str, ...]]:
    """Return counts of every part; of one layer, or the mean of all."""
    rows: list[tuple[str, ...]] = []
    for index, part in enumerate(counts.parts):
        name = "head" if index == 0 else "tail" if index == len(counts.parts) - 1 else str(index)
        computed = part.computed if layer is None else float(part.per_layer[layer])
        score = "" if part.score is None else f"{part.score[0]:.3g}"
        rows.append((name, str(part.start), str(part.num_tokens), f"{computed:.1f}", score, part.source))
    return rows
