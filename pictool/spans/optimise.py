"""The optimizer: rules to a fixpoint, first match first (Span queries §5.1), and what it says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pictool.errors import InputError, PicError
from pictool.spans.query import (
    DEFAULT_MODEL,
    Chat,
    Checkpoint,
    Generate,
    Join,
    Map,
    Monad,
    Path,
    Query,
    Repeat,
    attributes,
    no_checkpoint,
    nodes,
    path_text,
    shape,
)
from pictool.spans.rules import RULES, Effect, Options, Rule, Site, has_calls

_SHOWN = 60  # characters of a text, in trees


@dataclass(frozen=True)
class AppliedRule:
    """A rule that fired. `path` is that of the node as the tree was then; `before` and `after` are what it was."""

    rule: str
    effect: Effect
    path: Path
    before: Query
    after: Query

    def __str__(self) -> str:
        """With what it changes, where that is something."""
        effect = "" if self.effect is Effect.NOTHING else f" ({self.effect.value})"
        return f"{self.rule} at {path_text(self.path)}: {shape(self.before)} → {shape(self.after)}{effect}"


@dataclass(frozen=True)
class OptimisedQuery:
    """A query before and after, and every step between. `shared` leads from calls to the equal one that is run."""

    before: Query
    after: Query
    steps: tuple[AppliedRule, ...]

    @property
    def shared(self) -> dict[Path, Path]:
        return shared_calls(self.after)

    def explain(self) -> str:
        """The tree before, the steps, the tree after, and which calls run once."""
        steps = [f"{number}. {step}" for number, step in enumerate(self.steps, 1)]
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
            own = own_calls(node)
            if isinstance(node, Generate | Chat):  # a G¹ in a monad compiles
                own = not (is_prepared and node.call.max_tokens == 1 and not has_calls(node.input))
            elif isinstance(node, Repeat) and not node.input.varies:
                own = 0
            inner = is_prepared if isinstance(node, Join) else isinstance(node, Monad)
            return own + sum(count(child, path + step, inner) for step, child in node.steps())

        return count(self.after, (), is_prepared=False)


def optimise(
    query: Query, options: Options = Options(), rules: Sequence[Rule] = RULES, checkpoint: Checkpoint = no_checkpoint
) -> OptimisedQuery:
    """Apply rules until none matches. The rules decide by `options` what they may change.

    Args:
        checkpoint: called with every node to which rules are applied.

    Raises:
        InputError: a tree that becomes too deep, or fragments that cannot be read.
    """
    steps: list[AppliedRule] = []
    after = _Rewriting(rules, steps, checkpoint).fixpoint(query, (), Site(options))
    return OptimisedQuery(query, after, tuple(steps))


def shared_calls(query: Query) -> dict[Path, Path]:
    """The calls that equal an earlier one and give the same each time, by path, each with the path of that one.

    A call below such a call is not named.
    """
    first: dict[Query, Path] = {}
    shared: dict[Path, Path] = {}
    last: Path | None = None  # what is below a node follows it
    for path, node in nodes(query):
        if last is not None and path[: len(last)] == last:
            continue
        if isinstance(node, Generate | Map) and not node.varies and first.setdefault(node, path) != path:
            shared[path], last = first[node], path
    return shared


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
    fields = {name: value for name, value in attributes(query).items() if (name, value) != ("model", DEFAULT_MODEL)}
    values = [f"{name}={value}" for name, value in fields.items() if name not in ("text", "role", "source")]
    texts = [str(getattr(query, name)) for name in ("source", "text") if getattr(query, name, None) is not None]
    return " ".join([query.symbol, *values, *(_shortened(text) for text in texts)])


def _shortened(text: str) -> str:
    flat = " ".join(text.split())
    return f'"{flat}"' if len(flat) <= _SHOWN else f'"{flat[:_SHOWN]}…"'


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


def own_calls(node: Query) -> int:
    """Calls of a node itself; those of a repeat less the one that is below it."""
    match node:
        case Generate() | Chat():
            return 1
        case Repeat():
            return node.n - 1
        case Map():
            return len(node.inputs)
    return 0


@dataclass(frozen=True)
class _Rewriting:
    """Rules that are applied to a tree, and the steps so far."""

    rules: Sequence[Rule]
    steps: list[AppliedRule]
    checkpoint: Checkpoint

    def fixpoint(self, node: Query, path: Path, site: Site) -> Query:
        """A node to which, and below which, no rule applies any more."""
        node = self._applied(node, path, site)
        while True:
            below = Site(site.options, node.call if isinstance(node, Generate | Chat) else site.call)
            children = [self.fixpoint(child, path + step, below) for step, child in node.steps()]
            if all(new is old for new, old in zip(children, node.children, strict=True)):
                return node
            rewritten = node.with_children(children)
            node = self._applied(rewritten, path, site)
            if node is rewritten:  # and nothing applies to its children, as they are
                return node

    def _applied(self, node: Query, path: Path, site: Site) -> Query:
        """A node to which no rule applies any more; those below it may still match."""
        while True:
            self.checkpoint()
            new = self._apply(node, path, site)
            if new is None:
                return node
            node = new

    def _apply(self, node: Query, path: Path, site: Site) -> Query | None:
        """What the first rule that matches makes of a node; None if none does."""
        for rule in self.rules:
            try:
                new = rule.apply(node, site)
            except PicError as error:
                raise InputError(f"{path_text(path if node.origin is None else node.origin)}: {error}") from error
            if new is not None:
                assert new != node, f"{rule.name} gives back what it is given"
                self.steps.append(AppliedRule(rule.name, rule.effect, path, node, new))
                return new
        return None
