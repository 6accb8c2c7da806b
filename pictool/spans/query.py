"""The tree of a span query (Span queries §4.1), immutable, and what is common to its operators.

Each operator is a class in `operators/`: how it is read (`read`), written (`to_data`), rewritten (`rules`) and run
(`run`). A tree is at most `MAX_DEPTH` deep, and that is checked where a node is made: no function over trees needs a
check.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache, cached_property
from typing import Any, ClassVar, Self

from pictool.errors import InputError, PicError

MAX_DEPTH = 128
MAX_NODES = 100_000
DEFAULT_MODEL = "default"  # of calls that leave it to the executor
_LOCAL = ("pic", "spnl", "local")  # providers whose models run here
Path = tuple[str | int, ...]  # to a node, by keys and indices of its JSON
Checkpoint = Callable[[], None]  # called at every node of a pass over a tree; it may let other work go on, or raise


def no_checkpoint() -> None:
    """A `Checkpoint` that does nothing."""


class Effect(Enum):
    """What a rule may change."""

    NOTHING = "what the model reads stays the same"
    ORDER = "children of a + change places"
    PROMPT = "the model reads another prompt"


@dataclass(frozen=True)
class Options:
    """What the optimizer may do.

    Fields:
        sorts_plus: children of a + are put in the order of their content; that decides what a prefix cache hits, and
            changes answers.
        arity: judges of more children of a + than this become a tree of such judges; None: none do.
        retrieve: finds the fragments of an R. R stays where it gives None, or is None.
        call: that of the nearest G around a node.
    """

    sorts_plus: bool = False
    arity: int | None = None
    retrieve: Callable[[Any], Sequence[Query] | None] | None = None
    call: Any = None


@dataclass(frozen=True)
class Rule:
    """A rule of an operator: a node in, what takes its place out, or None where it does not match.

    A rule that changes the order or the prompt is applied only on request.
    """

    name: str
    apply: Callable[[Any, Options], Query | None]
    effect: Effect = Effect.NOTHING


@dataclass(frozen=True)
class Query:
    """A node and all below it. `kind` is its key in JSON.

    `origin` is where the node, or the one that a rule made it from, is in the query as it was written (`with_origins`);
    messages name it. What is known of all that is below a node (its hash, `varies`) is found once, since trees may have
    100,000 nodes.
    """

    kind: ClassVar[str]
    rules: ClassVar[tuple[Rule, ...]] = ()  # in the order in which they are tried
    depth: int = field(init=False, compare=False, repr=False, default=1)
    origin: Path | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        depth = 1 + max((child.depth for child in self.children), default=0)
        if depth > MAX_DEPTH:
            raise InputError(f"the query is nested deeper than {MAX_DEPTH} levels; flatten it")
        object.__setattr__(self, "depth", depth)

    def __init_subclass__(cls) -> None:
        cls.__hash__ = Query.__hash__  # type: ignore[method-assign]  # `dataclass` keeps it; its own walks the tree

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        kind = type(self)
        return hash((kind, *(getattr(self, name) for name in _compared(kind))))  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}  # another process has other ones

    @property
    def symbol(self) -> str:
        """What shapes call it."""
        return self.kind

    @property
    def children(self) -> tuple[Query, ...]:
        """What is directly below it."""
        return tuple(child for _, child in self.steps())

    def steps(self) -> Iterator[tuple[Path, Query]]:
        """Its children, each with the path that leads from this node to it."""
        return iter(())

    def with_children(self, children: Sequence[Query]) -> Self:
        """The same node over other children, as many as it has."""
        assert not children
        return self

    def to_data(self) -> dict[str, Any]:
        """It as spnl's JSON. Sugar that spnl has no word for is written in our own words."""
        raise NotImplementedError(type(self).__name__)

    def run(self, run: Any, path: Path) -> Any:
        """What it gives, messages and joins of them; or a task that gives it.

        Args:
            run: the `RunningQuery` that it is part of. path: where it is in the tree that runs.
        """
        raise NotImplementedError(type(self).__name__)

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of its own that a model reads."""
        return ()

    @property
    def num_calls(self) -> int:
        """Calls of the node itself; those of a repeat less the one that is below it."""
        return 0

    @property
    def is_drawn(self) -> bool:
        """Whether the node itself may give something else each time."""
        return False

    @cached_property
    def varies(self) -> bool:
        """Whether it, or what is below it, may give something else each time."""
        return self.is_drawn or any(child.varies for child in self.children)

    def options_below(self, options: Options) -> Options:
        """What the optimizer may do to its children."""
        return options

    def outputs(self) -> Sequence[Query]:
        """It as children of a + that give what it gives there: a repeat, a map or a par is as many."""
        return (self,)


@dataclass(frozen=True)
class Over(Query):
    """A node over one query, `input`. `key` is that of its input in JSON; None: it is the node's value itself."""

    input: Query
    key: ClassVar[str | None] = "input"

    def steps(self) -> Iterator[tuple[Path, Query]]:
        yield (self.kind,) if self.key is None else (self.kind, self.key), self.input

    def with_children(self, children: Sequence[Query]) -> Self:
        (child,) = children
        return replace(self, input=child)


