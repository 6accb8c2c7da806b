"""The nodes of a span query (Span queries §4.1, table 1; and those that spnl has besides), immutable.

| here       | paper | spnl's JSON                         | result                                                    |
|------------|-------|-------------------------------------|-----------------------------------------------------------|
| `Message`  | S U A | `{"user": "…"}`                     | itself                                                    |
| `Seq`      |       | `{"seq": […]}`                      | its children's, run in order                              |
| `Par`      |       | `{"par": […]}`                      | its children's, run side by side                          |
| `Cross`    | ⋈     | `{"cross": […]}`                    | its children's; their order matters                       |
| `Plus`     | +     | `{"plus": […]}`                     | its children's; their order does not matter               |
| `Generate` | G, G¹ | `{"g": {"model", "input", …}}`      | what the model generates, an assistant's message          |
| `Repeat`   |       | `{"repeat": {"n", "g"}}`            | n such messages                                           |
| `Map`      |       | `{"map": {"metadata", "inputs"}}`   | one such message per input                                |
| `Monad`    |       | `{"monad": …}`                      | nothing; it runs for what it leaves in the cache          |
| `Zip`      |       | `{"zip": {"first", "second"}}`      | `first` before each item of `second`                      |
| `Augment`  |       | `{"augment": {…}}`                  | fragments of a document that concern `body`               |
| `Chat`     | C     | ours: `{"chat": {"model", …}}`      | as `Generate` over a ⋈                                    |
| `Retrieve` | R     | ours: `{"retrieve": {…}}`           | fragments of files that concern `query`                   |
| `Fragment` | F     | `{"file": "path"}`                  | a file's text, a user's message                           |
| `Ask`      |       | `{"ask": "…"}`                      | what the user types, a user's message                     |
| `Print`    |       | `{"print": "…"}`                    | nothing; it is shown                                      |

A tree is at most `MAX_DEPTH` deep, and that is checked where a node is made: no function over trees needs a check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, ClassVar, Literal, Self

from pictool.errors import InputError

MAX_DEPTH = 128
DEFAULT_MODEL = "default"  # of calls that leave it to the executor
_LOCAL = ("pic", "spnl", "local")  # providers whose models run here
MAX_TOKENS, TEMPERATURE = 0, 0.6  # of spnl's `g`, where it says nothing
MAX_STOPS, MAX_STOP_BYTES = 16, 4096  # stop strings of a call, and their bytes in all
Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")
Path = tuple[str | int, ...]  # to a node, by keys and indices of its JSON
Checkpoint = Callable[[], None]  # called at every node of a pass over a tree; it may let other work go on, or raise


def no_checkpoint() -> None:
    """A `Checkpoint` that does nothing."""


@dataclass(frozen=True)
class Query:
    """A node and all below it. `kind` is its key in JSON, `symbol` what shapes and pictures call it.

    `origin` is where the node, or the one that a rule made it from, is in the query as it was written (`with_origins`);
    messages name it. What is known of all that is below a node (its hash, `varies`) is found once, since trees may have
    100,000 nodes.
    """

    kind: ClassVar[str]
    symbol: ClassVar[str]
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

    @cached_property
    def varies(self) -> bool:
        """Whether it may give something else each time: a call at a temperature, or a question to somebody."""
        is_drawn = isinstance(self, Generate | Chat | Map) and self.call.temperature not in (0, None)
        return is_drawn or isinstance(self, Ask) or any(child.varies for child in self.children)

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


@dataclass(frozen=True)
class Message(Query):
    """One message of a chat."""

    kind: ClassVar[str] = "message"
    role: Role
    text: str

    @property
    def symbol(self) -> str:  # type: ignore[override]
        return self.role[0].upper()


@dataclass(frozen=True)
class Join(Query):
    """A node with any number of children. See its four classes."""

    parts: tuple[Query, ...]

    def steps(self) -> Iterator[tuple[Path, Query]]:
        return (((self.kind, index), part) for index, part in enumerate(self.parts))

    def with_children(self, children: Sequence[Query]) -> Self:
        return replace(self, parts=tuple(children))


@dataclass(frozen=True)
class Seq(Join):
    """Children that run one after the other."""

    kind: ClassVar[str] = "seq"
    symbol: ClassVar[str] = "seq"


@dataclass(frozen=True)
class Par(Join):
    """Children that run side by side; their order is kept."""

    kind: ClassVar[str] = "par"
    symbol: ClassVar[str] = "par"


@dataclass(frozen=True)
class Cross(Join):
    """⋈: children whose order matters."""

    kind: ClassVar[str] = "cross"
    symbol: ClassVar[str] = "⋈"


@dataclass(frozen=True)
class Plus(Join):
    """+: children that commute."""

    kind: ClassVar[str] = "plus"
    symbol: ClassVar[str] = "+"


@dataclass(frozen=True)
class Call:
    """What a model call asks for beside its input.

    Fields:
        model: as the query names it, perhaps with a provider ("spnl/NAME").
        max_tokens: None or 0: the executor's default. 1 prepares: it fills the cache.
        temperature: None: the executor's default.
        top_p: ours: of sampling; None: the executor's default.
        stop: ours: texts that end the output, at most MAX_STOPS of MAX_STOP_BYTES in all.
    """

    model: str
    max_tokens: int | None = MAX_TOKENS
    temperature: float | None = TEMPERATURE
    top_p: float | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, float) and value.is_integer():  # 0.0 is written as 0, its equal
                object.__setattr__(self, name, int(value))

    def to_data(self) -> dict[str, Any]:
        """Its fields as JSON; of ours those that it has, as spnl knows no others."""
        own = {"top_p": self.top_p, "stop": list(self.stop) or None}
        stated = {name: value for name, value in own.items() if value is not None}
        return {"model": self.model, "max_tokens": self.max_tokens, "temperature": self.temperature, **stated}


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


@dataclass(frozen=True)
class Generate(Over):
    """G: the message that a model generates after its input."""

    kind: ClassVar[str] = "g"
    call: Call

    @property
    def symbol(self) -> str:  # type: ignore[override]
        return "G¹" if self.call.max_tokens == 1 else "G"


@dataclass(frozen=True)
class Chat(Over):
    """C: chat completion, sugar for G over a ⋈ of its messages."""

    kind: ClassVar[str] = "chat"
    symbol: ClassVar[str] = "C"
    call: Call


@dataclass(frozen=True)
class Monad(Over):
    """Runs, and gives nothing."""

    kind: ClassVar[str] = "monad"
    symbol: ClassVar[str] = "M"
    key: ClassVar[str | None] = None


@dataclass(frozen=True)
class Repeat(Over):
    """n outputs of one call."""

    kind: ClassVar[str] = "repeat"
    symbol: ClassVar[str] = "repeat"
    key: ClassVar[str | None] = None
    input: Generate
    n: int


@dataclass(frozen=True)
class Map(Query):
    """One call for each of several users' messages."""

    kind: ClassVar[str] = "map"
    symbol: ClassVar[str] = "map"
    call: Call
    inputs: tuple[str, ...]

    def calls(self) -> Iterator[Generate]:
        """The call of each input."""
        for index, text in enumerate(self.inputs):
            origin = None if self.origin is None else (*self.origin, self.kind, index)
            yield Generate(Message("user", text), self.call, origin=origin)


