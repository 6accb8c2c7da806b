"""The plan of a linked prompt whose token ids are given: which spans of it objects give, and which are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pictool.core import Layout, RowMask, TokenIds
from pictool.errors import InputError
from pictool.linker.policies.base import Policy
from pictool.recognition.matches import Match


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of a prompt. Their KV comes from the object `key`, from its token `offset` on.

    Without a key they are computed. An object may have more tokens, before its span and after it.
    """

    start: int
    end: int
    key: str | None
    offset: int = 0

    @property
    def part(self) -> slice:
        """Which of the object's tokens these are."""
        return slice(self.offset, self.offset + self.end - self.start)


@dataclass(frozen=True)
class LinkPlan:
    """How a prompt is linked. The spans go from 0 without gaps; the first is the head, perhaps empty.

    `salt` is the request's own: its objects are those of this tenant.
    """

    policy: Policy
    layout: Layout
    spans: tuple[Span, ...]
    salt: str = field(default="", repr=False)

    @property
    def num_context(self) -> int:
        """Tokens that are linked; those after them are computed."""
        return self.layout.num_context

    @property
    def required(self) -> RowMask:
        """bool [N], the rows without an object, which every policy computes."""
        rows = np.zeros(self.num_context, dtype=bool)
        for span in self.spans:
            rows[span.start : span.end] |= span.key is None
        return rows

    @property
    def object_spans(self) -> tuple[Span, ...]:
        """The spans that have an object."""
        return tuple(span for span in self.spans if span.key is not None)


def make_plan(
    policy: Policy, tokens: TokenIds, matches: Sequence[Match], head_key: str | None = None, salt: str = ""
) -> LinkPlan:
    """Lay out a prompt around the objects in it.

    Args:
        matches: in the order of the prompt.
        head_key: the object of all tokens before the first match, if there is one.

    Raises:
        InputError: tokens that are not the object's, objects that overlap, or nothing to link.
    """
    last = len(tokens) - 1
    spans: list[Span] = []
    end = 0
    for match in matches:
        _require_fit(match, tokens, end)
        if match.start > end or not spans:
            spans.append(Span(end, match.start, None if spans else head_key))
        spans.append(Span(match.start, min(match.end, last), match.key, match.offset))
        end = match.end
    if not matches or matches[0].start >= last:
        raise InputError("no object starts before the last token of the prompt")
    spans = [spans[0], *(span for span in spans[1:] if span.start < span.end)]
    starts = (0, *(span.end for span in spans))
    return LinkPlan(policy, Layout(tokens, starts), tuple(spans), salt)


def plan_without_objects(policy: Policy, tokens: TokenIds, salt: str = "") -> LinkPlan:
    """The plan of a prompt in which no object is: all tokens but the last one are its head.

    Raises:
        InputError: a prompt without tokens.
    """
    if not len(tokens):
        raise InputError("the prompt has no tokens; nothing to answer")
    last = len(tokens) - 1
    return LinkPlan(policy, Layout(tokens, (0, last)), (Span(0, last, None),), salt)


def _require_fit(match: Match, tokens: TokenIds, end: int) -> None:
    if match.start < end:
        raise InputError(f"object {match.key[:12]}: starts at token {match.start}, inside the object before it")
    if not np.array_equal(tokens[match.start : match.end], match.tokens):
        raise InputError(f"object {match.key[:12]}: its tokens do not match the prompt at token {match.start}")
