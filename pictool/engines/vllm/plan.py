"""From a prompt's token ids and the objects in it to a plan: what stands where, and what has no object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pictool.core import Layout, RowMask, TokenIds
from pictool.errors import InputError
from pictool.linker.policies.base import Policy


@dataclass(frozen=True)
class Span:
    """[start, end) of a prompt that an object gives, or that has none (`key` None) and is computed.

    An object may have more tokens than its span: at least one token of a prompt is left to vLLM.
    """

    start: int
    end: int
    key: str | None


@dataclass(frozen=True)
class Found:
    """An object that stands in a prompt at `start`."""

    key: str
    start: int
    tokens: TokenIds

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class LinkPlan:
    """How a prompt is linked. The spans go from 0 without gaps; the first is the head, perhaps empty.

    `salt` is the request's own: its objects are those of this tenant.
    """

    policy: Policy
    layout: Layout
    spans: tuple[Span, ...]
    salt: str = ""

    @property
    def reach(self) -> int:
        """Tokens that are linked; what stands behind them is vLLM's own."""
        return self.layout.num_context

    @property
    def required(self) -> RowMask:
        """bool [N], the rows that no object gives."""
        rows = np.zeros(self.reach, dtype=bool)
        for span in self.spans:
            rows[span.start : span.end] |= span.key is None
        return rows

    @property
    def parts(self) -> tuple[Span, ...]:
        """The spans that an object gives."""
        return tuple(span for span in self.spans if span.key is not None)


def make_plan(
    policy: Policy, tokens: TokenIds, found: Sequence[Found], head_key: str | None = None, salt: str = ""
) -> LinkPlan:
    """Lay out a prompt in which objects stand.

    Args:
        found: in the order of the prompt.
        head_key: the object of everything before the first of them, if there is one.

    Raises:
        InputError: tokens that are not the object's, objects that overlap, or nothing to link.
    """
    last = len(tokens) - 1
    spans: list[Span] = []
    at = 0
    for one in found:
        _require_fit(one, tokens, at)
        if one.start > at or not spans:
            spans.append(Span(at, one.start, None if spans else head_key))
        spans.append(Span(one.start, min(one.end, last), one.key))
        at = one.end
    if not found or found[0].start >= last:
        raise InputError("kv_transfer_params: no object stands before the last token of the prompt")
    spans = [spans[0], *(span for span in spans[1:] if span.start < span.end)]
    starts = (0, *(span.end for span in spans))
    return LinkPlan(policy, Layout(tokens, starts), tuple(spans), salt)


def locate(key: str, object_tokens: TokenIds, tokens: TokenIds, at: int) -> Found:
    """Where an object stands in a prompt, from position `at` on.

    Raises:
        InputError: nowhere.
    """
    width = tokens.dtype.itemsize
    wanted, data = object_tokens.astype(tokens.dtype).tobytes(), tokens.tobytes()
    place = data.find(wanted, at * width)
    while place >= 0 and place % width:
        place = data.find(wanted, place + 1)
    if place < 0:
        raise InputError(
            f"object {key[:12]}: its {len(object_tokens)} tokens are not in the prompt behind token {at}; "
            "tokenize documents on their own, and join ids"
        )
    return Found(key, place // width, object_tokens)


def _require_fit(one: Found, tokens: TokenIds, at: int) -> None:
    if one.start < at:
        raise InputError(f"object {one.key[:12]}: at token {one.start}, inside the object before it")
    if not np.array_equal(tokens[one.start : one.end], one.tokens):
        raise InputError(f"object {one.key[:12]}: its tokens are not those of the prompt at token {one.start}")
