"""Serialising queries for caches of paged prefixes, as spnl's tokenizer does it, id by id (0.22.1; Span queries §5.2).

Before each child of a + comes padding to the block and PLUS; before the last child of a ⋈ padding and CROSS; nothing
closes. An assistant's text loses the end of its template and is cropped to whole blocks, since the cache holds no more.
The generation prompt comes last, after a PLUS if one is open. A marker that is None is left out, with its padding.

What makes spnl panic is not compatible: a ⋈ without children (it is nothing here), and blocks of 0 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from pictool.errors import InputError
from pictool.spans.query import (
    Cross,
    Generate,
    Join,
    Map,
    Message,
    Path,
    Plus,
    Query,
    Repeat,
    nodes,
    path_text,
)
from pictool.spans.templates import Template, template_of

BLOCK = 16
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Markers:
    """The ids of padding and markers, and the tokens of a block."""

    pad: int
    cross: int | None = None
    plus: int | None = None
    block: int = BLOCK

    def __post_init__(self) -> None:
        if self.block < 1:
            raise InputError(f"blocks of {self.block} tokens: must be 1 or more")


class Tape:
    """Token ids that grow by whole parts, aligned to blocks where a part asks for it."""

    def __init__(self, pad: int, block: int) -> None:
        self.ids: list[int] = []
        self._pad, self._block = pad, block

    def extend(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)

    def pad(self) -> None:
        """Fill the last block."""
        self.ids.extend([self._pad] * (-len(self.ids) % self._block))

    def mark(self, *markers: int) -> None:
        """Markers at the beginning of a block."""
        self.pad()
        self.ids.extend(markers)

    def extend_cropped(self, ids: Sequence[int]) -> None:
        """Those of the ids that fill whole blocks."""
        surplus = (len(self.ids) + len(ids)) % self._block
        self.ids.extend(ids[: max(0, len(ids) - surplus)])


def serialise(query: Generate | Repeat, encode: Encode, markers: Markers) -> list[int]:
    """The prompt of one call whose input is messages and joins only.

    Args:
        encode: token ids of a text, without special tokens.

    Raises:
        InputError: a model without a template, or an input that has to be run first; with the path.
    """
    call = query.input if isinstance(query, Repeat) else query
    require_flat(call.input, (*(("repeat",) if query is not call else ()), "g", "input"))
    writer = _Writer(encode, template_of(call.call.model), markers)
    writer.write(call.input)
    return writer.finish()


def serialise_map(query: Map, encode: Encode, markers: Markers) -> list[list[int]]:
    """The prompts of a map, one an input, each filling its last block."""
    template, prompts = template_of(query.call.model), []
    for text in query.inputs:
        writer = _Writer(encode, template, markers)
        writer.write(Plus((Message("user", text),)))
        writer.tape.pad()
        prompts.append(writer.tape.ids)
    return prompts


def require_flat(query: Query, path: Path = ()) -> None:
    """Refuse what is no message and no join of messages. Raises InputError with the path."""
    for at, node in nodes(query, path):
        if not isinstance(node, Message | Join):
            raise InputError(f"{path_text(at)}: a {node.kind} has to be run before the query is serialised")


class _Writer:
    """Writes one prompt."""

    def __init__(self, encode: Encode, template: Template, markers: Markers) -> None:
        self.tape = Tape(markers.pad, markers.block)
        self._encode, self._template, self._markers = encode, template, markers

    def write(self, query: Query) -> None:
        match query:
            case Message():
                self._message(query)
            case Plus(parts):
                for part in parts:
                    self._mark(self._markers.plus)
                    self.write(part)
            case Cross(parts):
                for index, part in enumerate(parts):
                    if index == len(parts) - 1:
                        self._mark(self._markers.cross)
                    self.write(part)
            case Join(parts):
                for part in parts:
                    self.write(part)

    def finish(self) -> list[int]:
        """The ids with the generation prompt."""
        if self._is_in_plus():
            self._mark(self._markers.plus)
        self.tape.extend(self._encode(self._template.prompt))
        return self.tape.ids

    def _mark(self, marker: int | None) -> None:
        if marker is not None:
            self.tape.mark(marker)

    def _message(self, message: Message) -> None:
        ids = self._encode(self._template.render(message))
        if message.role == "assistant":
            self.tape.extend_cropped(ids[: len(ids) - self._suffix])
        else:
            self.tape.extend(ids)

    @cached_property
    def _suffix(self) -> int:
        """The tokens that follow an assistant's text, as spnl counts them: on "hello", from its first token on."""
        bare, whole = self._encode("hello"), self._encode(self._template.render(Message("assistant", "hello")))
        start = next((index for index, token in enumerate(whole) if token == bare[0]), None)
        return 0 if start is None else len(whole) - start - len(bare)

    def _is_in_plus(self) -> bool:
        """Whether the last marker is a PLUS. As for spnl, both must be in use, and ids of texts count as well."""
        plus, cross = self._markers.plus, self._markers.cross
        if plus is None or cross is None:
            return False
        last = next((token for token in reversed(self.tape.ids) if token in (plus, cross)), None)
        return last == plus and plus != cross
