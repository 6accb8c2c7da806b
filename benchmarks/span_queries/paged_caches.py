"""The paper's serialisation with end tokens and pointers, and simulators of caches over it (Span queries §2, §5.2–5.4).

A prompt is a tuple of symbols: any hashable stands for a token; the special ones are below. OPEN comes before each
child of a +, CLOSE and a pointer after the last one. The pointer is the distance from itself back to the first OPEN of
its +, as figures 10 and 11 have it. With a block size, special tokens come first in a block, and the text of an
assistant is cropped to whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from pictool.errors import InputError
from pictool.spans.operators.joins import Join, Plus
from pictool.spans.operators.messages import Message
from pictool.spans.query import Query, nodes, path_text

Symbol = Hashable
PAD, OPEN, CLOSE = "□", "(", ")"


@dataclass(frozen=True)
class Pointer:
    """How many symbols before itself the sub-tree begins that ends here."""

    distance: int

    def __str__(self) -> str:
        return str(self.distance)


def serialise_with_pointers(
    query: Query, encode: Callable[[Message], Sequence[Symbol]], block: int | None = None
) -> tuple[Symbol, ...]:
    """The symbols of messages and joins; with `block`, after the low-level optimizations of §5.3.

    Args:
        encode: the tokens of a message.

    Raises:
        InputError: a node that has to be run first; with the path.
    """
    for path, node in nodes(query):
        if not isinstance(node, Message | Join):
            raise InputError(f"{path_text(path)}: a {node.kind} has to be run before the query is serialised")
    symbols: list[Symbol] = []
    _write(query, encode, block, symbols)
    return tuple(symbols)


def _write(
    query: Query, encode: Callable[[Message], Sequence[Symbol]], block: int | None, symbols: list[Symbol]
) -> None:
    def pad() -> None:
        symbols.extend([PAD] * (-len(symbols) % block if block else 0))

    match query:
        case Message():
            tokens = list(encode(query))
            surplus = (len(symbols) + len(tokens)) % block if block and query.role == "assistant" else 0
            symbols.extend(tokens[: max(0, len(tokens) - surplus)])
        case Plus(parts) if parts:
            pad()
            start = len(symbols)
            for part in parts:
                pad()
                symbols.append(OPEN)
                _write(part, encode, block, symbols)
            pad()
            symbols.extend((CLOSE, Pointer(len(symbols) + 1 - start)))
        case Join(parts):
            for part in parts:
                _write(part, encode, block, symbols)


@dataclass
class PrefixCache:
    """A cache of whole blocks, each known by all that precedes it (§2): what an inference server has today."""

    block: int
    _known: set[Hashable] = field(default_factory=set)

    def request(self, prompt: Sequence[Symbol], output: Sequence[Symbol] = ()) -> int:
        """How many tokens of a prompt are cached; then the whole blocks of prompt and output are.

        The scan ends at the first miss.
        """
        keys = list(self._keys(prompt))
        hits = next((index for index, key in enumerate(keys) if key not in self._known), len(keys))
        self._known.update(self._keys([*prompt, *output]))
        return hits * self.block

    def _keys(self, symbols: Sequence[Symbol]) -> Iterable[Hashable]:
        parent = 0
        for start in range(0, len(symbols) - self.block + 1, self.block):
            parent = hash((parent, tuple(symbols[start : start + self.block])))
            yield parent


class SpanCache(PrefixCache):
    """The same over serialised queries: a block that begins with OPEN does not depend on what precedes it (§5.4).

    What follows a CLOSE depends on all that precedes it, in its order; so what it finds is exact but for the spans'
    own independence.
    """

    def _keys(self, symbols: Sequence[Symbol]) -> Iterable[Hashable]:
        whole = parent = 0
        is_inside = False
        for start in range(0, len(symbols) - self.block + 1, self.block):
            tokens = tuple(symbols[start : start + self.block])
            whole = hash((whole, tuple(token for token in tokens if not isinstance(token, Pointer))))
            is_inside = tokens[0] == OPEN or (is_inside and tokens[0] != CLOSE)
            if tokens[0] == OPEN:
                parent = 0
            parent = hash((parent, tokens)) if is_inside else whole
            yield parent


@dataclass
class ObjectCache:
    """A cache of whole spans at token granularity: what linking objects has. Neither order nor blocks matter."""

    _known: set[Hashable] = field(default_factory=set)

    def request(self, spans: Sequence[Sequence[Symbol]], output: Sequence[Symbol] = ()) -> int:
        """How many tokens of a prompt's spans are cached; then they are, and the output is."""
        hits = sum(len(span) for span in spans if tuple(span) in self._known)
        self._known.update(tuple(span) for span in (*spans, output) if span)
        return hits


def count_tokens(symbols: Sequence[Symbol]) -> int:
    """How many symbols stand for tokens of the query: no padding, marker or pointer."""
    return sum(symbol not in (PAD, OPEN, CLOSE) and not isinstance(symbol, Pointer) for symbol in symbols)
