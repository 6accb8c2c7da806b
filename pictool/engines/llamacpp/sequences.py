"""Exact prefixes on llama.cpp: what prompts and answers computed stays in contexts, and in host memory.

A prompt that begins like an earlier one goes on in that one's context, if nobody uses it and half of what it has goes
on; what is after the common beginning is removed there. Else it gets a context of its own, and a copy of what it shares
with others, from where that is. Two contexts wait for the next prompts, each with what it computed. One that makes room
gives that to host memory, in the blocks of `prefixes.py`.

A context has one prompt: of several in one, which llama.cpp allows, each token would attend over the cells of all.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from pictool.core import Layout
from pictool.engines.llamacpp.state import LayerRows, StateFormat, read_rows
from pictool.linker.prefixes import (
    BLOCK,
    LARGE,
    BlockChain,
    FoundPrefix,
    FoundRun,
    Key,
    LinkedSpan,
    PoolCounts,
    PrefixIndex,
    PrefixLostError,
    PrefixPiece,
    SavedBlocks,
)
from pictool.runtime.memory.image import GROWTH
from pictool.store.memory import LayerMemory

if TYPE_CHECKING:
    from pictool.engines.llamacpp.contexts import Contexts
    from pictool.engines.llamacpp.library import LlamaContext
    from pictool.store.store import Store

_WAITING = 2  # contexts
_SPAN = 1 << 40  # the slots of a sequence in the index, more than any has tokens


@dataclass(eq=False)
class PromptSequence:
    """Sequence 0 of a context: a prompt, and the tokens that were appended to it.

    Fields:
        valid: tokens from the beginning whose KV is right, whatever became of the link.
        chain: the keys of its blocks; None: nobody finds them.
        number: tells it apart in the index, whose `pieces` are its blocks.
    """

    context: LlamaContext
    valid: int = 0
    chain: BlockChain | None = None
    number: int = 0
    appended: list[int] = field(default_factory=list)
    pieces: list[PrefixPiece] = field(default_factory=list)

    @property
    def keys(self) -> list[Key]:
        """Of the blocks that it has."""
        return [] if self.chain is None else self.chain.keys[: self.valid // BLOCK]


@dataclass(frozen=True)
class KeptRows:
    """Consecutive tokens of a prompt from `start` on that an earlier one computed."""

    start: int
    layers: list[LayerRows]
    distance: ClassVar[int] = 0

    @property
    def rows(self) -> NDArray[np.int64]:
        return np.arange(self.start, self.start + len(self.layers[0][0]))

    @property
    def positions(self) -> NDArray[np.int32]:
        return self.rows.astype(np.int32)

    def read(self, _: StateFormat, layer: int) -> tuple[LayerRows, int]:
        """The rows of a layer, and the bytes that are read from objects for them."""
        return self.layers[layer], 0


class KeptSequences:
    """What prompts and answers computed, in `max_bytes` of host memory at most beside the contexts. Thread-safe.

    Args:
        kept: where exact prefixes are on disk.
    """

    keeps_prefixes: ClassVar[bool] = True

    def __init__(self, contexts: Contexts, max_bytes: int, kept: Store | None = None) -> None:
        self._contexts, self.kept = contexts, kept
        self._memory = LayerMemory(max_bytes)
        self._index = PrefixIndex(SavedBlocks(self._memory))
        self._waiting = list[PromptSequence]()  # the least recently used first
        self._by_number = dict[int, PromptSequence]()  # those with pieces
        self._ended = deque[PromptSequence]()  # whose images exist no more
        self._numbers = itertools.count(1)
        self._saved_bytes = self._restored_bytes = 0
        self._lock = threading.RLock()

    @property
    def counts(self) -> PoolCounts:
        there = sum(piece.length for piece in [*self._index.pieces]) * self._contexts.format.token_bytes
        saved, held = self._saved_bytes, self._memory.num_bytes
        return PoolCounts(
            prefix_bytes=there + held, evicted_bytes=saved - held, saved_bytes=saved,
            restored_bytes=self._restored_bytes,
        )  # fmt: skip

    def find_prefix(
        self, salt: str, layout: Layout, spans: Sequence[LinkedSpan], is_local: bool, on_disk: int = 0
    ) -> FoundPrefix:  # fmt: skip
        """What a prompt reuses of earlier ones (`PrefixIndex.find_prefix`). It may be lost until it is taken."""
        with self._lock:
            self._settle()
            return self._index.find_prefix(salt, layout, spans, is_local, on_disk)

    def take(
        self, found: FoundPrefix, num_tokens: int, num_sequences: int, may_stay: bool
    ) -> tuple[PromptSequence, list[KeptRows]]:
        """A sequence in which the beginning of a prompt is, and copies of what else was found of it.

        Args:
            num_tokens: of the prompt. num_sequences: that its context needs.
            may_stay: KV may be where it is; else all is copied.

        Raises:
            PrefixLostError: something is not there any more. ModelError: there is no memory for a context.
        """
        with self._lock:
            self._settle()
            going_on = self._going_on(found.keys, num_tokens, num_sequences) if may_stay else None
            shared = 0 if going_on is None else _num_shared(going_on.keys, found.keys)
            kept = self._copies(found, shared)
            if going_on is None:
                sequence = PromptSequence(self._context(num_tokens, num_sequences), number=next(self._numbers))
            else:
                sequence = going_on
                self._waiting.remove(sequence)
                self._save(sequence, shared)
                sequence.context.remove(0, shared * BLOCK, -1)
            sequence.valid, sequence.chain = shared * BLOCK, found.chain
            self._list(sequence, is_held=True)
            return sequence, kept

    def share(self, sequence: PromptSequence) -> None:
        """Let other prompts find what a sequence has, now that it is linked."""
        with self._lock:
            self._list(sequence, is_held=True)

    def give_back(self, sequence: PromptSequence) -> None:
        """The image of a sequence exists no more; called by any thread."""
        self._ended.append(sequence)

    def _settle(self) -> None:
        """Sequences whose images exist no more wait for the next prompts."""
        while self._ended:
            sequence = self._ended.popleft()
            if not sequence.valid or sequence.chain is None:
                self._unlist(sequence)
                self._contexts.give_back(sequence.context)
                continue
            sequence.context.remove(0, sequence.valid, -1)
            for other in range(1, sequence.context.num_sequences):
                sequence.context.remove(other)
            sequence.chain.extend(sequence.appended)
            sequence.appended.clear()
            self._list(sequence)
            self._waiting.append(sequence)
        while len(self._waiting) > _WAITING:
            self._release().close()

    def _going_on(self, keys: Sequence[Key], num_tokens: int, num_sequences: int) -> PromptSequence | None:
        """The waiting sequence in whose context a prompt goes on."""
        fitting = [
            each
            for each in self._waiting
            if each.context.num_cells >= num_tokens + GROWTH and each.context.num_sequences >= num_sequences
        ]
        best = max(fitting, key=lambda each: _num_shared(each.keys, keys), default=None)
        if best is None or 2 * _num_shared(best.keys, keys) * BLOCK < best.valid:
            return None
        return best

    def _context(self, num_tokens: int, num_sequences: int) -> LlamaContext:
        """An empty context, with room for a conversation: a new one, or that of the sequence used longest ago."""
        if len(self._waiting) >= _WAITING:
            self._contexts.give_back(self._release())
        most = max(self._contexts.facts.positions, num_tokens + GROWTH)
        return self._contexts.take(min(most, num_tokens + max(GROWTH, num_tokens // 2)), num_sequences)

    def _release(self) -> LlamaContext:
        """Give the KV of the sequence that was used longest ago to host memory. Returns its context."""
        sequence = self._waiting.pop(0)
        self._save(sequence)
        return sequence.context

    # Blocks

    def _list(self, sequence: PromptSequence, is_held: bool = False) -> None:
        self._unlist(sequence)
        self._by_number[sequence.number] = sequence
        for has_kv, group in itertools.groupby(enumerate(sequence.keys), key=lambda pair: bool(pair[1])):
            if has_kv:
                numbers, keys = zip(*group, strict=True)
                start = sequence.number * _SPAN + numbers[0] * BLOCK
                piece = PrefixPiece([*keys], numbers[0], start, sequence.number, is_held)
                sequence.pieces.append(self._index.add(piece))

    def _unlist(self, sequence: PromptSequence) -> None:
        for piece in sequence.pieces:
            self._index.remove(piece)
        sequence.pieces.clear()
        self._by_number.pop(sequence.number, None)

    def _save(self, sequence: PromptSequence, first: int = 0) -> None:
        """Copy the blocks from number `first` on that are nowhere else to host memory; nobody finds them here."""
        pieces = [*sequence.pieces]
        self._unlist(sequence)
        for piece in pieces:
            lost = [
                (piece.first + at, key)
                for at, key in enumerate(piece.keys)
                if piece.first + at >= first and not self._index.knows([key])
            ]
            for number, keys in _runs(lost):
                rows = self._read(sequence, number * BLOCK, (number + len(keys)) * BLOCK)
                for key, block in zip(keys, to_blocks(rows, len(keys)), strict=True):
                    self._memory.put((self._index.saved, key), len(block), block)
                    self._saved_bytes += len(block)

    def _copies(self, found: FoundPrefix, first: int) -> list[KeptRows]:
        """What was found of a prompt from block `first` on. Raises PrefixLostError: not all of it is there."""
        runs = self._index.find(found.keys)
        if sum(run.length for run in runs) != found.num_tokens:
            raise PrefixLostError
        return [self._copy(run, max(run.first, first)) for run in runs if run.first + len(run.keys) > first]

    def _copy(self, run: FoundRun, first: int) -> KeptRows:
        """The blocks of a run from number `first` on."""
        start, end = first * BLOCK, run.position + run.length
        if run.slot is not None:
            return KeptRows(start, self._read(self._by_number[run.slot // _SPAN], start, end))
        blocks = self._index.saved.take(run.keys[first - run.first :])
        self._restored_bytes += sum(map(len, blocks))
        return KeptRows(start, from_blocks(self._contexts.format, blocks))

    def _read(self, sequence: PromptSequence, start: int, end: int) -> list[LayerRows]:
        return read_rows(sequence.context, self._contexts.format, self._contexts.facts.window, start, end)


def _num_shared(ours: Sequence[Key], theirs: Sequence[Key]) -> int:
    """How many blocks from the beginning are the same; blocks of linked parts are if a later one is."""
    same = [a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))]
    while same and not same[-1]:
        same.pop()
    return len(same)


def _runs(blocks: Sequence[tuple[int, Key]]) -> Iterator[tuple[int, list[Key]]]:
    """Consecutive blocks, `LARGE` at most, by the number of the first."""
    for _, group in itertools.groupby(enumerate(blocks), key=lambda pair: pair[1][0] - pair[0]):
        run = [block for _, block in group]
        for at in range(0, len(run), LARGE):
            yield run[at][0], [key for _, key in run[at : at + LARGE]]


def to_blocks(layers: Sequence[LayerRows], count: int) -> list[torch.Tensor]:
    """Rows of so many blocks as the bytes of each."""
    parts = [part.reshape(count, BLOCK * part.shape[1]).view(np.uint8) for layer in layers for part in layer]
    whole = np.concatenate(parts, axis=1)
    return [torch.from_numpy(block.copy()) for block in whole]


def from_blocks(form: StateFormat, blocks: Sequence[torch.Tensor]) -> list[LayerRows]:
    """The inverse of `to_blocks`."""
    whole, at, layers = np.stack([block.numpy() for block in blocks]), 0, list[LayerRows]()
    for widths in form.widths:
        both = list[NDArray[np.generic]]()
        for width in widths:
            end = at + BLOCK * width * form.dtype.itemsize
            part = np.ascontiguousarray(whole[:, at:end]).view(form.dtype)
            both.append(part.reshape(len(blocks) * BLOCK, width))
            at = end
        layers.append((both[0], both[1]))
    return layers
