"""The pass over a log: of each prompt, what a prefix cache has, what can be linked, and what is repeated at all.

- *Prefix*: whole blocks of 16 tokens at the beginning of a prompt that an earlier prompt begins with as well.
- *Linkable*: messages, documents between separators, and blocks cut by content, of `min_tokens` or more, that are in an
  earlier prompt at any place.
- *At most*: tokens in any repeat of `min_tokens` or more (`repeats.py`).

Prompts of other tenants are never earlier ones.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from pictool.estimate.hashing import (
    ChainIndex,
    Hashes,
    HashIndex,
    Indices,
    Rolling,
    Units,
    chain_hashes,
    chained,
    grown,
    hashes_of_runs,
    mixed,
)
from pictool.estimate.lru import LruCaches
from pictool.estimate.repeats import ExactRepeats, RepeatIndex, SampledRepeats
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

Tokenize = Callable[[str], Sequence[int]]
Mask = NDArray[np.bool_]
CAPACITIES = tuple(1 << power for power in range(14, 35, 2))  # tokens, of the curve
LARGE_BLOCK = 256  # tokens, as of LMCache
HEAD_TOKENS = 16  # of a linked document, which legolink-16 computes again
FIXUP_SHARE = 0.1  # of the linked tokens, which fixup-10 computes again
WAYS = ("none", "prefix", "naive", "legolink-16", "fixup-10")
_MAX_DOCUMENTS = 1 << 17
_MAX_BORDERS, _BORDER = 1000, 64  # whose tokens are compared; characters on each side
_SHOWN = 60  # characters of a document's beginning


@dataclass
class Tokens:
    """Sums over prompts."""

    prompts: int = 0
    total: float = 0.0
    prefix: float = 0.0
    linked: float = 0.0  # beyond the prefix
    most: float = 0.0

    def add(self, total: float, prefix: float, linked: float, most: float = 0.0) -> None:
        self.prompts += 1
        self.total += total
        self.prefix += prefix
        self.linked += linked
        self.most += most


@dataclass
class Repeated:
    """A document that prompts repeat: what it is called, how often it was linked beyond a prefix, and its tokens."""

    name: str
    kind: str
    tokens: float
    uses: int = 0
    saved: float = 0.0
    text: str | None = None


@dataclass
class Computed:
    """Tokens that prefill computes in all, and pairs of them in attention, under one way to reuse."""

    rows: float = 0.0
    pairs: float = 0.0


@dataclass
class Totals:
    """What a pass found, in tokens.

    Fields:
        prefix_at, linked_at: reused by LRU caches of the capacities, in their order.
        distinct: of different blocks, what a store of all of them holds.
        losses: tokens of linked documents that blocks of 16 and 256 tokens do not hold; of prefixes, 256 against 16.
        returned: of outputs in the log that came back in prompts; None: no outputs are in it.
        forgotten: by how much prefix and linkable may be too low, because memory was used up.
        border_loss: tokens that a tokenizer merges over a border of two parts, in the mean; None: not known.
        seconds: of the pass. tokenizer_s: of these, in the tokenizer.
    """

    tokens: Tokens = field(default_factory=Tokens)
    kinds: dict[str, Tokens] = field(default_factory=lambda: defaultdict(Tokens))
    tenants: dict[str, Tokens] = field(default_factory=lambda: defaultdict(Tokens))
    hours: dict[int, Tokens] = field(default_factory=lambda: defaultdict(Tokens))
    computed: dict[str, Computed] = field(default_factory=lambda: {way: Computed() for way in WAYS})
    losses: Counter[str] = field(default_factory=Counter)
    prefix_at: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    linked_at: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    distinct: float = 0.0
    hashed: int = 0  # prompts of which the log has hashes only
    chained: int = 0  # of these, such whose hashes are of all that comes before
    num_linked: int = 0  # documents
    outputs: float | None = None
    returned: float | None = None
    forgotten: float = 0.0
    most_error: float = 0.0
    border_loss: float | None = None
    seconds: float = 0.0
    tokenizer_s: float = 0.0


@dataclass(frozen=True)
class _Text:
    """A text as the pass keeps it. Arrays are by blocks."""

    numbers: Indices
    lengths: NDArray[np.int64]  # units
    parts: Indices  # the number of the part that each is in
    part_sizes: NDArray[np.int64]  # units
    kinds: NDArray[np.int64]
    is_marked: bool
    first: int  # the prompt that had it first
    units: Units | None


class Measure:
    """One pass.

    Args:
        tokenize: token ids of a text; None: tokens are estimated by bytes.
        capacities: of caches, in tokens.
        are_ids: whether the log has token ids, which are counted as they are.
        memory: bytes for what is remembered; None: all is, and the numbers are exact.
        shows_text: whether the beginnings of documents are kept.
    """

    def __init__(
        self, min_tokens: int = 16, tokenize: Tokenize | None = None, are_ids: bool = False,
        capacities: Sequence[int] = CAPACITIES, memory: int | None = None, shows_text: bool = False,
    ) -> None:  # fmt: skip
        self._is_bytes = tokenize is None and not are_ids
        self.scale = TokenScale(BYTES_PER_TOKEN if self._is_bytes else 1, min_tokens)
        self.capacities, self.documents = tuple(capacities), dict[int, Repeated]()
        self.series = array("d")  # of each prompt: time or nan, tokens, prefix, linked, most
        self.totals = Totals()
        self.totals.prefix_at, self.totals.linked_at = np.zeros(len(capacities)), np.zeros(len(capacities))
        self._tokenize, self._memory, self._shows_text = tokenize, memory, shows_text
        window = self.scale.window
        self._repeats: RepeatIndex = ExactRepeats(window) if memory is None else SampledRepeats(window, memory // 4)
        self._outputs, self._borders = set[bytes](), list[int]()
        self._started = time.perf_counter()
        self._start()

    def _start(self) -> None:
        """Remember nothing but repeats."""
        self._texts = dict[bytes, _Text | int]()  # or the prompt that had it first
        self._text_bytes = 0
        self._blocks, self._pairs, self._chain = HashIndex(), HashIndex(), ChainIndex()
        self._first = np.zeros(0, dtype=np.int32)
        units = np.asarray(self.capacities, dtype=np.int64) * self.scale.per_token
        self._prefixes, self._objects = LruCaches(units.tolist()), LruCaches(units.tolist())
        self._held = 0.0  # tokens of different blocks

    @property
    def num_prompts(self) -> int:
        return self.totals.tokens.prompts

    @property
    def most_is_known(self) -> bool:
        """Whether the log tells what is repeated at most."""
        return self.totals.hashed == 0

    @property
    def linked_is_known(self) -> bool:
        """Whether the log tells what can be linked."""
        return self.totals.chained == 0

    @property
    def sample_rate(self) -> int:
        """One in so many windows was kept to find repeats; 1: all."""
        return self._repeats.rate if isinstance(self._repeats, SampledRepeats) else 1

    def counting(self, tokenizer: str | None) -> str:
        """What a token is here."""
        if tokenizer is not None:
            return f"by the tokenizer of {tokenizer}"
        return f"estimated: {BYTES_PER_TOKEN} bytes for a token" if self._is_bytes else "as the log has them"

    def finish(self) -> Totals:
        """What was found up to now."""
        self.totals.seconds = time.perf_counter() - self._started
        self.totals.most_error = self._repeats.error() / self.scale.per_token
        self.totals.distinct = self.totals.forgotten + self._held
        self.totals.border_loss = float(np.mean(self._borders)) if self._borders else None
        return self.totals

    def add(self, prompt: LoggedPrompt) -> None:
        """Measure the next prompt against all before it."""
        seed = seed_of(prompt.tenant)
        pairs = [(segment, self._text(segment, seed)) for segment in prompt.segments]
        pairs = [(segment, text) for segment, text in pairs if len(text.numbers)]
        found = _Prompt(self, [text for _, text in pairs])
        if not pairs:
            self._count(prompt, found)
            return
        hashed = [segment.content for segment, _ in pairs if isinstance(segment.content, HashedBlocks)]
        if hashed:
            self.totals.hashed += 1
            self.totals.chained += any(content.is_chained for content in hashed)
            chain = chained(found.hashes(self._blocks), seed)
            sizes = found.lengths
        else:
            found.units = self._join(pairs)
            block = BLOCK_TOKENS * self.scale.per_token
            chain = chain_hashes(found.units, block, seed)
            sizes = np.full(len(chain), block, dtype=np.int64)
        self._reuse_prefix(found, chain, sizes)
        if not any(content.is_chained for content in hashed):
            self._link(found)
        if not hashed:
            assert found.units is not None
            most = self._repeats.scan(found.units, found.regions(self._pairs), found.unknown(), seed)
            found.most = float(found.lengths[found.is_whole].sum()) + most
        self._count(prompt, found)
        if self._memory is not None and self._num_bytes() > self._memory - self._memory // 2:
            self.totals.forgotten += self._held
            self._start()

    def _num_bytes(self) -> int:
        """About what texts, tables and caches take."""
        tables = 24 * (self._blocks.count + self._pairs.count) + 8 * self._chain.count + 350 * self._chain.num_runs
        return tables + 20 * (self._blocks.count + self._chain.count) + self._text_bytes

    def _text(self, segment: Segment, seed: int) -> _Text:
        content, kind = segment.content, segment.kind
        if isinstance(content, HashedBlocks):
            lengths = content.lengths * self.scale.per_token // BYTES_PER_TOKEN
            hashes, whole = content.hashes + np.uint64(seed), int(lengths.sum())
            parts = [(kind, whole)] if whole else []
            return self._number(hashes, lengths, chained(hashes, 1)[-1:], parts, segment, None, self.num_prompts)
        data = content.encode(errors="surrogatepass") if isinstance(content, str) else content.tobytes()
        salt = seed.to_bytes(8, "little") + kind[:4].encode() + (b"m" if segment.is_marked else b"")
        digest = hashlib.blake2b(data, digest_size=16, salt=salt[:16]).digest()
        known = self._texts.get(digest)
        if isinstance(known, _Text):
            return known
        text = self._cut(segment, data, seed, self.num_prompts if known is None else known)
        if known is None and self._is_bytes:  # most come once; what comes again is kept from then on
            self._texts[digest] = text.first
            self._text_bytes += 160
        else:
            self._texts[digest] = text
            self._text_bytes += 600 + 40 * len(text.numbers) + (0 if text.units is None else text.units.nbytes)
        return text

    def _cut(self, segment: Segment, data: bytes, seed: int, first: int) -> _Text:
        """The parts of a text, each cut into blocks; `first` is the prompt that had it first."""
        content = segment.content
        if isinstance(content, str):
            is_whole = segment.is_marked or segment.kind == "assistant"
            parts = [(segment.kind, content)] if is_whole else split_text(segment.kind, content)
            encoded = [self._encode(text) for _, text in parts]
            self._compare_borders([text for _, text in parts], encoded)
        else:
            parts, encoded = [(segment.kind, "")], [np.asarray(content, dtype=np.int32)]
            if self._is_bytes:  # token ids in a log that began with texts
                encoded = [np.frombuffer(encoded[0].astype("<i4").tobytes(), dtype=np.uint8)]
        units: Units = np.concatenate(encoded) if len(encoded) > 1 else encoded[0]  # type: ignore[assignment]
        sizes = [(kind, len(part)) for (kind, _), part in zip(parts, encoded, strict=True) if len(part)]
        bounds = np.cumsum([0, *(size for _, size in sizes)])
        rolling = Rolling(units, seed)
        ends = self.scale.cut(rolling, bounds.tolist())
        starts = np.concatenate(([0], ends[:-1])).astype(np.int64)[: len(ends)]
        hashes, part_hashes = rolling.ranges(starts, ends), rolling.ranges(bounds[:-1], bounds[1:])
        kept = None if self._is_bytes and isinstance(content, str) else units
        return self._number(hashes, ends - starts, part_hashes, sizes, segment, kept, first)

    def _number(
        self, hashes: Hashes, lengths: NDArray[np.int64], part_hashes: Hashes, sizes: list[tuple[str, int]],
        segment: Segment, units: Units | None, first: int,
    ) -> _Text:  # fmt: skip
        """Give blocks and parts their numbers; new ones are of this prompt."""
        both, is_new = self._blocks.number(np.concatenate((hashes, part_hashes)))  # a part may be a block
        self._first = grown(self._first, self._blocks.count, 0)
        self._first[both[is_new]] = self.num_prompts
        numbers, part_numbers = both[: len(hashes)], both[len(hashes) :]
        is_new = is_new[: len(hashes)]
        if is_new.any():
            _, once = np.unique(numbers[is_new], return_index=True)
            self._held += float(lengths[is_new][once].sum()) / self.scale.per_token
        part_sizes = np.asarray([size for _, size in sizes], dtype=np.int64)
        part_of = np.searchsorted(np.cumsum(part_sizes), np.cumsum(lengths) - lengths, side="right")
        kinds = np.asarray([KINDS.index(kind) for kind, _ in sizes], dtype=np.int64)
        return _Text(
            numbers, lengths, part_numbers[part_of], part_sizes[part_of], kinds[part_of], segment.is_marked,
            first, units,
        )  # fmt: skip

    def _encode(self, text: str) -> Units:
        if self._tokenize is None:
            data = text.encode(errors="surrogatepass")
            if self._is_bytes:
                return np.frombuffer(data, dtype=np.uint8)
            return np.frombuffer(data + bytes(-len(data) % 4), dtype="<i4")  # a text in a log of token ids
        return np.asarray(self._token_ids(text), dtype=np.int32)

    def _token_ids(self, text: str) -> Sequence[int]:
        """Token ids by the tokenizer, whose time is counted."""
        assert self._tokenize is not None
        started = time.perf_counter()
        ids = self._tokenize(text)
        self.totals.tokenizer_s += time.perf_counter() - started
        return ids

    def _compare_borders(self, texts: Sequence[str], encoded: Sequence[Units]) -> None:
        """Count the tokens that differ if the texts on both sides of a border are tokenized together."""
        if self._tokenize is None:
            return
        for left, right in itertools.pairwise(texts):
            if len(self._borders) == _MAX_BORDERS:
                return
            apart = [*self._token_ids(left[-_BORDER:]), *self._token_ids(right[:_BORDER])]
            joined = list(self._token_ids(left[-_BORDER:] + right[:_BORDER]))
            same = common(apart, joined)
            self._borders.append(len(apart) - same - common(apart[same:][::-1], joined[same:][::-1]))

    def _join(self, pairs: Sequence[tuple[Segment, _Text]]) -> Units:
        """The units of a whole prompt."""
        if self._is_bytes:
            parts = [
                segment.content.encode(errors="surrogatepass")
                if isinstance(segment.content, str) else text.units.tobytes()  # type: ignore[union-attr]
                for segment, text in pairs
            ]  # fmt: skip
            return np.frombuffer(b"".join(parts), dtype=np.uint8)
        return np.concatenate([text.units for _, text in pairs if text.units is not None])

    def _reuse_prefix(self, found: _Prompt, hashes: Hashes, sizes: NDArray[np.int64]) -> None:
        """What prefix caches have of a prompt, without a limit and with those of the capacities."""
        numbers, count = self._chain.number(hashes)
        found.prefix = int(sizes[:count].sum())
        is_hit = self._prefixes.use(numbers, sizes)
        self.totals.prefix_at += (is_hit @ sizes) / self.scale.per_token
        tokens = found.prefix / self.scale.per_token
        self.totals.losses["prefix 256"] += int(tokens % LARGE_BLOCK)

    def _link(self, found: _Prompt) -> None:
        """What can be linked beyond the prefix."""
        least = self.scale.window
        is_old = self._first[found.numbers] < self.num_prompts
        found.is_whole = is_old & (found.lengths >= least)
        is_part = (self._first[found.parts] < self.num_prompts) & (found.part_sizes >= least)
        found.beyond = np.clip(found.ends - found.prefix, 0, found.lengths)
        found.is_linked = (found.is_whole | is_part) & (found.beyond > 0)
        unique, first, inverse = np.unique(found.numbers, return_index=True, return_inverse=True)
        order = np.argsort(first)
        is_hit = self._objects.use(unique[order], found.lengths[first[order]])
        gained = np.bincount(inverse, found.beyond * found.is_linked, len(unique))[order]
        self.totals.linked_at += (is_hit @ gained) / self.scale.per_token
        self._note_runs(found)

    def _note_runs(self, found: _Prompt) -> None:
        """Linked blocks of one part, one after the other, are one document."""
        linked = np.flatnonzero(found.is_linked)
        if not len(linked):
            return
        is_new = np.ones(len(linked), dtype=np.bool_)
        is_new[1:] = (np.diff(linked) > 1) | (found.part_starts[linked[1:]] != found.part_starts[linked[:-1]])
        starts = linked[is_new]
        ends = np.append(linked[np.flatnonzero(is_new)[1:] - 1], linked[-1]) + 1
        names = hashes_of_runs(found.hashes(self._blocks), starts, ends, 2).tolist()
        sums = np.concatenate(([0], np.cumsum(found.beyond)))
        sizes = (sums[ends] - sums[starts]) / self.scale.per_token
        found.again = float(np.minimum(sizes, HEAD_TOKENS).sum())
        self.totals.num_linked += len(starts)
        for block in (BLOCK_TOKENS, LARGE_BLOCK):
            self.totals.losses[f"linked {block}"] += int((sizes % block).sum())
        for name, start, end, size in zip(names, starts.tolist(), ends.tolist(), sizes.tolist(), strict=True):
            document = self.documents.get(name)
            if document is None:
                tokens = float(found.lengths[start:end].sum()) / self.scale.per_token
                document = Repeated(f"{name:016x}", KINDS[found.kinds[start]], tokens, text=self._shown(found, start))
                self.documents[name] = document
            document.uses += 1
            document.saved += size
        if len(self.documents) > _MAX_DOCUMENTS:
            kept = sorted(self.documents.items(), key=lambda item: -item[1].saved)[: _MAX_DOCUMENTS // 2]
            self.documents = dict(kept)

    def _shown(self, found: _Prompt, block: int) -> str | None:
        """The beginning of a document, if it is asked for."""
        if not self._shows_text or found.units is None or found.units.dtype != np.uint8:
            return None
        start = int(found.ends[block] - found.lengths[block])
        return bytes(found.units[start : start + 4 * _SHOWN]).decode(errors="replace")[:_SHOWN]

    def _count(self, prompt: LoggedPrompt, found: _Prompt) -> None:
        """Add a prompt to all sums."""
        scale, totals = self.scale.per_token, self.totals
        self._count_outputs(prompt)
        total, prefix, most = (units / scale for units in (found.size, found.prefix, found.most))
        linked = float(found.beyond[found.is_linked].sum()) / scale
        moment = prompt.time
        groups = [totals.tokens, totals.tenants[prompt.tenant]]
        if moment is not None:
            groups.append(totals.hours[int(moment // 3600 % 24)])
        for tokens in groups:
            tokens.add(total, prefix, linked, most)
        self.series.extend((float("nan") if moment is None else moment, total, prefix, linked, most))
        before = np.clip(found.prefix - found.ends + found.lengths, 0, found.lengths)
        columns = (found.lengths, before, found.beyond * found.is_linked)
        sums = np.asarray([np.bincount(found.kinds, column, len(KINDS)) for column in columns]).T / scale
        for kind in np.flatnonzero(sums[:, 0]).tolist():
            totals.kinds[KINDS[kind]].add(*sums[kind].tolist())
        self._count_computed(total, prefix, linked, found.again)

    def _count_computed(self, total: float, prefix: float, linked: float, again: float) -> None:
        new = total - prefix - linked
        rows = (total, total - prefix, new, new + again, new + FIXUP_SHARE * linked)
        for way, count in zip(WAYS, rows, strict=True):
            computed = self.totals.computed[way]
            computed.rows += count
            computed.pairs += count * (total if way == "none" else total + prefix) / 2

    def _count_outputs(self, prompt: LoggedPrompt) -> None:
        """Note outputs, and which of them come back as messages of the assistant."""
        for text in prompt.outputs:
            self.totals.outputs = (self.totals.outputs or 0.0) + len(text.encode(errors="replace")) / BYTES_PER_TOKEN
            self.totals.returned = self.totals.returned or 0.0
        for segment in prompt.segments if self._outputs else ():
            if segment.kind == "assistant" and isinstance(segment.content, str):
                digest = _digest(prompt.tenant, segment.content)
                if digest in self._outputs:
                    self._outputs.discard(digest)
                    size = len(segment.content.encode(errors="replace")) / BYTES_PER_TOKEN
                    self.totals.returned = (self.totals.returned or 0.0) + size
        self._outputs.update(_digest(prompt.tenant, text) for text in prompt.outputs if text)


class _Prompt:
    """A prompt on its way through a pass. Arrays are by blocks, in units."""

    def __init__(self, measure: Measure, texts: Sequence[_Text]) -> None:
        def joined(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
            return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)

        self._now, self._window = measure.num_prompts, measure.scale.window
        counts = [len(text.numbers) for text in texts]
        self.numbers, self.lengths = joined([text.numbers for text in texts]), joined([text.lengths for text in texts])
        self.parts, self.part_sizes = (
            joined([text.parts for text in texts]),
            joined([text.part_sizes for text in texts]),
        )
        self.kinds, self.ends = joined([text.kinds for text in texts]), np.cumsum(self.lengths)
        self._text_of = np.repeat(np.arange(len(texts)), counts)
        self._is_old_text = np.repeat(np.asarray([text.first < self._now for text in texts], dtype=np.bool_), counts)
        self.units: Units | None = None
        self.size, self.prefix = int(self.lengths.sum()), 0
        self.most = self.again = 0.0
        self.beyond = np.zeros(len(self.numbers), dtype=np.int64)
        self.is_linked = self.is_whole = np.zeros(len(self.numbers), dtype=np.bool_)

    @property
    def part_starts(self) -> Indices:
        """Which part of the prompt each block is in, by a number that differs from its neighbours'."""
        return self._text_of * (1 << 32) + self.parts

    def hashes(self, table: HashIndex) -> Hashes:
        return table.hashes(self.numbers)

    def regions(self, pairs: HashIndex) -> list[tuple[int, int]]:
        """Where windows are that no earlier prompt is known to have: around new blocks, and known ones anew together.

        Adds this prompt's pairs of neighbours.
        """
        reach, starts = self._window - 1, self.ends - self.lengths
        first, second = self.numbers[:-1], self.numbers[1:]
        is_inner = (self._text_of[:-1] == self._text_of[1:]) & self._is_old_text[1:]
        asked = np.flatnonzero(~is_inner)
        keys = mixed(first[asked].astype(np.uint64) << np.uint64(32) | second[asked].astype(np.uint64))
        _, is_new_pair = pairs.number(keys)
        apart = asked[is_new_pair]
        apart = apart[self.is_whole[apart] & self.is_whole[apart + 1]]
        new = np.flatnonzero(~self.is_whole)
        lows = np.concatenate((starts[new], self.ends[apart])) - reach
        highs = np.concatenate((self.ends[new], self.ends[apart])) + reach
        return merged(np.maximum(lows, 0), np.minimum(highs, int(self.ends[-1])))

    def unknown(self) -> Mask:
        """The units of blocks that are new."""
        return np.repeat(~self.is_whole, self.lengths)


def merged(lows: Indices, highs: Indices) -> list[tuple[int, int]]:
    """The union of ranges as ranges, in order."""
    order = np.argsort(lows, kind="stable")
    lows, highs = lows[order], np.maximum.accumulate(highs[order]) if len(order) else highs
    is_first = np.ones(len(lows), dtype=np.bool_)
    is_first[1:] = lows[1:] > highs[:-1]
    ends = np.append(highs[np.flatnonzero(is_first)[1:] - 1], highs[-1:])
    return list(zip(lows[is_first].tolist(), ends.tolist(), strict=True))


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@cache
def seed_of(tenant: str) -> int:
    """What separates a tenant's hashes from those of others."""
    return int.from_bytes(hashlib.blake2b(tenant.encode(errors="surrogatepass"), digest_size=7).digest(), "little")


def _digest(tenant: str, text: str) -> bytes:
    return hashlib.blake2b(f"{tenant}\0{text}".encode(errors="surrogatepass"), digest_size=16).digest()
