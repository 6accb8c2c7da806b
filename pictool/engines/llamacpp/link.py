"""A prepared link on llama.cpp: objects of which something is reused are set, moved, and joined with computed runs.

Rows of one distance from where they were compiled are one sequence. All are set first, so that llama.cpp moves their
keys in one pass, when the first run is computed. All that is set is in a spare sequence too until something was
computed after it: llama.cpp takes a cell of a layer with a window for free, if one sequence alone has it and that
sequence's last position does not attend to it. Then the prompt, sequence 0, grows from left to right: reused runs are
given to it without a copy, and computed ones decoded, each after all that precedes it (rule 5).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from pictool.core import Layout, RowMask
from pictool.engines.llamacpp.contexts import Contexts
from pictool.engines.llamacpp.library import MAX_SEQUENCES, LlamaContext
from pictool.engines.llamacpp.sequences import KeptRows, KeptSequences, PromptSequence
from pictool.engines.llamacpp.state import LayerRows, StateFormat, read_rows
from pictool.errors import InputError, NotFiniteError, TraceError
from pictool.linker.fusor import always_computed
from pictool.linker.link import Linked, PreparedLink
from pictool.linker.loader import PlacedObject
from pictool.linker.narrowing import Narrowing
from pictool.linker.prefixes import FoundPrefix
from pictool.linker.residency import PoolUse
from pictool.runtime.memory.image import GROWTH
from pictool.runtime.tensors import require_finite

if TYPE_CHECKING:
    from pictool.runtime.memory.image import Image

_OTHER_SEQUENCES = 5  # of a context: the prompt, what is kept of it, the spare one, the guard, and that for reading
_MOST_GROUPS = MAX_SEQUENCES - _OTHER_SEQUENCES


class LlamaImage:
    """A linked prompt in a context of its own, which grows by the tokens that are appended.

    `logits` are those of the prompt's last token, float32 [vocab].

    Args:
        sequence: has the prompt's beginning. release: called with it when the image exists no more.
        is_exact: what is computed is right, whether the link ends or not.
    """

    states: ClassVar[None] = None  # hybrids are not linked here

    def __init__(
        self, stack: Contexts, layout: Layout, sequence: PromptSequence, release: Callable[[PromptSequence], None],
        is_exact: bool = False,
    ) -> None:  # fmt: skip
        self.stack, self.layout, self.num_tokens, self.sequence = stack, layout, sequence.valid, sequence
        self.logits = torch.empty(0)
        self.computed: RowMask | None = None  # [n], once it is linked
        self.linked_from: int | None = None  # where the first linked part begins
        self._is_exact = is_exact
        self._guard(0, self.num_tokens)
        weakref.finalize(self, release, sequence)

    @property
    def context(self) -> LlamaContext:
        return self.sequence.context

    @property
    def spare(self) -> int:
        """A sequence for what is on its way; the last one is what others read by (`read_rows`)."""
        return self.context.num_sequences - 3

    def compute(self, end: int, wants_logits: bool = False) -> None:
        """Compute the prompt's tokens up to `end`."""
        self.context.decode(self.layout.tokens[self.num_tokens : end], self.num_tokens, wants_logits)
        self._advance(end)

    def reuse(self, sequence: int, end: int) -> None:
        """Take the tokens up to `end` from another sequence."""
        self.context.copy(sequence, 0, self.num_tokens, end)
        self._advance(end)

    def finish(self, num_groups: int) -> None:
        """The prompt is whole: it needs the other sequences no more."""
        self.logits = torch.from_numpy(self.context.logits())
        for sequence in (*range(1, num_groups + 1), self.spare):
            self.context.remove(sequence)
        self._is_exact, self.sequence.valid = True, self.num_tokens

    def append(self, token: int, on_scores: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        """Append one token; returns the logits after it, float32 [vocab]."""
        assert on_scores is None
        if self.num_tokens == self.context.num_cells:
            self._grow()
        self.context.decode([token], self.num_tokens, wants_logits=True)
        self.sequence.appended.append(token)
        self._advance(self.num_tokens + 1)
        return torch.from_numpy(self.context.logits())

    def rewind(self) -> None:
        """Forget what was appended after the prompt."""
        self.num_tokens = self.sequence.valid = self.layout.num_tokens
        self.sequence.appended.clear()
        for sequence in (0, self._guarding):
            self.context.remove(sequence, self.num_tokens, -1)

    def _advance(self, end: int) -> None:
        self._guard(self.num_tokens, end)
        self.num_tokens = end
        if self._is_exact:
            self.sequence.valid = end

    @property
    def _guarding(self) -> int:
        return self.context.num_sequences - 2

    def _guard(self, start: int, end: int) -> None:
        """Let two sequences have the prompt: llama.cpp takes no cell then that a window has left."""
        if self.stack.facts.window and start < end:
            self.context.copy(0, self._guarding, start, end)

    def _grow(self) -> None:
        """Go on in a larger context."""
        rows, old = self._rows(0, self.num_tokens), self.context
        larger = self.stack.take(self.num_tokens + self.num_tokens // 4 + GROWTH, old.num_sequences)
        self.sequence.context = larger
        self.stack.give_back(old)
        larger.set_state(self.spare, self.stack.format.write(rows, np.arange(self.num_tokens, dtype=np.int32)))
        larger.copy(self.spare, 0, 0, self.num_tokens)
        self._guard(0, self.num_tokens)
        larger.remove(self.spare)

    def _rows(self, start: int, end: int) -> list[LayerRows]:
        return read_rows(self.context, self.stack.format, self.stack.facts.window, start, end)

    # What prefix chains store

    def keep_keys(self) -> None:
        """Rows are read when they are stored."""

    @property
    def fresh_keys(self) -> list[torch.Tensor]:
        """Rotated keys of the rows that were computed, by layer [1, kv_heads, rows, head_dim]."""
        assert self.computed is not None
        at = torch.from_numpy(self.computed)
        return [torch.from_numpy(key)[None][:, :, at] for key, _ in self._packed()]

    def unrotated(self, layer: int, key: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of positions [start, end), [kv_heads, n, head_dim]; K is `key`, of `fresh_keys`."""
        return key, self.value(layer)[0, :, start:end]

    def value(self, layer: int) -> torch.Tensor:
        """Values of a layer, [1, kv_heads, n, head_dim]."""
        return torch.from_numpy(self._packed()[layer][1])[None]

    def key(self, layer: int) -> torch.Tensor:
        raise TraceError("the llamacpp engine does not support traces; use the torch engine")

    def _packed(self) -> list[tuple[NDArray[np.generic], NDArray[np.generic]]]:
        if self._kept is None:
            self._kept = list(map(self.stack.format.pack, self._rows(0, self.layout.num_tokens)))
        return self._kept

    _kept: list[tuple[NDArray[np.generic], NDArray[np.generic]]] | None = None

    @property
    def raw_tokens(self) -> list[int]:
        """See `ExactImage`."""
        return [*self.layout.tokens.tolist(), *self.sequence.appended][: self.linked_from]

    def raw(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ExactImage`; keys are as those of objects are here, rotated to their positions."""
        if layer == 0:
            self._part = list(map(self.stack.format.pack, self._rows(start, end)))
        key, value = self._part[layer]
        return torch.from_numpy(key), torch.from_numpy(value)


@dataclass(frozen=True)
class ReusedCells:
    """Rows of one object that are reused: `rows` are the prompt's, `source` the object's own, both ascending."""

    part: PlacedObject
    rows: NDArray[np.int64]
    source: NDArray[np.int64]

    @property
    def compiled_at(self) -> int:
        """The position of the object's first token when it was compiled: after what came before, or in its chain."""
        meta = self.part.file.meta
        return meta.num_before if meta.parent is None else self.part.start - self.part.offset

    @property
    def distance(self) -> int:
        return self.part.start - self.part.offset - self.compiled_at

    @property
    def positions(self) -> NDArray[np.int32]:
        return (self.source + self.compiled_at).astype(np.int32)

    def read(self, form: StateFormat, layer: int) -> tuple[LayerRows, int]:
        """The rows of a layer, checked, and the bytes that were read for them."""
        keys, values = form.unpack(layer, *self.part.file.layer(layer))
        return (keys[self.source], values[self.source]), self.part.file.stored_bytes(layer)


Cells = ReusedCells | KeptRows  # what is set


def compute(prepared: PreparedLink) -> Linked:
    """The passes of a link over its image.

    Raises:
        PicError: a damaged object, numbers that are not finite, no memory, or a prefix that was lost meanwhile.
    """
    model, layout, context = prepared.run.model, prepared.prompt_parts.layout, prepared.run.context
    clock, reused, found = prepared.run.clock, prepared.reused, context.found
    selection = reused.selection or prepared.run.spec.policy.select(reused.prompt)
    always = always_computed(reused.prompt, prepared.prompt_parts.required)
    exact = None if found is None else found.exact_rows
    computed = Narrowing(reused.prompt, prepared.run.spec.policy, selection, always, exact).on
    placed = [*context.restored, *reused.placed]
    clock.select_s += clock.lap()

    image, kept = _new_image(prepared, _groups(_reuses(placed, computed)))
    start = image.num_tokens
    computed[:start] = False
    groups = _groups([*kept, *_reuses(placed, computed, start)])
    image.linked_from = min((part.start for part in reused.placed), default=None)
    sequences, bytes_read = _load(image, groups)
    load_s = clock.lap()
    clock.load_s += load_s
    _join(image, sequences)
    try:
        require_finite(model.name, model.dtype, torch.from_numpy(image.context.logits()))
    except NotFiniteError:
        image.sequence.valid = 0
        raise
    image.finish(len(groups))
    timing = clock.timing(load_s)
    image.computed = computed
    rows = np.broadcast_to(computed, (model.geometry.layers, layout.num_tokens)).copy()
    as_image = cast("Image", image)
    context.keep(as_image, rows)
    linked = prepared.linked(as_image, rows, selection.scores, timing, bytes_read)
    if found is None:
        return linked
    cast("KeptSequences", context.prefixes).share(image.sequence)
    return replace(linked, pool=_pool_use(start, reused.placed, found), prefix=found)


def _new_image(prepared: PreparedLink, groups: Mapping[int, object]) -> tuple[LlamaImage, list[KeptRows]]:
    """An image in which the beginning of the prompt may be already, and what else is kept of the prompt."""
    stack, context, layout = (
        cast("Contexts", prepared.run.model.stack),
        prepared.run.context,
        prepared.reused.prompt.layout,
    )
    num_sequences = len(groups) + _OTHER_SEQUENCES
    if context.found is None:
        sequence = PromptSequence(stack.take(layout.num_tokens + GROWTH, num_sequences))
        return LlamaImage(stack, layout, sequence, lambda each: stack.give_back(each.context)), []
    kept, may_stay = cast("KeptSequences", context.prefixes), not stack.facts.scales or not any(groups)
    sequence, copies = kept.take(context.found, layout.num_tokens, num_sequences, may_stay)
    return LlamaImage(stack, layout, sequence, kept.give_back, is_exact=not groups and not copies), copies


def _pool_use(start: int, placed: Sequence[PlacedObject], found: FoundPrefix) -> PoolUse:
    """What a link got of what is kept; objects before `start` stayed where an earlier prompt linked them."""
    stayed = sum(max(0, min(part.end, start) - part.start) for part in placed)
    loaded = sum(part.end - part.start for part in placed) - stayed
    return PoolUse(resident=stayed, stayed=stayed, loaded=loaded, prefix=int(found.exact_rows.sum()))


def _load(image: LlamaImage, groups: Mapping[int, Sequence[Cells]]) -> tuple[NDArray[np.int64], int]:
    """Read and check what is reused, and set it in the sequence of its distance.

    Returns:
        int64 [n], the sequence of each reused row, 0 for computed ones; the bytes that were read from objects.
    """
    sequences, bytes_read = np.zeros(image.layout.num_tokens, dtype=np.int64), 0
    for sequence, (distance, cells) in enumerate(groups.items(), 1):
        bytes_read += _set(image, sequence, cells, is_moved=any(groups))
        image.context.copy(sequence, image.spare, -1, -1)
        image.context.shift(sequence, distance)
        for each in cells:
            sequences[each.rows] = sequence
    return sequences, bytes_read


def _join(image: LlamaImage, sequences: NDArray[np.int64]) -> None:
    """Grow the prompt from left to right by reused and computed runs; the tail is the last."""
    for end, sequence in _runs(sequences, image.num_tokens):
        if sequence:
            image.reuse(sequence, end)
        else:
            image.compute(end, wants_logits=end == image.layout.num_tokens)


def _reuses(placed: Sequence[PlacedObject], computed: RowMask, start: int = 0) -> Iterator[ReusedCells]:
    """The rows of objects from `start` on that are not computed."""
    for part in placed:
        first = max(start, part.start)
        rows = first + np.flatnonzero(~computed[first : part.end])
        if len(rows):
            yield ReusedCells(part, rows, rows - part.start + part.offset)


def _groups(cells: Iterable[Cells]) -> Mapping[int, list[Cells]]:
    """By distance. Raises InputError: more distances than llama.cpp has sequences."""
    groups = defaultdict[int, list[Cells]](list)
    for each in cells:
        groups[each.distance].append(each)
    if len(groups) > _MOST_GROUPS:
        raise InputError(f"the prompt has {len(groups)} documents, but llama.cpp moves {_MOST_GROUPS}; link fewer")
    return groups


def _set(image: LlamaImage, sequence: int, cells: Sequence[Cells], is_moved: bool) -> int:
    """Set a sequence to rows, where these were compiled. Returns the bytes that were read.

    Args:
        is_moved: a pass will move keys, and multiply all of them by the model's scales: they are divided before.
    """
    stack, num_bytes, layers = image.stack, 0, list[LayerRows]()
    for layer in range(stack.geometry.layers):
        parts = list[LayerRows]()
        for each in cells:
            part, read = each.read(stack.format, layer)
            parts.append(part)
            num_bytes += read
        key, value = (np.concatenate(both) if len(parts) > 1 else both[0] for both in zip(*parts, strict=True))
        if is_moved and stack.facts.scales:
            key = (key / np.asarray(stack.facts.scales[layer], dtype=np.float32)).astype(key.dtype)
        layers.append((key, value))
    positions = np.concatenate([each.positions for each in cells])
    image.context.set_state(sequence, stack.format.write(layers, positions))
    return num_bytes


def _runs(sequences: NDArray[np.int64], start: int) -> Iterator[tuple[int, int]]:
    """The end of each run of equal numbers from `start` on, and the number."""
    borders = start + 1 + np.flatnonzero(np.diff(sequences[start:]))
    for end in [*borders.tolist(), len(sequences)]:
        yield end, int(sequences[end - 1])
