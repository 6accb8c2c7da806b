"""The pass over a log: of each prompt, what a prefix cache has, and what can be linked beside it.

- *Prefix*: whole blocks of 16 tokens at the beginning of a prompt that an earlier prompt begins with as well.
- *Linkable*: messages, documents between separators, and blocks cut by content, of `min_tokens` or more, that are in an
  earlier prompt at any place.

Prompts of other tenants are never earlier ones.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pictool.estimate.batch import LogBatch
from pictool.estimate.hashing import (
    Hashes,
    HashIndex,
    Indices,
    Rolling,
    Units,
    chained,
    grown,
    hashes_of_runs,
    spread,
)
from pictool.estimate.segments import (
    BLOCK_TOKENS,
    BYTES_PER_TOKEN,
    KINDS,
    HashedBlocks,
    LoggedPrompt,
    Segment,
    TokenScale,
    split_text,
)
from pictool.estimate.totals import Repeated, Totals

Tokenize = Callable[[str], Sequence[int]]
HEAD_TOKENS = 16  # of a linked document, which legolink-16 computes again
_MAX_DOCUMENTS = 1 << 17
_MAX_ENCODED = 1 << 14  # texts
_SHOWN = 60  # characters of a document's beginning
_BATCH = 1 << 17  # units of prompts that are measured together, since each call of numpy costs as much as 1,000 units


class Measure:
    """One pass.

    Args:
        tokenize: token ids of a text; None: tokens are estimated by bytes.
        are_ids: whether the log has token ids, which are counted as they are.
        memory: bytes for what is remembered; None: all is, and the numbers are exact.
        shows_text: whether the beginnings of documents are kept.
    """

    def __init__(
        self, tokenize: Tokenize | None = None, are_ids: bool = False, memory: int | None = None,
        shows_text: bool = False,
    ) -> None:  # fmt: skip
        self._is_bytes = tokenize is None and not are_ids
        self.scale = TokenScale(BYTES_PER_TOKEN if self._is_bytes else 1)
        self.documents = dict[int, Repeated]()
        self.series = array("d")  # of each prompt: time or nan, tokens, prefix, linked
        self.totals = Totals()
        self._tokenize, self._memory, self._shows_text = tokenize, memory, shows_text
        # What is tokenized comes again and again; bytes are taken at once.
        self._encode = lru_cache(_MAX_ENCODED if tokenize else 0)(self._encode_text)
        self._waiting, self._size, self._is_hashed = list[LoggedPrompt](), 0, False
        self._start()

    def _start(self) -> None:
        """Remember nothing."""
        self._blocks, self._begun = HashIndex(), HashIndex()
        self._first = np.zeros(0, dtype=np.int32)
        self._held = 0.0  # tokens of different blocks

    @property
    def num_prompts(self) -> int:
        return self.totals.tokens.prompts + len(self._waiting)

    def counting(self, tokenizer: str | None) -> str:
        """What a token is here."""
        if tokenizer is not None:
            return f"by the tokenizer of {tokenizer}"
        return f"estimated: {BYTES_PER_TOKEN} bytes for a token" if self._is_bytes else "as the log has them"

    def finish(self) -> Totals:
        """What was found up to now."""
        self._measure()
        self.totals.distinct = self.totals.forgotten + self._held
        return self.totals

    def add(self, prompt: LoggedPrompt) -> None:
        """Measure the next prompt against all before it; at the latest when the pass is finished."""
        is_hashed = any(isinstance(segment.content, HashedBlocks) for segment in prompt.segments)
        if is_hashed != self._is_hashed:
            self._measure()
        self._is_hashed = is_hashed
        self._waiting.append(prompt)
        contents = [segment.content for segment in prompt.segments]
        self._size += 64 + sum(len(part.hashes if isinstance(part, HashedBlocks) else part) for part in contents)
        if self._size >= _BATCH:
            self._measure()

    def _measure(self) -> None:
        """Measure the prompts that wait."""
        prompts, self._waiting, self._size = self._waiting, [], 0
        if not prompts:
            return
        found = self._number_hashed(prompts) if self._is_hashed else self._number_texts(prompts)
        self._reuse_prefix(found)
        self._link(found)
        self._count(found)
        if self._memory is not None and 24 * (self._blocks.count + self._begun.count) > self._memory // 2:
            self.totals.forgotten += self._held
            self._start()

    def _number_hashed(self, prompts: Sequence[LoggedPrompt]) -> LogBatch:
        """Prompts of which the log has hashes of blocks; each segment is one part."""
        listed = [
            (number, segment.kind, segment.content)
            for number, prompt in enumerate(prompts)
            for segment in prompt.segments
            if isinstance(segment.content, HashedBlocks) and len(segment.content.hashes)
        ]
        prompt_of = np.asarray([number for number, _, _ in listed], dtype=np.int64)
        counts = np.asarray([len(content.hashes) for _, _, content in listed], dtype=np.int64)
        seeds = seeds_of(prompts)
        hashes = joined([content.hashes + seeds[number] for number, _, content in listed], np.uint64)
        lengths = joined([content.lengths for _, _, content in listed]) * self.scale.per_token // BYTES_PER_TOKEN
        parts = joined([chained(content.hashes + seeds[number], 1)[-1:] for number, _, content in listed], np.uint64)
        part_of = np.repeat(np.arange(len(listed)), counts)
        sizes = np.bincount(part_of, lengths, len(listed)).astype(np.int64)
        kinds = np.asarray([KINDS.index(kind) for _, kind, _ in listed], dtype=np.int64)
        blocks = self._number(hashes, lengths, part_of, parts, sizes, kinds, prompt_of + self.num_prompts)
        return LogBatch(prompts, self.num_prompts, blocks, prompt_of[part_of], part_of, seeds, None)

    def _number_texts(self, prompts: Sequence[LoggedPrompt]) -> LogBatch:
        """Prompts of texts, or token ids, which are cut into blocks."""
        segments = [(number, segment) for number, prompt in enumerate(prompts) for segment in prompt.segments]
        rows, units, at = list[tuple[int, int, int, int, int]](), list[Units](), 0  # of each part that is not empty
        for which, (number, segment) in enumerate(segments):
            for kind, own in self._parts(segment):
                if len(own):
                    rows.append((at, at + len(own), KINDS.index(kind), number, which))
                    units.append(own)
                    at += len(own)
        starts, ends, kinds, prompt_of, text_of = np.asarray(rows, dtype=np.int64).reshape(-1, 5).T
        rolling = Rolling(joined(units, np.uint8 if self._is_bytes else np.int32))
        block_ends = self.scale.cut(rolling, starts, ends)
        part_of = np.searchsorted(ends, block_ends)
        block_starts = np.maximum(np.append(0, block_ends)[: len(block_ends)], starts[part_of])
        seeds = seeds_of(prompts)
        hashes = rolling.ranges(block_starts, block_ends) + seeds[prompt_of[part_of]]
        part_hashes, times = rolling.ranges(starts, ends) + seeds[prompt_of], prompt_of + self.num_prompts
        blocks = self._number(hashes, block_ends - block_starts, part_of, part_hashes, ends - starts, kinds, times)
        return LogBatch(prompts, self.num_prompts, blocks, prompt_of[part_of], text_of[part_of], seeds, rolling)

    def _parts(self, segment: Segment) -> Iterator[tuple[str, Units]]:
        """The parts of a text: the kind and the units of each."""
        content = segment.content
        assert not isinstance(content, HashedBlocks)
        if not isinstance(content, str):
            data = content.tobytes()
            yield segment.kind, np.frombuffer(data, np.uint8) if self._is_bytes else np.frombuffer(data, np.int32)
            return
        is_whole = segment.is_marked or segment.kind == "assistant"
        for kind, text in [(segment.kind, content)] if is_whole else split_text(segment.kind, content):
            yield kind, self._encode(text)

    def _number(
        self, hashes: Hashes, lengths: Indices, part_of: Indices, part_hashes: Hashes, part_sizes: Indices,
        kinds: Indices, prompts: Indices,
    ) -> Indices:  # fmt: skip
        """Give blocks and parts their numbers, and new ones their prompts. `kinds`, `prompts`: of parts. [5, blocks]"""
        numbers, first = self._blocks.number(np.concatenate((hashes, part_hashes)))  # a part may be a block
        new = np.flatnonzero(first >= 0)
        self._first = grown(self._first, self._blocks.count, np.iinfo(np.int32).max)
        np.minimum.at(self._first, numbers[new], np.concatenate((prompts[part_of], prompts))[new].astype(np.int32))
        is_first = first[: len(hashes)] == np.arange(len(hashes))
        self._held += float(lengths[is_first].sum()) / self.scale.per_token
        part_numbers = numbers[len(hashes) :]
        return np.stack((numbers[: len(hashes)], lengths, part_numbers[part_of], part_sizes[part_of], kinds[part_of]))

    def _encode_text(self, text: str) -> Units:
        if self._tokenize is not None:
            return np.asarray(self._tokenize(text), dtype=np.int32)
        data = text.encode(errors="surrogatepass")
        if self._is_bytes:
            return np.frombuffer(data, dtype=np.uint8)
        return np.frombuffer(data + bytes(-len(data) % 4), dtype="<i4")  # a text in a log of token ids

    def _reuse_prefix(self, found: LogBatch) -> None:
        """What a prefix cache has of prompts."""
        hashes, sizes, prompts = self._beginnings(found)
        _, first = self._begun.number(hashes)
        is_known = first < np.searchsorted(prompts, prompts)  # before the first of its prompt, or in the table
        found.prefix[:] = np.bincount(prompts, sizes * is_known, len(found.prefix))

    def _beginnings(self, found: LogBatch) -> tuple[Hashes, Indices, Indices]:
        """The hashes of all beginnings of whole blocks, the sizes of their last blocks, and the prompts of each."""
        if found.text is None:
            slices = zip(found.slices(), found.seeds.tolist(), strict=True)
            hashes = [chained(self._blocks.hashes(found.numbers[blocks]), seed) for blocks, seed in slices]
            return joined(hashes, np.uint64), found.lengths, found.prompts
        block = BLOCK_TOKENS * self.scale.per_token
        counts, starts = found.sizes // block, found.ends - found.sizes
        places, owners = spread(np.ones_like(counts), counts + 1)
        ends = starts[owners] + block * places
        return found.text.ranges(starts[owners], ends) + found.seeds[owners], np.full_like(owners, block), owners

    def _link(self, found: LogBatch) -> None:
        """What can be linked beyond the prefix."""
        least, times = self.scale.window, found.prompts + found.first
        is_whole = (self._first[found.numbers] < times) & (found.lengths >= least)
        is_part = (self._first[found.parts] < times) & (found.part_sizes >= least)
        found.beyond = found.after_prefix()
        found.is_linked = (is_whole | is_part) & (found.beyond > 0)
        self._note_runs(found)

    def _note_runs(self, found: LogBatch) -> None:
        """Linked blocks of one part, one after the other, are one document."""
        linked = np.flatnonzero(found.is_linked)
        if not len(linked):
            return
        is_new, parts = np.ones(len(linked), dtype=np.bool_), (found.texts << 32 | found.parts)[linked]
        is_new[1:] = (np.diff(linked) > 1) | (np.diff(parts) != 0)
        starts = linked[is_new]
        ends = np.append(linked[np.flatnonzero(is_new)[1:] - 1], linked[-1]) + 1
        names = hashes_of_runs(self._blocks.hashes(found.numbers), starts, ends, 2)
        sizes = sums_of(found.beyond, starts, ends) / self.scale.per_token
        tokens = sums_of(found.lengths, starts, ends) / self.scale.per_token
        found.again = np.bincount(found.prompts[starts], np.minimum(sizes, HEAD_TOKENS), len(found.logged)).astype(
            float
        )
        for name, start, size, whole in zip(*(a.tolist() for a in (names, starts, sizes, tokens)), strict=True):
            document = self.documents.get(name)
            if document is None:
                kind, text = KINDS[found.kinds[start]], self._shown(found, start)
                document = self.documents[name] = Repeated(f"{name:016x}", kind, whole, text=text)
            document.uses += 1
            document.saved += size
        if len(self.documents) > _MAX_DOCUMENTS:
            kept = sorted(self.documents.items(), key=lambda item: -item[1].saved)[: _MAX_DOCUMENTS // 2]
            self.documents = dict(kept)

    def _shown(self, found: LogBatch, block: int) -> str | None:
        """The beginning of a document, if it is asked for."""
        if not self._shows_text or found.text is None or found.text.units.dtype != np.uint8:
            return None
        start = int(found.block_ends[block] - found.lengths[block])
        end = min(start + 4 * _SHOWN, int(found.ends[found.prompts[block]]))
        return bytes(found.text.units[start:end]).decode(errors="replace")[:_SHOWN]

    def _count(self, found: LogBatch) -> None:
        """Add prompts to all sums."""
        scale, totals = self.scale.per_token, self.totals
        before = found.lengths - found.after_prefix()
        columns = (found.lengths, before, found.beyond * found.is_linked)
        rows = np.stack([found.sizes, found.prefix, found.sum(columns[2])]) / scale  # [3, prompts]
        for prompt, row in zip(found.logged, rows.T.tolist(), strict=True):
            totals.tokens.add(1, *row)
            totals.tenants[prompt.tenant].add(1, *row)
            self.series.extend((float("nan") if prompt.time is None else prompt.time, *row))
        sums = np.stack([np.bincount(found.kinds, column, len(KINDS)) for column in columns]).T / scale
        places = np.unique(found.prompts * len(KINDS) + found.kinds)
        for kind, count in enumerate(np.bincount(places % len(KINDS), minlength=len(KINDS)).tolist()):
            if count:
                totals.kinds[KINDS[kind]].add(count, *sums[kind].tolist())
        totals.again += float(found.again.sum())


def seeds_of(prompts: Sequence[LoggedPrompt]) -> Hashes:
    """What separates the hashes of each prompt from those of other tenants."""
    return np.asarray([seed_of(prompt.tenant) for prompt in prompts], dtype=np.uint64)


def joined(arrays: Sequence[NDArray[Any]], kind: Any = np.int64) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=kind)


def sums_of(values: NDArray[Any], starts: Indices, ends: Indices) -> NDArray[Any]:
    """The sum of each range [start, end)."""
    sums = np.append(0, np.cumsum(values))
    found: NDArray[Any] = sums[ends] - sums[starts]
    return found


@cache
def seed_of(tenant: str) -> int:
    """What separates a tenant's hashes from those of others."""
    return int.from_bytes(hashlib.blake2b(tenant.encode(errors="surrogatepass"), digest_size=7).digest(), "little")
