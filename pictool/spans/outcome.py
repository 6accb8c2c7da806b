"""What a query gives: its result, what each of its calls did, or the node that failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pictool.errors import PicError
from pictool.spans.query import Path, Query, path_text
from pictool.spans.retrieve import query_text

if TYPE_CHECKING:
    from pictool.engines.base import Answer


class QueryError(PicError):
    """A node that failed: its path and why. `done` is what was done until then."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path_text(path)}: {problem}")
        self.path = path
        self.done: tuple[CallRecord, ...] = ()


@dataclass(frozen=True)
class CallRecord:
    """What one call did.

    Fields:
        text, tokens: what it generated; without the end token.
        is_shared: an equal call had been run, whose answer this is.
        own: the answer's report.
        spans: `[start, end)` of the head, each document and the tail in its prompt.
        object: the key of its generated object; empty if there is none.
        is_exact: whether it is what full recompute of its prompt gives: nothing was reused but prefixes, or every row
            of the context was computed.
    """

    path: Path
    text: str
    tokens: tuple[int, ...]
    own: Mapping[str, Any]
    spans: tuple[tuple[int, int], ...]
    seconds: float = 0.0
    is_shared: bool = False
    object: str = ""
    is_exact: bool = True

    @classmethod
    def of(cls, path: Path, answer: Answer) -> CallRecord:
        """The record of an answer. It holds no KV."""
        model, generated, layout = answer.loaded, answer.generated, answer.link.layout
        tokens = generated.tokens
        if tokens and tokens[-1] in model.eos_ids:
            tokens = tokens[:-1]
        if str(model.tokenizer.decode(list(tokens))) != generated.text:  # a stop string, or special tokens within
            tokens = model.encode(generated.text)
        spans = (layout.head, *layout.chunks, layout.tail)
        reuses = answer.link.policy.needs.objects and bool(layout.chunks)  # a head alone is a prefix
        is_exact = not reuses or answer.link.recomputed >= layout.num_context
        return cls(path, generated.text, tokens, answer.report(), spans, is_exact=is_exact)

    def report(self) -> dict[str, Any]:
        """As `pic query --json` has it: the answer's own report, with the path and the spans of the prompt."""
        spans = [list(span) for span in self.spans]
        more = {
            "path": path_text(self.path),
            "shared": self.is_shared,
            "exact": self.is_exact,
            "seconds": self.seconds,
            "spans": spans,
        }
        return more | {"object": self.object or None} | dict(self.own)


@dataclass(frozen=True)
class Result:
    """What a query gave: messages and joins, and what every call did, in the order in which they ended."""

    query: Query
    done: tuple[CallRecord, ...]

    @property
    def text(self) -> str:
        """The texts of the messages."""
        return query_text(self.query).strip()