@cache
def _compared(kind: type[Query]) -> tuple[str, ...]:
    """The names of the fields by which nodes of a kind are equal."""
    return tuple(entry.name for entry in fields(kind) if entry.compare)


def nodes(query: Query, path: Path = ()) -> Iterator[tuple[Path, Query]]:
    """Every node with its path, from the root, each before its children."""
    waiting = [(path, query)]
    while waiting:
        path, node = waiting.pop()
        yield path, node
        waiting += reversed([(path + step, child) for step, child in node.steps()])


def with_origins(query: Query, path: Path = (), checkpoint: Checkpoint = no_checkpoint) -> Query:
    """The same tree, in which every node says where it is; what was read from a file says so already."""
    checkpoint()
    below = [with_origins(child, path + step, checkpoint) for step, child in query.steps()]
    if any(new is not old for new, old in zip(below, query.children, strict=True)):
        query = query.with_children(below)
    return query if query.origin is not None else replace(query, origin=path)


@dataclass(frozen=True)
class AppliedRule:
    """A rule that fired. `path` is that of the node as the tree was then; `before` and `after` are what it was."""

    rule: str
    effect: Effect
    path: Path
    before: Query
    after: Query


def rewrite(
    query: Query, options: Options = Options(), checkpoint: Checkpoint = no_checkpoint
) -> tuple[Query, list[AppliedRule]]:
    """Apply rules to a fixpoint, first match first (Span queries §5.1).

    Args:
        options: what the rules may change. checkpoint: called with every node to which rules are applied.

    Raises:
        InputError: a tree that becomes too deep, or fragments that cannot be read.
    """
    steps: list[AppliedRule] = []

    def apply(node: Query, path: Path, options: Options) -> Query:
        """A node to which no rule applies any more; those below it may still match."""
        checkpoint()
        for rule in node.rules:
            try:
                new = rule.apply(node, options)
            except PicError as error:
                raise InputError(f"{path_text(path if node.origin is None else node.origin)}: {error}") from error
            if new is not None:
                assert new != node, f"{rule.name} gives back what it is given"
                steps.append(AppliedRule(rule.name, rule.effect, path, node, new))
                return apply(new, path, options)
        return node

    def fixpoint(node: Query, path: Path, options: Options) -> Query:
        """A node to which, and below which, no rule applies any more."""
        node = apply(node, path, options)
        below = node.options_below(options)
        children = [fixpoint(child, path + step, below) for step, child in node.steps()]
        if all(new is old for new, old in zip(children, node.children, strict=True)):
            return node
        rewritten = node.with_children(children)
        new = apply(rewritten, path, options)
        return new if new is rewritten else fixpoint(new, path, options)

    return fixpoint(query, (), options), steps


def to_json(query: Query, indent: int | None = None) -> str:
    """`Query.to_data` as text; the same query gives the same text."""
    return json.dumps(query.to_data(), ensure_ascii=False, indent=indent)


def text_of(query: Query) -> str:
    """The texts of messages and joins of them, in their order."""
    return "\n".join(text for _, node in nodes(query) for text in node.texts if text)


def model_name(model: str) -> str:
    """A call's model without its provider, if that is one whose models run here: "NAME" for "spnl/NAME"."""
    provider, slash, rest = model.partition("/")
    return rest if slash and provider in _LOCAL else model


def path_text(path: Path) -> str:
    """A path for messages: `g.input.plus[1]`; of a long one, both ends."""
    texts = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    if len(texts) > 16:
        texts = [*texts[:8], " … ", *texts[-8:]]
    return "".join(texts).lstrip(".") or "the query"
