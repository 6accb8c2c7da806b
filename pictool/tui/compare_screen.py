"""The compare screen: two or more links of one prompt side by side, with one cursor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.widgets import Static, TabbedContent, TabPane

from pictool.escapes import visible
from pictool.linker.policies import BASELINE
from pictool.trace.counts import log_softmax
from pictool.trace.diff import TraceDiff, diff_traces
from pictool.trace.format import Trace
from pictool.trace.labels import position_label, short
from pictool.tui.base import SearchInput
from pictool.tui.services import LoadedTrace
from pictool.tui.text_screen import TextScreen
from pictool.tui.token_colors import ColorBy, legend, token_colors
from pictool.tui.widgets.heatmap import HeatMap
from pictool.tui.widgets.key_footer import KeyFooter
from pictool.tui.widgets.picker import Picker
from pictool.tui.widgets.styles import BY_ALL, ELSEWHERE, HERE, token_style
from pictool.tui.widgets.table import Column, RowTable
from pictool.tui.widgets.token_text import TokensView, TokenText

MODES = ("computed", "overlap")  # at how many layers a token was computed; by which of the links
_MIN_COLUMN = 36  # width of a text beside another one
_MIN_HEIGHT = 8  # lines of a text below another one, its frame and its answer among them
_ONE_LINE = 104  # width that sliders and legend need on one line
_MARK_NAMES = {BY_ALL: "by all", HERE: "here", ELSEWHERE: "elsewhere"}
_POLICY_COLUMNS = (
    Column("policy", 20), Column("computed", 8, True), Column("Jaccard", 7, True), Column("common", 6, True),
    Column("KL", 8, True), Column("|logit|", 7, True), Column("answer", 0),
)  # fmt: skip


class CompareScreen(TextScreen):
    """Compares every other trace with the baseline, which comes first: the one of full recompute if there is any."""

    DEFAULT_CSS = """
    CompareScreen #texts { layout: grid; height: 1fr; }
    CompareScreen #texts > Vertical { height: 1fr; border: round $panel-lighten-2; }
    CompareScreen #texts > Vertical { border-title-color: $text; border-subtitle-color: $text; }
    CompareScreen #texts > Vertical:focus-within { border: round $primary; }
    CompareScreen .answer { height: 1; }
    CompareScreen #top { layout: horizontal; height: 1; }
    CompareScreen.-narrow #top { layout: vertical; height: 2; }
    CompareScreen #pickers { width: auto; min-width: 46; height: 1; }
    CompareScreen.-narrow #pickers { width: 1fr; }
    CompareScreen #legend { width: 1fr; height: 1; padding: 0 1; }
    CompareScreen TabbedContent { height: 10; max-height: 35%; }
    CompareScreen.-folded TabbedContent { display: none; }
    CompareScreen TabPane { padding: 0; }
    CompareScreen HeatMap { height: 1fr; }
    CompareScreen #status { height: 1; padding: 0 1; background: $boost; }
    CompareScreen.-narrow #status { height: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "difference(1)", "difference"),
        Binding("D", "difference(-1)", "difference before", show=False),
        Binding("m", "mode", "show"),
        Binding("l", "layer(1)", "layer"),
        Binding("L", "layer(-1)", "layer before", show=False),
        Binding("v", "texts(1)", "texts"),
        Binding("V", "texts(-1)", "texts before", show=False),
        Binding("t", "next_tab", "tab"),
    ]
    export_name = "compare"

    def __init__(self, traces: Sequence[LoadedTrace]) -> None:
        """Compare the traces.

        Raises:
            TraceError: traces of different prompts or models.
        """
        super().__init__()
        self.loaded = tuple(sorted(traces, key=lambda loaded: loaded.trace.report["algo"] != BASELINE))  # stable
        first, *others = self.loaded
        self.diffs = tuple(diff_traces(first.trace, other.trace, (first.name, other.name)) for other in others)
        self.shown_layer: int | None = None
        self.mode = MODES[0]
        self._first_shown, self._num_shown = 0, len(self.loaded)  # texts
        self._is_scrolling = False

    def compose(self) -> ComposeResult:
        with Container(id="top"):
            with Horizontal(id="pickers"):
                yield Picker("show", none=None, id="mode")
                yield Picker("layer", none="all", id="layer")
                yield Picker("texts", none=None, id="shown")
            yield Static(id="legend")
        with Container(id="texts"):
            for loaded in self.loaded:
                with Vertical() as column:
                    column.border_title = Text(self._title_of(loaded))
                    yield Static(Text(visible(loaded.trace.answer)), classes="answer")
                    # The prompt alone, since the generated tokens differ from link to link.
                    yield TokensView(TokenText.of_prompt(loaded.trace))
        with TabbedContent():
            with TabPane("policies", id="tab-policies"):
                yield RowTable(_POLICY_COLUMNS, id="policies")
            with TabPane("map", id="tab-map"):
                yield HeatMap(self.loaded[0].trace.layout.starts)
            with TabPane("layers", id="tab-layers"):
                yield RowTable(jaccard_columns(self.loaded), id="layers")
            with TabPane("first token", id="tab-first"):
                yield RowTable(candidate_columns(self.loaded), id="first")
            with TabPane("answers", id="tab-answers"):
                yield RowTable(answer_columns(self.loaded), id="answers")
        yield Static(id="status")
        yield SearchInput(placeholder="search; enter: next, escape: leave")
        yield KeyFooter()

    def _title_of(self, loaded: LoadedTrace) -> str:
        return visible(loaded.trace.label) + " (baseline)" * (loaded is self.loaded[0])

    def on_mount(self) -> None:
        num_layers = len(self.loaded[0].trace.rows)
        self.query_one("#layer", Picker).choose_from([str(layer) for layer in range(num_layers)], None)
        self.query_one("#policies", RowTable).show_rows(policy_rows(self.loaded, self.diffs))
        self.query_one("#layers", RowTable).show_rows(jaccard_rows(self.diffs))
        self.query_one("#first", RowTable).show_rows(candidate_rows(self.loaded, self.diffs))
        self.query_one("#answers", RowTable).show_rows(answer_rows(self.loaded))
        self.query_one("#mode", Picker).choose_from(MODES, 0)
        self.views[0].focus()
        for view in self.views:
            self.watch(view, "scroll_y", partial(self._scroll_alike, view), init=False)
        self.show_layer()

    def on_resize(self, event: events.Resize) -> None:
        super().on_resize(event)
        self.set_class(event.size.width < _ONE_LINE, "-narrow")
        self.call_after_refresh(self._lay_out)

    def on_folded(self) -> None:
        self.call_after_refresh(self._lay_out)

    def _lay_out(self) -> None:
        """Show as many texts as there is room for, side by side and below each other; `v` shows the next ones."""
        texts = self.query_one("#texts")
        num_columns, num_rows = grid_of(len(self.loaded), texts.size.width, texts.size.height)
        texts.styles.grid_size_columns, texts.styles.grid_size_rows = num_columns, num_rows
        self._num_shown = min(len(self.loaded), num_columns * num_rows)
        self._show_texts(self._first_shown)

    def _show_texts(self, first: int) -> None:
        """Show the texts from this one on, and the last ones at most."""
        self._first_shown = first = max(0, min(first, len(self.loaded) - self._num_shown))
        for index, view in enumerate(self.views):
            assert view.parent is not None
            view.parent.display = first <= index < first + self._num_shown
        starts = range(len(self.loaded) - self._num_shown + 1)
        labels = [f"{start + 1}-{start + self._num_shown}/{len(self.loaded)}" for start in starts]
        if self._num_shown == 1:
            labels = [f"{start + 1}/{len(self.loaded)}" for start in starts]
        self.query_one("#shown", Picker).choose_from(labels, first)
        if isinstance(self.focused, TokensView) and self.focused not in self.shown_views:
            self.shown_views[0].focus()
        self.refresh_bindings()
        self.call_after_refresh(self._align)

    def _align(self) -> None:
        """Break the lines of all texts alike, and scroll them alike: columns may differ by a cell in width."""
        shown = self.shown_views
        width = min(view.scrollable_content_region.width for view in shown)
        for view in shown:
            view.set_max_width(width)
        self.call_after_refresh(self._scroll_as_lowest)

    def _scroll_as_lowest(self) -> None:
        """Scroll all texts as the lowest of them, so that the cursor is in view in each."""
        lowest = min(self.shown_views, key=lambda view: view.size.height)
        self._scroll_alike(lowest, lowest.scroll_y)

    def _scroll_alike(self, scrolled: TokensView, y: float) -> None:
        """Scroll the other texts to where one was scrolled."""
        if not self._is_scrolling:
            self._is_scrolling = True
            for view in self.shown_views:
                if view is not scrolled:
                    view.scroll_to(y=y, animate=False, immediate=True)
            self._is_scrolling = False

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """There are no other texts while all are shown."""
        return action != "texts" or self._num_shown < len(self.loaded)

    def action_texts(self, by: int) -> None:
        """Show the next texts; after the last ones come the first."""
        last, first = len(self.loaded) - self._num_shown, self._first_shown
        step = by * self._num_shown
        is_end = first == last if by > 0 else first == 0
        self._show_texts((0 if by > 0 else last) if is_end else first + step)

    def show_layer(self) -> None:
        """Show the tokens of the chosen mode and layer."""
        traces, by = [loaded.trace for loaded in self.loaded], ColorBy(layer=self.shown_layer)
        is_overlap, has_color = self.mode == "overlap", not self.app.no_color
        all_colors = [token_colors(trace, None, by) for trace in traces]
        all_marks = overlap_marks(traces, self.shown_layer)
        num_prompt = traces[0].layout.num_tokens
        for view, colors, marks in zip(self.views, all_colors, all_marks, strict=True):
            view.set_steps(marks if is_overlap else colors.steps[:num_prompt])
            assert isinstance(view.parent, Vertical)
            view.parent.border_subtitle = overlap_counts(marks) if is_overlap else ""
        values = np.stack([colors.values[:num_prompt] for colors in all_colors])
        self.query_one(HeatMap).show(values, [trace.label for trace in traces], 0.0, all_colors[0].high)
        words = overlap_legend(has_color) if is_overlap else legend(all_colors[0], has_color)
        if not is_overlap and not any(colors.steps[: traces[0].layout.num_context].any() for colors in all_colors):
            words = Text(f"no link computed a context token{'' if by.layer is None else f' at layer {by.layer}'}")
        self.query_one("#legend", Static).update(words)
        self.show_token()

    def show_token(self) -> None:
        token, traces = self.views[0].cursor, [loaded.trace for loaded in self.loaded]
        counts = ", ".join(f"{short(trace.label, 16)} {int(trace.rows[:, token].sum())}" for trace in traces)
        words = f"computed at layers (of {len(traces[0].rows)}): {counts}"
        name = f"{position_label(traces[0], token)} «{short(traces[0].pieces[token], 24)}»"
        self.query_one("#status", Static).update(Text.assemble((name, "bold"), "  ", words), layout=False)

    def on_tokens_view_moved(self, event: TokensView.Moved) -> None:
        if event.view.cursor == event.token:  # else the cursor has moved on
            self._follow(event.token)

    def on_heat_map_moved(self, event: HeatMap.Moved) -> None:
        self._follow(event.column)

    def _follow(self, token: int) -> None:
        self.go_to(token)
        self.query_one(HeatMap).column = token
        self.show_token()
        self.call_after_refresh(self._scroll_as_lowest)

    def on_picker_picked(self, event: Picker.Picked) -> None:
        if event.picker.id == "mode":
            self.mode = MODES[event.value or 0]
        elif event.picker.id == "shown":
            self._show_texts(event.value or 0)
            return
        else:
            self.shown_layer = event.value
        self.show_layer()

    def action_mode(self) -> None:
        picker = self.query_one("#mode", Picker)
        picker.pick((MODES.index(self.mode) + 1) % len(MODES))

    def action_layer(self, by: int) -> None:
        self.query_one("#layer", Picker).action_step(by)

    def action_difference(self, by: int) -> None:
        """Move to the next token that not all links computed at the same layers."""
        first, *others = self.loaded
        is_different = np.any([(other.trace.rows != first.trace.rows).any(0) for other in others], axis=0)
        tokens, cursor = is_different.nonzero()[0], self.views[0].cursor
        ahead = tokens[tokens > cursor] if by > 0 else tokens[tokens < cursor][::-1]
        if len(ahead):
            self.go_to(int(ahead[0]))
        else:
            self.pic.tell("no further difference")

    def export_data(self) -> Sequence[Mapping[str, Any]]:
        first, *others = self.loaded
        return [self.pic.services.exports.diff(first, other) for other in others]


