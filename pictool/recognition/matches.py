"""The tokens of a prompt over which an object is linked, and objects that a request names located in its prompt.

An object is linked over a *match*: the tokens from its first to its last that the prompt has too. At the edges a
tokenizer may have joined some with what surrounds the document; these are computed. Their *text* must be in the prompt
all the same, but for whitespace at the document's ends: the KV of a match was computed after the tokens that are
dropped at its beginning, and must not tell of a text that the prompt has not.

Knows no model: decoding tokens is a function that the caller gives. Every engine uses this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pictool.core import TokenIds
from pictool.errors import InputError
from pictool.recognition.search import MAX_EDGE, HashedTokens, SearchTable, TokenRun, edge_of, run_at

Decode = Callable[[Sequence[int]], str]
_MAX_TRIES = 64  # places of a named object that turn out to be none
_SHARED = 8  # tokens of a match that are decoded with what is dropped beside them, so that no character is cut
_PER_DROPPED = 16  # tokens of a prompt that may have the text of one dropped token (a word in bytes)


@dataclass(frozen=True)
class Match:
    """Tokens of a prompt, from `start` on, that are an object's from its token `offset` on."""

    key: str
    start: int
    tokens: TokenIds
    offset: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @classmethod
    def of(cls, key: str, tokens: TokenIds, run: TokenRun) -> Match:
        """An object of `tokens`, of which a run is in a prompt."""
        return cls(key, run.start, tokens[run.offset : run.offset + run.end - run.start], run.offset)


def find_run(
    prompt: TokenIds, tokens: TokenIds, shift: int, low: int, high: int, decode: Decode, which: int = 0
) -> TokenRun | None:
    """The run within [low, high) of an object whose token 0 would be at `shift`; None if it must not be linked there.

    The interior must be the same tokens, and the dropped edges the same text.
    """
    run = run_at(prompt, tokens, shift, low, high, which)
    if run is None or not (_has_beginning(prompt, tokens, run, decode) and _has_end(prompt, tokens, run, decode)):
        return None
    return run


def _has_beginning(prompt: TokenIds, tokens: TokenIds, run: TokenRun, decode: Decode) -> bool:
    """Whether the text of the tokens before a run is in the prompt before it."""
    if run.offset == 0:
        return True
    shared = min(_SHARED, run.end - run.start)
    text = decode(tokens[: run.offset + shared].tolist()).lstrip()
    before = max(0, run.start - _PER_DROPPED * (run.offset + 1))
    return decode(prompt[before : run.start + shared].tolist()).endswith(text)


def _has_end(prompt: TokenIds, tokens: TokenIds, run: TokenRun, decode: Decode) -> bool:
    """Whether the text of the tokens after a run is in the prompt after it."""
    end = run.offset + run.end - run.start  # in the object
    if end == len(tokens):
        return True
    shared = min(_SHARED, run.end - run.start)
    text = decode(tokens[end - shared :].tolist()).rstrip()
    after = run.end + _PER_DROPPED * (len(tokens) - end + 1)
    return decode(prompt[run.end - shared : after].tolist()).startswith(text)


# Named objects


@dataclass(frozen=True)
class NamedObject:
    """An object that a request names, and its tokens. `start` is where the request says they are, if it does."""

    key: str
    tokens: TokenIds
    start: int | None = None


def locate(named: Sequence[NamedObject], prompt: TokenIds, decode: Decode) -> list[Match]:
    """Find objects in a prompt, in this order. One with a `start` is there, or at most `MAX_EDGE` tokens beside it.

    Raises:
        InputError: an object that the prompt does not have there, or not after the object before it.
    """
    exact = [_exact_match(entry, prompt) for entry in named]
    missing = [entry for entry, match in zip(named, exact, strict=True) if match is None]
    places = _Places(missing, prompt) if missing else None
    matches: list[Match] = []
    for i, entry in enumerate(named):
        match, low = exact[i], matches[-1].end if matches else 0
        if match is None:
            assert places is not None
            high = next((after.start for after in exact[i:] if after is not None), len(prompt))
            match = places.find(entry, low, high, decode)
        matches.append(match)
    return matches


def _exact_match(entry: NamedObject, prompt: TokenIds) -> Match | None:
    """An object that is where the request says, as a whole."""
    if entry.start is None or not np.array_equal(prompt[entry.start : entry.start + len(entry.tokens)], entry.tokens):
        return None
    return Match(entry.key, entry.start, entry.tokens)


class _Places:
    """Where the interiors of named objects are in a prompt."""

    def __init__(self, named: Iterable[NamedObject], prompt: TokenIds) -> None:
        self._prompt = prompt
        self._tokens = {entry.key: entry.tokens for entry in named}
        found = SearchTable.of(list(self._tokens.values())).candidates(HashedTokens(prompt))
        self._shifts = {key: np.sort(found.shift[found.which == i]) for i, key in enumerate(self._tokens)}

    def find(self, entry: NamedObject, low: int, high: int, decode: Decode) -> Match:
        """The first place of an object, or the one next to its `start`, within [low, high).

        Raises:
            InputError: there is none.
        """
        for shift in self._in_order(entry, low):
            run = find_run(self._prompt, entry.tokens, shift, low, high, decode)
            if run is not None:
                return Match.of(entry.key, entry.tokens, run)
        where = f"after token {low}" if entry.start is None else f"at token {entry.start}"
        raise InputError(
            f"object {entry.key[:12]}: its {len(entry.tokens)} tokens are not in the prompt {where}; the prompt must "
            "contain the document's whole text"
        )

    def _in_order(self, entry: NamedObject, low: int) -> list[int]:
        """Where token 0 of an object may be: from `low` on, or the nearest to its `start` first."""
        shifts = self._shifts[entry.key]
        if entry.start is None:
            shifts = shifts[np.searchsorted(shifts, low - edge_of(len(entry.tokens))) :]
        else:
            shifts = shifts[np.argsort(np.abs(shifts - entry.start), kind="stable")]
            shifts = shifts[np.abs(shifts - entry.start) <= MAX_EDGE]
        return [int(shift) for shift in shifts[:_MAX_TRIES]]