@dataclass(frozen=True)
class Zip(Query):
    """`first` before each item of `second`."""

    kind: ClassVar[str] = "zip"
    symbol: ClassVar[str] = "zip"
    first: Query
    second: Query

    def steps(self) -> Iterator[tuple[Path, Query]]:
        yield (self.kind, "first"), self.first
        yield (self.kind, "second"), self.second

    def with_children(self, children: Sequence[Query]) -> Self:
        first, second = children
        return replace(self, first=first, second=second)


@dataclass(frozen=True)
class Augment(Over):
    """spnl's retrieval: fragments of one document, given by its name and text, that concern `input`."""

    kind: ClassVar[str] = "augment"
    symbol: ClassVar[str] = "R"
    key: ClassVar[str | None] = "body"
    embedding_model: str
    name: str
    text: str


@dataclass(frozen=True)
class Retrieve(Over):
    """R: the `k` fragments of `sources` that concern `input` most.

    Fields:
        sources: files, or folders of text files; relative to the query's file.
        k: fragments at most; None: all, in the order of the files.
        chunk_tokens: files are cut into fragments of at most so many tokens; None: one fragment a file.
    """

    kind: ClassVar[str] = "retrieve"
    symbol: ClassVar[str] = "R"
    key: ClassVar[str | None] = "query"
    sources: tuple[str, ...]
    k: int | None = None
    chunk_tokens: int | None = None


@dataclass(frozen=True)
class Fragment(Query):
    """F: a fragment of a corpus. `text` is None for a file that is not read yet."""

    kind: ClassVar[str] = "file"
    symbol: ClassVar[str] = "F"
    source: str
    text: str | None = None


@dataclass(frozen=True)
class Ask(Query):
    """A message that the user types when the query runs."""

    kind: ClassVar[str] = "ask"
    symbol: ClassVar[str] = "ask"
    text: str


@dataclass(frozen=True)
class Print(Query):
    """A message that is shown when the query runs."""

    kind: ClassVar[str] = "print"
    symbol: ClassVar[str] = "print"
    text: str


JOINS: tuple[type[Join], ...] = (Seq, Par, Cross, Plus)


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


def shape(query: Query) -> str:
    """The tree without its texts, as figures draw it: `G(⋈(S, +(F, F), U))`."""
    below = ", ".join(shape(child) for child in query.children)
    return f"{query.symbol}({below})" if isinstance(query, Join | Over | Zip) else query.symbol


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


def attributes(query: Query) -> dict[str, object]:
    """The fields of a node that are no queries, a call's among them."""
    found: dict[str, object] = {}
    for entry in fields(query):
        value = getattr(query, entry.name)
        if entry.name == "call":
            found |= value.to_data()
        elif entry.name not in ("depth", "origin") and not isinstance(value, Query) and not isinstance(query, Join):
            found[entry.name] = value
    return found