def grid_of(num_texts: int, width: int, height: int) -> tuple[int, int]:
    """Return how many columns and rows of texts have room: at least one of each, and none that stays empty."""
    columns = min(num_texts, max(1, width // _MIN_COLUMN))
    rows = min(-(-num_texts // columns), max(1, height // _MIN_HEIGHT))
    columns = min(columns, -(-num_texts // rows))
    return columns, rows


def policy_rows(traces: Sequence[LoadedTrace], diffs: Sequence[TraceDiff]) -> list[tuple[str, ...]]:
    """Compare each link with the first: overlap, tokens in common, KL(first ‖ this), largest difference of a logit."""
    rows = []
    for loaded, diff in zip(traces, (None, *diffs), strict=True):
        numbers = ["", "", "", ""]
        if diff is not None:
            numbers = [f"{diff.selection.overall:.3f}", str(diff.common), f"{diff.kl[0]:.3g}", f"{diff.max_logit:.3g}"]
        trace = loaded.trace
        computed = f"{trace.report['tokens']['recomputed']:.1f}"
        rows.append((visible(trace.label) + " (baseline)" * (diff is None), computed, *numbers, visible(trace.answer)))
    return rows


def jaccard_columns(traces: Sequence[LoadedTrace]) -> list[Column]:
    names = ["layer", *(short(loaded.trace.label, 16) for loaded in traces[1:])]
    return [Column(name, max(6, len(name)), True) for name in names]


def jaccard_rows(diffs: Sequence[TraceDiff]) -> list[tuple[str, ...]]:
    """Return the overlap of each selection with the first one's, layer by layer, then of all layers."""
    layers = range(len(diffs[0].selection.jaccard))
    rows = [(str(layer), *(f"{diff.selection.jaccard[layer]:.3f}" for diff in diffs)) for layer in layers]
    return [*rows, ("all", *(f"{diff.selection.overall:.3f}" for diff in diffs))]


def candidate_columns(traces: Sequence[LoadedTrace]) -> list[Column]:
    names = [short(loaded.trace.label, 16) for loaded in traces]
    logits = [Column(f"logit {name}", max(10, len(name) + 6), True) for name in names[1:]]
    return [Column("token", 10), *(Column(name, max(7, len(name)), True) for name in names), *logits]


def candidate_rows(traces: Sequence[LoadedTrace], diffs: Sequence[TraceDiff]) -> list[tuple[str, ...]]:
    """List the candidates of any link for the first token, the likeliest first.

    Each with its probability under every link, and the difference of its logit from the first link's.
    """
    texts = {candidate.id: candidate.text for diff in diffs for candidate in diff.candidates}
    probabilities = [np.exp(log_softmax(loaded.trace.logits)) for loaded in traces]
    first, *others = [loaded.trace.logits.astype(np.float64) for loaded in traces]
    rows = []
    for token in sorted(texts, key=lambda token: -max(of_link[token] for of_link in probabilities)):
        differences = [f"{logits[token] - first[token]:+.2f}" for logits in others]
        rows.append((short(texts[token], 10), *(f"{of_link[token]:.4f}" for of_link in probabilities), *differences))
    return rows


def answer_columns(traces: Sequence[LoadedTrace]) -> list[Column]:
    names = [short(loaded.trace.label, 16) for loaded in traces]
    return [Column("", 1), Column("token", 5, True), *(Column(name, 22) for name in names)]


def answer_rows(traces: Sequence[LoadedTrace]) -> list[tuple[str, ...]]:
    """List the answers token by token with log-probabilities; ≠ from where on any of them differs from the first."""
    rows, mark = [], ""
    for index, tokens in enumerate(zip_longest(*(loaded.trace.generated for loaded in traces))):
        if any((token and token.id) != (tokens[0] and tokens[0].id) for token in tokens):
            mark = "≠"
        cells = ["" if token is None else f"{short(token.text, 13)} {token.logprob:.3g}" for token in tokens]
        rows.append((mark, str(index), *cells))
    return rows


def overlap_marks(traces: Sequence[Trace], layer: int | None) -> list[NDArray[np.int8]]:
    """Mark the prompt's tokens, int8 [n] for each link: computed by all links, here, or elsewhere.

    At a layer, or (None) at any layer, as `inspect --diff` has it. Tokens of the tail and
    those that no link computed are 0.
    """
    computed = np.stack([trace.rows.any(0) if layer is None else trace.rows[layer] for trace in traces])
    by_all, by_any = computed.all(0), computed.any(0)
    is_context = np.arange(computed.shape[1]) < traces[0].layout.num_context
    marks = np.where(computed, np.where(by_all, BY_ALL, HERE), np.where(by_any, ELSEWHERE, 0))
    return list(np.where(is_context, marks, 0).astype(np.int8))


def overlap_counts(marks: NDArray[np.int8]) -> str:
    """Count the context tokens with each mark."""
    return ", ".join(f"{int((marks == mark).sum())} {name}" for mark, name in _MARK_NAMES.items())


def overlap_legend(has_color: bool) -> Text:
    """Return the marks in their styles."""
    names = {BY_ALL: "by all", HERE: "here, not by all", ELSEWHERE: "elsewhere, not here"}
    line = Text().append("computed ", style="dim")
    for mark, name in names.items():
        line.append(name, style=token_style(mark, has_color)).append(" ")
    return line
