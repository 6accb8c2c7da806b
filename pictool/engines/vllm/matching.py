"""Objects in a prompt: opened by the key that a request names, located by their tokens, or recognised by content."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pictool.core import Target, TokenIds
from pictool.engines.vllm.request import RequestError, UnusableObjectError
from pictool.errors import PicError
from pictool.store.format import ObjectFile, ObjectMeta
from pictool.store.store import Store

KEY_DIGITS = 64
MAX_WINDOW = 64
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Match:
    """An object whose tokens are those of a prompt in [start, end)."""

    key: str
    start: int
    tokens: TokenIds

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def full_key(store: Store, name: object, salt: str) -> str:
    """The key that a request of a tenant names: in full, or abbreviated as in git.

    Raises:
        RequestError: not a key.
        UnusableObjectError: an abbreviation of no object, or of several.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[0-9a-f]+", name) or len(name) > KEY_DIGITS:
        raise RequestError(f"kv_transfer_params: {name!r} is no object key ({KEY_DIGITS} hex digits)")
    try:
        return name if len(name) == KEY_DIGITS else store.resolve(name, salt)
    except (PicError, OSError) as error:
        raise UnusableObjectError(name, error) from error


def open_object(store: Store, target: Target, key: str, salt: str) -> ObjectFile:
    """Open an object by its full key, and check that it is of this salt and model. Of another salt, it is absent.

    It is not marked as used (`Store.mark_used`): the planner does that once for a linked object.

    Raises:
        UnusableObjectError: missing, damaged (header or tokens), foreign, or another object than its name says.
    """
    try:
        file = store.peek(key)
        try:
            if file.meta.key_of(file.tokens(), salt) != key:
                raise store.absent(key)  # so that no tenant learns of another's object
            file.meta.require(target, f"{key[:12]}")
        except BaseException:
            file.close()
            raise
    except (PicError, OSError) as error:
        raise UnusableObjectError(key, error) from error
    return file


def locate(key: str, object_tokens: TokenIds, tokens: TokenIds, start: int) -> Match:
    """Find the first place of an object in a prompt, from position `start` on.

    Raises:
        RequestError: the prompt does not have its tokens.
    """
    width = tokens.dtype.itemsize
    pattern, data = object_tokens.astype(tokens.dtype).tobytes(), tokens.tobytes()
    offset = data.find(pattern, start * width)
    while offset >= 0 and offset % width:
        offset = data.find(pattern, offset + 1)
    if offset < 0:
        raise RequestError(
            f"object {key[:12]}: its {len(object_tokens)} tokens are not in the prompt after token {start}; "
            "tokenize documents on their own, and join ids"
        )
    return Match(key, offset // width, object_tokens)


@dataclass(frozen=True)
class IndexedObject:
    """An object that can be recognised."""

    key: str
    tokens: TokenIds
    meta: ObjectMeta

    def is_of(self, target: Target, salt: str) -> bool:
        """Whether its key is that of its tokens and this tenant's salt."""
        return self.meta.target == target and self.meta.key_of(self.tokens, salt) == self.key


class ContentIndex:
    """Recognises a store's objects in prompts: a rolling hash finds candidates, a comparison of tokens decides.

    An object is hashed over its first 2^i ≤ its length tokens, `MAX_WINDOW` at most, so a prompt is hashed with few
    windows whatever the objects' lengths are.
    """

    def __init__(self, store: Store, target: Target, min_tokens: int) -> None:
        self._store, self._target, self._min_tokens = store, target, min_tokens
        self._objects: dict[str, IndexedObject | None] = {}  # None: in the store, but of no use here
        self._windows: dict[int, dict[int, list[IndexedObject]]] = {}  # by window, then by hash
        self._refreshing = threading.Lock()

    def refresh(self) -> None:
        """Add what is new in the store, and drop what was removed from it. May run in a thread beside `find`."""
        with self._refreshing:
            keys = self._store.keys()
            objects = {key: self._objects[key] if key in self._objects else self._read(key) for key in keys}
            self._objects, self._windows = objects, _by_window(entry for entry in objects.values() if entry is not None)

    def forget(self, key: str) -> None:
        """Drop an object that cannot be used, until the next `refresh` reads it again."""
        with self._refreshing:
            self._objects.pop(key, None)
            self._windows = _by_window(entry for entry in self._objects.values() if entry is not None)

    def find(self, tokens: TokenIds, sinks: int, salt: str = "", dummy: int | None = None) -> list[Match]:
        """The objects of this salt and `sinks` whose tokens are all in a prompt, in its order, without overlaps.

        Longer objects are chosen before shorter ones. `dummy` is the model's own dummy token.
        """
        candidates = [
            Match(entry.key, start, entry.tokens)
            for start, entry in self._candidates(tokens)
            if entry.meta.sinks == sinks
            and (not sinks or entry.meta.dummy == dummy)
            and entry.is_of(self._target, salt)
        ]
        candidates.sort(key=lambda match: (-len(match.tokens), match.start))
        is_taken, matches = np.zeros(len(tokens), dtype=bool), []
        for match in candidates:
            if not is_taken[match.start : match.end].any():
                is_taken[match.start : match.end] = True
                matches.append(match)
        return sorted(matches, key=lambda match: match.start)

    def _candidates(self, tokens: TokenIds) -> Iterator[tuple[int, IndexedObject]]:
        """Every position at which an object's tokens are in the prompt."""
        for window, by_hash in self._windows.items():
            if window > len(tokens):
                continue
            hashes = rolling_hashes(tokens, window)
            known = np.fromiter(by_hash, dtype=np.uint64)
            for start in np.flatnonzero(np.isin(hashes, known)).tolist():
                for entry in by_hash[int(hashes[start])]:
                    if np.array_equal(tokens[start : start + len(entry.tokens)], entry.tokens):
                        yield start, entry

    def _read(self, key: str) -> IndexedObject | None:
        try:
            with self._store.peek(key) as file:
                file.meta.require(self._target, key[:12])
                entry = IndexedObject(key, file.tokens(), file.meta)
                is_block = file.meta.parent is not None
        except PicError:  # another model's, or damaged: a request that names it gets the error
            return None
        return entry if len(entry.tokens) >= self._min_tokens and not is_block else None


def rolling_hashes(tokens: TokenIds, window: int) -> Hashes:
    """The hash of tokens[i : i + window] for every i, uint64 [n - window + 1]; Σ (token + 1) · base^j, modulo 2^64."""
    n = len(tokens)
    sums = np.zeros(n + 1, dtype=np.uint64)
    np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * _powers(_BASE, n), out=sums[1:])
    return (sums[window:] - sums[: n - window + 1]) * _powers(_INVERSE, n - window + 1)


def _powers(base: int, count: int) -> Hashes:
    powers = np.full(count, base, dtype=np.uint64)
    powers[:1] = 1
    return np.multiply.accumulate(powers)


def _by_window(entries: Iterable[IndexedObject]) -> dict[int, dict[int, list[IndexedObject]]]:
    windows: dict[int, dict[int, list[IndexedObject]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        window = min(MAX_WINDOW, 1 << (len(entry.tokens).bit_length() - 1))
        windows[window][int(rolling_hashes(entry.tokens[:window], window)[0])].append(entry)
    return windows
