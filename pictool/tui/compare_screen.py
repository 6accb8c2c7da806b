"""The compare screen: two or more links of one prompt side by side, with one cursor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical, VerticalScroll
from textual.widgets import Footer, Static, TabbedContent, TabPane

from pictool.escapes import visible
from pictool.linker.policies import BASELINE
from pictool.trace.diff import TraceDiff, diff_traces
from pictool.trace.format import Trace
from pictool.trace.labels import position_label, short
from pictool.tui.base import SearchInput
from pictool.tui.services import LoadedTrace
from pictool.tui.text_screen import LOW, TextScreen
from pictool.tui.token_colors import BY_ALL, ELSEWHERE, HERE, ColorBy, legend, token_colors, token_style
from pictool.tui.widgets.heatmap import HeatMap
from pictool.tui.widgets.table import Choice, RowTable
from pictool.tui.widgets.token_text import TokensView, TokenText

MODES = ("computed", "overlap")  # at how many layers a token was computed; by which of the links
_MIN_COLUMN = 36  # width of a text beside another one
_MIN_HEIGHT = 8  # lines of a text below another one, its frame among them
_ONE_LINE = 104  # width that the numbers of a token need on one line; _TOP: sliders and legend
_TOP = 80
_MARK_NAMES = {BY_ALL: "by all", HERE: "here", ELSEWHERE: "elsewhere"}
_POLICY_COLUMNS = ("policy", ">computed", ">Jaccard", ">common", ">KL", ">|logit|", "answer")


class CompareScreen(TextScreen):
    """Compares every other trace with the baseline, which comes first: the one of full recompute if there is any."""

    DEFAULT_CSS = """
    CompareScreen #texts { layout: grid; height: 1fr; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    CompareScreen #texts > Vertical { border: round $foreground 30%; }
    CompareScreen #texts > Vertical { border-title-color: $text; border-subtitle-color: $text; }
    CompareScreen #texts > Vertical:focus-within { border: round $primary; }
    CompareScreen #top { layout: horizontal; height: 1; }
    CompareScreen.-slim #top { layout: vertical; height: 2; }
    CompareScreen #choices { width: auto; height: 1; }
    CompareScreen Choice { width: 15; }
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
        Binding("m", "step('mode',1)", "show"),
        Binding("l", "step('layer',1)", "layer"),
        Binding("L", "step('layer',-1)", "layer before", show=False),
    ]

    def __init__(self, traces: Sequence[LoadedTrace]) -> None:
        """Compare the traces.

        Raises:
            TraceError: traces of different prompts or models.
        """
        super().__init__()
        self.loaded = tuple(sorted(traces, key=lambda loaded: loaded.trace.report["algo"] != BASELINE))  # stable
        first, *others = self.loaded
        self.diffs = tuple(diff_traces(first.trace, other.trace, (first.name, other.name)) for other in others)

    def compose(self) -> ComposeResult:
        num_tokens = self.loaded[0].trace.layout.num_tokens
        yield self.title_line(f"Compare {len(self.loaded)} links of one prompt of {num_tokens} tokens")
        with Container(id="top"):
            with Horizontal(id="choices"):
                yield Choice("mode")
                yield Choice("layer")
            yield Static(id="legend")
        with VerticalScroll(id="texts", can_focus=False):
            for loaded in self.loaded:
                with Vertical() as column:
                    column.border_title = Text(_title_of(loaded.trace, loaded is self.loaded[0]))
                    # The prompt alone, since the generated tokens differ from link to link.
                    yield TokensView(TokenText.of_prompt(loaded.trace))
        with TabbedContent():
            with TabPane("policies", id="tab-policies"):
                yield RowTable(*_POLICY_COLUMNS, id="policies")
            with TabPane("map", id="tab-map"):
                yield HeatMap(self.loaded[0].trace.layout.starts)
            with TabPane("answers", id="tab-answers"):
                yield RowTable("", ">token", *(short(loaded.trace.label, 16) for loaded in self.loaded), id="answers")
        yield Static(id="status")
        yield SearchInput(placeholder="search; enter: next, escape: leave")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.set_class(self.app.size.height < LOW, "-folded")
        self.query_one("#policies", RowTable).show_rows(policy_rows(self.loaded, self.diffs))
        self.query_one("#answers", RowTable).show_rows(answer_rows(self.loaded))
        layers = range(len(self.loaded[0].trace.rows))
        self.query_one("#mode", Choice).choose_from({mode: mode for mode in MODES}, MODES[0])
        labels = {None: "all layers"} | {layer: f"layer {layer}" for layer in layers}
        self.query_one("#layer", Choice).choose_from(labels, None)
        self.views[0].focus()
        for view in self.views:
            self.watch(view, "scroll_y", self._scroll_alike, init=False)
        self.show_layer()

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width < _ONE_LINE, "-narrow")
        self.set_class(event.size.width < _TOP, "-slim")
        self.call_after_refresh(self._lay_out)

    def on_descendant_focus(self) -> None:
        self.call_after_refresh(self._lay_out)  # the search line takes a line of theirs

    def action_fold(self) -> None:
        super().action_fold()
        self.call_after_refresh(self._lay_out)

    def _lay_out(self) -> None:
        """Give all texts the same size, so that they break and scroll alike; what has no room is scrolled to."""
        texts = self.query_one("#texts")
        size = texts.scrollable_content_region
        num_columns = min(len(self.loaded), max(1, size.width // _MIN_COLUMN))
        num_rows = -(-len(self.loaded) // num_columns)
        num_columns = -(-len(self.loaded) // num_rows)  # none that stays empty
        texts.styles.grid_size_columns = num_columns
        texts.styles.grid_columns = str(size.width // num_columns)
        texts.styles.grid_rows = str(max(_MIN_HEIGHT, size.height // num_rows))

    def _scroll_alike(self, y: float) -> None:
        """Scroll all texts to where one was scrolled."""
        for view in self.views:
            view.scroll_to(y=y, animate=False, immediate=True)

    def show_layer(self) -> None:
        """Show the tokens of the chosen mode and layer."""
        traces = [loaded.trace for loaded in self.loaded]
        layer = self.query_one("#layer", Choice).value
        by = ColorBy(layer=layer if isinstance(layer, int) else None)
        is_overlap, has_color = self.query_one("#mode", Choice).value == MODES[1], not self.app.no_color
        all_colors = [token_colors(trace, None, by) for trace in traces]
        all_marks = overlap_marks(traces, by.layer)
        num_prompt = traces[0].layout.num_tokens
        for view, trace, colors, marks in zip(self.views, traces, all_colors, all_marks, strict=True):
            view.set_steps(marks if is_overlap else colors.steps[:num_prompt])
            assert isinstance(view.parent, Vertical)
            counts = (f"{int((marks == mark).sum())} {name}" for mark, name in _MARK_NAMES.items())
            view.parent.border_subtitle = Text(", ".join(counts) if is_overlap else visible(trace.answer))
        values = np.stack([colors.values[:num_prompt] for colors in all_colors])
        self.query_one(HeatMap).show(values, [trace.label for trace in traces], 0.0, all_colors[0].high)
        words = overlap_legend(has_color) if is_overlap else legend(all_colors[0], has_color)
        if not is_overlap and not any(colors.steps[: traces[0].layout.num_context].any() for colors in all_colors):
            words = Text(f"no link computed a context token{'' if by.layer is None else f' at layer {by.layer}'}")
        self.query_one("#legend", Static).update(words)
        self.show_token()

    def show_token(self) -> None:
        token, traces = self.views[0].cursor, [loaded.trace for loaded in self.loaded]
        counts = ", ".join(f"{short(trace.label, 22)} {int(trace.rows[:, token].sum())}" for trace in traces)
        words = f"computed at layers (of {len(traces[0].rows)}): {counts}"
        name = f"{position_label(traces[0], token)} «{short(traces[0].pieces[token], 24)}»"
        self.query_one("#status", Static).update(Text.assemble((name, "bold"), "  ", words), layout=False)

    def on_tokens_view_moved(self, event: TokensView.Moved) -> None:
        if event.view.cursor == event.token:  # else the cursor has moved on
            self.go_to(event.token)

    def on_heat_map_moved(self, event: HeatMap.Moved) -> None:
        self.go_to(event.column)

    def go_to(self, token: int) -> None:
        super().go_to(token)
        self.query_one(HeatMap).column = token
        self.show_token()

    def on_select_changed(self) -> None:
        self.show_layer()

    def action_difference(self, by: int) -> None:
        """Move to the next token that not all links computed at the same layers."""
        first, *others = self.loaded
        is_different = np.any([(other.trace.rows != first.trace.rows).any(0) for other in others], axis=0)
        tokens, cursor = is_different.nonzero()[0], self.views[0].cursor
        ahead = tokens[tokens > cursor] if by > 0 else tokens[tokens < cursor][::-1]
        if len(ahead):
            self.go_to(int(ahead[0]))
        else:
            self.pic.show_note("no further difference")


def _title_of(trace: Trace, is_baseline: bool) -> str:
    return visible(trace.label) + " (baseline)" * is_baseline


def policy_rows(traces: Sequence[LoadedTrace], diffs: Sequence[TraceDiff]) -> list[tuple[str, ...]]:
    """Compare each link with the first: overlap, tokens in common, KL(first ‖ this), largest difference of a logit."""
    rows = []
    for loaded, diff in zip(traces, (None, *diffs), strict=True):
        numbers = ["", "", "", ""]
        if diff is not None:
            numbers = [f"{diff.selection.overall:.3f}", str(diff.common), f"{diff.kl[0]:.3g}", f"{diff.max_logit:.3g}"]
        trace = loaded.trace
        computed = f"{trace.report['tokens']['recomputed']:.1f}"
        rows.append((_title_of(trace, diff is None), computed, *numbers, trace.answer))
    return rows


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


def overlap_legend(has_color: bool) -> Text:
    """Return the marks in their styles."""
    names = {BY_ALL: "by all", HERE: "here, not by all", ELSEWHERE: "elsewhere"}
    line = Text().append("computed ", style="dim")
    for mark, name in names.items():
        line.append(name, style=token_style(mark, has_color)).append(" ")
    return line
