"""Exact prefixes: KV of earlier requests in blocks, each keyed by all that precedes it (docs/design.md §2, rule 12).

The key of a block is a hash of its parent's key and its tokens; the first parent is the tenant's salt. A part that is
linked enters the keys of the blocks that it is in, with its policy, and so those of all later ones. Such a block has no
KV here: the part's object has it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pictool.core import Layout, RowMask
from pictool.errors import ObjectError

if TYPE_CHECKING:
    from torch import Tensor

    from pictool.linker.policies.base import Policy
    from pictool.linker.resolve import Part
    from pictool.runtime.model import Model
    from pictool.store.memory import LayerMemory
    from pictool.store.store import Store

BLOCK = 16  # tokens
LARGE = 32  # blocks, from which on a piece grows no more: pieces are moved and evicted as a whole

Key = bytes  # of a block; empty for one that a linked part is in


class PrefixLostError(ObjectError):
    """A prefix that was found is not in the pool any more."""


@dataclass(frozen=True)
class LinkedSpan:
    """Tokens [start, end) of a prompt that are linked; `origin` tells from what, and under which policy."""

    start: int
    end: int
    origin: bytes


def linked_spans(model: Model, policy: Policy, parts: Sequence[Part], layout: Layout) -> list[LinkedSpan]:
    """The parts of a prompt, head and chunks, that a policy links."""
    if not policy.needs.objects:
        return []
    spans = zip(parts, (layout.head, *layout.chunks), strict=True)
    return [
        LinkedSpan(start, end, json.dumps([policy.name, policy.params, part.keys(model), part.offset]).encode())
        for part, (start, end) in spans
        if part.has_object and start < end
    ]


class BlockChain:
    """The keys of the whole blocks of a sequence of tokens that grows.

    Args:
        limit: the tokens from here on have no keys.
    """

    def __init__(self, salt: str, spans: Sequence[LinkedSpan] = (), limit: int | None = None) -> None:
        self.keys: list[Key] = []
        self._parent = hashlib.sha256(salt.encode(errors="surrogatepass")).digest()
        self._spans, self._limit, self._rest = list(spans), limit, np.zeros(0, dtype="<i4")

    def copy(self) -> BlockChain:
        other = copy(self)
        other.keys, other._spans = [*self.keys], [*self._spans]
        return other

    def link(self, span: LinkedSpan) -> None:
        """Link a part that begins where the tokens end."""
        self._spans.append(span)

    def extend(self, tokens: Iterable[int]) -> BlockChain:
        """Add tokens at the end."""
        added = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), dtype="<i4")
        data = np.concatenate([self._rest, added])
        whole = len(data) - len(data) % BLOCK
        for at in range(0, whole, BLOCK):
            if not self._spans and self._limit is None:
                self._parent = hashlib.sha256(self._parent + data[at : at + BLOCK].tobytes()).digest()
                self.keys.append(self._parent)
                continue
            end = (len(self.keys) + 1) * BLOCK
            if self._limit is not None and end > self._limit:
                self._limit = 0
                break
            while self._spans and self._spans[0].end <= end - BLOCK:
                del self._spans[0]
            digest = hashlib.sha256(self._parent + data[at : at + BLOCK].tobytes())
            within = [span for span in self._spans if span.start < end]
            for span in within:
                digest.update(b"%d %d " % (span.start, span.end) + span.origin)
            self._parent = digest.digest()
            self.keys.append(b"" if within else self._parent)
        self._rest = data[whole:]
        return self


@dataclass(eq=False)
class PrefixPiece:
    """Consecutive blocks of a chain in consecutive slots from `start` on; `first` is the number of the first one.

    `used` is when it was used last. A held one is in the region of an image, and stays as long as that.
    """

    keys: list[Key]
    first: int
    start: int
    used: int
    is_held: bool = False

    @property
    def length(self) -> int:
        return len(self.keys) * BLOCK

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def is_large(self) -> bool:
        return len(self.keys) >= LARGE

    def slot(self, block: int) -> int:
        """Where block `block` of its chain is."""
        return self.start + (block - self.first) * BLOCK


@dataclass(frozen=True)
class FoundRun:
    """Blocks of a prompt from number `first` on, in consecutive slots from `slot` on; None: in host memory.

    `saved` are those from there, once they are to be loaded.
    """

    first: int
    slot: int | None
    keys: tuple[Key, ...]
    saved: Sequence[Tensor] = ()

    @property
    def position(self) -> int:
        return self.first * BLOCK

    @property
    def length(self) -> int:
        return len(self.keys) * BLOCK


@dataclass(frozen=True)
class FoundPrefix:
    """What a prompt reuses of earlier ones.

    Fields:
        chain: of the prompt as it will be linked; it grows by the answer.
        keys: of the blocks that were found, and those of linked parts between them.
        exact_end: where the exact prefix ends.
        computed: where parts begin that are not linked, for an earlier prompt computed them.
        rows: bool [n], those that are reused. restored: tokens [start, end) of the exact ones that are read from disk.
    """

    chain: BlockChain
    keys: tuple[Key, ...]
    exact_end: int
    computed: frozenset[int]
    rows: RowMask
    restored: tuple[int, int] = (0, 0)

    @property
    def num_tokens(self) -> int:
        """Those that are in the pool, or that it saved in host memory."""
        return int(self.rows.sum())

    @property
    def exact_rows(self) -> RowMask:
        """bool [n], those that are reused or read."""
        rows = self.rows.copy()
        rows[slice(*self.restored)] = True
        return rows

    @property
    def spans(self) -> list[tuple[int, int]]:
        """`exact_rows` as tokens [start, end)."""
        borders = np.flatnonzero(np.diff(self.exact_rows, prepend=False, append=False))
        return [(start, end) for start, end in borders.reshape(-1, 2).tolist()]


@dataclass(frozen=True, eq=False)
class SavedBlocks:
    """Blocks of one pool that were evicted to host memory; None: to nowhere."""

    memory: LayerMemory | None

    def __contains__(self, key: Key) -> bool:
        return self.memory is not None and self.memory.has((self, key))

    def put(self, keys: Sequence[Key], blocks: Sequence[Tensor]) -> None:
        assert self.memory is not None
        for key, block in zip(keys, blocks, strict=True):
            self.memory.put((self, key), len(block), block)

    def take(self, keys: Sequence[Key]) -> list[Tensor]:
        """The blocks. Raises PrefixLostError."""
        assert self.memory is not None
        return [self.memory.get((self, key), 0, _lost) for key in keys]


def _lost() -> Tensor:
    raise PrefixLostError


@dataclass
class PrefixIndex:
    """Which slots of a pool have which blocks, and which ones are `saved`."""

    saved: SavedBlocks
    pieces: list[PrefixPiece] = field(default_factory=list)
    _by_key: dict[Key, list[PrefixPiece]] = field(default_factory=dict)

    def add(self, piece: PrefixPiece) -> PrefixPiece:
        self.pieces.append(piece)
        self._list(piece, piece.keys)
        return piece

    def grow(self, piece: PrefixPiece, keys: Sequence[Key]) -> None:
        """Add blocks that follow on a piece."""
        piece.keys += keys
        self._list(piece, keys)

    def remove(self, piece: PrefixPiece) -> None:
        self.pieces.remove(piece)
        for key in piece.keys:
            self._by_key[key].remove(piece)
            if not self._by_key[key]:
                del self._by_key[key]

    def split(self, piece: PrefixPiece, sizes: Sequence[int]) -> list[PrefixPiece]:
        """Make several pieces of one, of so many blocks each."""
        self.remove(piece)
        parts, at = [], 0
        for size in sizes:
            keys = piece.keys[at : at + size]
            parts.append(
                self.add(PrefixPiece(keys, piece.first + at, piece.start + at * BLOCK, piece.used, piece.is_held))
            )  # fmt: skip
            at += size
        return parts

    def has(self, keys: Iterable[Key]) -> bool:
        """Whether all these blocks are in the pool."""
        return all(key in self._by_key for key in keys)

    def knows(self, keys: Iterable[Key]) -> bool:
        """Whether all these blocks are in the pool or saved."""
        return all(key in self._by_key or key in self.saved for key in keys)

    def find(self, keys: Sequence[Key]) -> list[FoundRun]:
        """Where the blocks of a chain are, up to the first that is nowhere."""
        runs: list[tuple[int, int | None, list[Key]]] = []
        block = 0
        while block < len(keys):
            if not keys[block]:
                block += 1
                continue
            slot: int | None = None
            if found := self._by_key.get(keys[block]):
                piece = min(found, key=lambda each: each.is_held)
                there, slot = piece.keys[block - piece.first :], piece.slot(block)
                pairs = zip(keys[block : block + len(there)], there, strict=False)
                same = [key for key, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
            elif keys[block] in self.saved:
                same = [keys[block]]
            else:
                break
            if runs and runs[-1][:2] == (block - len(runs[-1][2]), _before(slot, len(runs[-1][2]))):
                runs[-1][2].extend(same)
            else:
                runs.append((block, slot, same))
            block += len(same)
        return [FoundRun(first, slot, tuple(listed)) for first, slot, listed in runs]

    def find_prefix(
        self, salt: str, layout: Layout, spans: Sequence[LinkedSpan], is_local: bool, on_disk: int = 0
    ) -> FoundPrefix:  # fmt: skip
        """The longest exact prefix of a prompt, and what follows in an earlier one that linked no other parts.

        Args:
            spans: what is linked, in the order of the prompt.
            is_local: as of `Needs`.
            on_disk: tokens at the beginning that are there.
        """
        most = (layout.num_tokens - 1) // BLOCK  # blocks: the last token is always computed
        chain = BlockChain(salt).extend(layout.tokens)
        runs = self.find(chain.keys[:most])
        in_pool = runs[-1].position + runs[-1].length if runs else 0
        end = max(in_pool, min(on_disk // BLOCK, most) * BLOCK)
        cut = next((span for span in spans if span.start < end < span.end), None)
        if cut is not None:  # it is linked as a whole; one before it that ends in the same block is not
            end = cut.start // BLOCK * BLOCK
        linked = [span for span in spans if span.start >= end]
        if linked and is_local:
            chain, linked = self._chain(salt, layout, linked)
        elif linked:
            chain = BlockChain(salt, linked, linked[0].start).extend(layout.tokens)
        rows, last = np.zeros(layout.num_tokens, dtype=bool), 0
        for run in self.find(chain.keys[:most]) if linked else runs:
            last = run.first + len(run.keys)
            rows[run.position : last * BLOCK] = True
        computed = frozenset(span.start for span in spans) - {span.start for span in linked}
        return FoundPrefix(chain, tuple(chain.keys[:last]), end, computed, rows, (min(in_pool, end), end))

    def _chain(self, salt: str, layout: Layout, spans: Sequence[LinkedSpan]) -> tuple[BlockChain, list[LinkedSpan]]:
        """The chain of a prompt that links the first of the spans, and of the others those that an earlier prompt with
        the same chain up to there did not compute."""
        chain, at, linked = BlockChain(salt), 0, list[LinkedSpan]()
        for span in spans:
            chain.extend(layout.tokens[at : span.start])
            tokens, at = layout.tokens[span.start : span.end], span.end
            other = chain.copy() if linked else None
            if other is not None and self.knows(filter(None, other.extend(tokens[:BLOCK]).keys[len(chain.keys) :])):
                added = [key for key in other.extend(tokens[BLOCK:]).keys[len(chain.keys) :] if key]
                if added and self.knows(added):
                    chain = other
                    continue
            chain.link(span)
            chain.extend(tokens)
            linked.append(span)
        return chain.extend(layout.tokens[at:]), linked

    def _list(self, piece: PrefixPiece, keys: Sequence[Key]) -> None:
        for key in keys:
            self._by_key.setdefault(key, []).append(piece)


def _before(slot: int | None, blocks: int) -> int | None:
    """The slot so many blocks before one."""
    return None if slot is None else slot - blocks * BLOCK


@dataclass(frozen=True)
class PoolCounts:
    """Of a pool, since it was made.

    Fields:
        resident_bytes: of the objects in it, now. prefix_bytes: of what was computed for prompts and answers, now.
        moves: runs that were moved. loaded_bytes: KV of objects that links copied from the host. evicted_bytes: of
            objects and prefixes that gave way to others. saved_bytes, restored_bytes: of prefixes that were copied to
            host memory when they were evicted, and back.
    """

    resident_bytes: int = 0
    moves: int = 0
    loaded_bytes: int = 0
    prefix_bytes: int = 0
    evicted_bytes: int = 0
    saved_bytes: int = 0
    restored_bytes: int = 0


class Prefixes(Protocol):
    """Where exact prefixes stay from prompt to prompt: a pool on the device, or contexts of llama.cpp.

    Attributes:
        keeps_prefixes: whether they do. kept: where they are on disk, too. counts: what was done until now.
    """

    @property
    def keeps_prefixes(self) -> bool: ...

    @property
    def kept(self) -> Store | None: ...

    @property
    def counts(self) -> PoolCounts: ...

    def find_prefix(
        self, salt: str, layout: Layout, spans: Sequence[LinkedSpan], is_local: bool, on_disk: int = 0
    ) -> FoundPrefix:  # fmt: skip
        """What a prompt reuses of earlier ones (`PrefixIndex.find_prefix`). It may be lost until it is taken."""
