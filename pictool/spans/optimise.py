"""What the optimizer makes of a query, what it says of that, and trees as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from pictool.spans.operators.calls import Generate, Map, ModelCall, Repeat
from pictool.spans.operators.flow import Monad
from pictool.spans.operators.joins import Join
from pictool.spans.query import (
    DEFAULT_MODEL,
    AppliedRule,
    Checkpoint,
    Effect,
    Options,
    Path,
    Query,
    no_checkpoint,
    nodes,
    path_text,
    rewrite,
)

_SHOWN = 60  # characters of a text, in trees
_UNLABELLED = ("depth", "origin", "parts", "text", "role", "source")  # of a node's fields


@dataclass(frozen=True)
class OptimisedQuery:
    """A query before and after, and every step between."""

    before: Query
    after: Query
    steps: tuple[AppliedRule, ...]

    @property
    def shared(self) -> dict[Path, Path]:
        """The calls that equal an earlier one and give the same each time, by path, each with the path of that one.

        A call below such a call is not named.
        """
        first: dict[Query, Path] = {}
        shared: dict[Path, Path] = {}
        last: Path | None = None  # what is below a node follows it
        for path, node in nodes(self.after):
            if last is not None and path[: len(last)] == last:
                continue
            if isinstance(node, ModelCall) and not node.varies and first.setdefault(node, path) != path:
                shared[path], last = first[node], path
        return shared

    def explain(self) -> str:
        """The tree before, the steps, the tree after, and which calls run once."""
        steps = [f"{number}. {_step_text(step)}" for number, step in enumerate(self.steps, 1)]
        shared = [f"{path_text(path)} runs once, as {path_text(first)}" for path, first in self.shared.items()]
        before = ["before", tree_text(self.before), "", *steps, "", "after"] if steps else ["no rule applies"]
        return "\n".join([*before, tree_text(self.after), *shared])

    @property
    def num_calls(self) -> int:
        """Calls that are answered, each output of a repeat and a map, less those that have the answer of another."""
        shared = self.shared

        def count(node: Query, path: Path, is_prepared: bool) -> int:
            if path in shared:
                return 0
            is_compiled = is_prepared and isinstance(node, Generate) and node.prepares
            is_one = isinstance(node, Repeat) and not node.input.varies
            own = 0 if is_compiled or is_one else node.num_calls
            inner = is_prepared if isinstance(node, Join) else isinstance(node, Monad)
            return own + sum(count(child, path + step, inner) for step, child in node.steps())

        return count(self.after, (), is_prepared=False)


def optimise(query: Query, options: Options = Options(), checkpoint: Checkpoint = no_checkpoint) -> OptimisedQuery:
    """What `rewrite` makes of a query, and how. Raises InputError."""
    after, steps = rewrite(query, options, checkpoint)
    return OptimisedQuery(query, after, tuple(steps))


def _step_text(step: AppliedRule) -> str:
    """A step, with what it changes, where that is something."""
    effect = "" if step.effect is Effect.NOTHING else f" ({step.effect.value})"
    return f"{step.rule} at {path_text(step.path)}: {shape(step.before)} → {shape(step.after)}{effect}"


def shape(query: Query) -> str:
    """The tree without its texts, as figures draw it: `G(⋈(S, +(F, F), U))`."""
    below = ", ".join(shape(child) for child in query.children)
    return f"{query.symbol}({below})" if below or isinstance(query, Join) else query.symbol


def tree_text(query: Query) -> str:
    """A tree as lines, with the beginnings of its texts."""
    return "\n".join(line.lead + line.label for line in tree_lines(query))


@dataclass(frozen=True)
class TreeLine:
    """A node as a line of a drawn tree. `lead` is the drawing before the label."""

    lead: str
    label: str
    path: Path


def tree_lines(query: Query, has_outputs: bool = False) -> Iterator[TreeLine]:
    """The lines of a tree; with `has_outputs`, each output of a repeat or a map has one below it."""
    yield from _lines(query, (), has_outputs, "", "")


def label(query: Query) -> str:
    """A node in a few words: its symbol, and its fields. The default model is not named."""
    own = {entry.name: getattr(query, entry.name) for entry in fields(query)}
    call = own.pop("call", None)
    stated = call.to_data() | own if call else own
    values = [
        f"{name}={value}"
        for name, value in stated.items()
        if name not in _UNLABELLED and not isinstance(value, Query) and (name, value) != ("model", DEFAULT_MODEL)
    ]
    given = (getattr(query, name, None) for name in ("source", "text"))
    texts = [" ".join(str(text).split()) for text in given if text is not None]
    shown = [f'"{text}"' if len(text) <= _SHOWN else f'"{text[:_SHOWN]}…"' for text in texts]
    return " ".join([query.symbol, *values, *shown])


def _lines(query: Query, path: Path, has_outputs: bool, lead: str, rest: str) -> Iterator[TreeLine]:
    yield TreeLine(lead, label(query), path)
    count = query.n if isinstance(query, Repeat) else len(query.inputs) if isinstance(query, Map) else 0
    below = [*range(count if has_outputs else 0), *query.steps()]
    for number, entry in enumerate(below, 1):
        own, more = ("└─ ", "   ") if number == len(below) else ("├─ ", "│  ")
        if isinstance(entry, int):
            yield TreeLine(rest + own, f"output {entry + 1}", (*path, query.kind, entry))
        else:
            step, child = entry
            yield from _lines(child, path + step, has_outputs, rest + own, rest + more)
