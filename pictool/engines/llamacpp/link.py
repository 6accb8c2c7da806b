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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from pictool.core import Layout, RowMask
from pictool.engines.llamacpp.library import MAX_SEQUENCES, LlamaContext, LlamaContextOptions, Weights
from pictool.engines.llamacpp.state import LayerRows, StateFormat, read_rows
from pictool.engines.llamacpp.trial import Facts
from pictool.errors import InputError, TraceError
from pictool.linker.fusor import always_computed
from pictool.linker.link import Linked, PreparedLink
from pictool.linker.loader import PlacedObject
from pictool.linker.narrowing import Narrowing
from pictool.runtime.tensors import require_finite

if TYPE_CHECKING:
    from pictool.runtime.memory.image import Image

_GROWTH = 256  # tokens that a context has room for after the prompt
_IDLE = 2  # contexts that are kept for the next link
_FEWEST_SEQUENCES = 16


class Contexts:
    """Contexts over one model's weights; a few idle ones wait for the next prompt.

    Attributes:
        device, dtype, num_layers, format: of the KV of objects. facts: of the file.
    """

    def __init__(self, weights: Weights, options: LlamaContextOptions, form: StateFormat, facts: Facts) -> None:
        self._weights, self._options, self.format, self.facts = weights, options, form, facts
        self._idle: list[LlamaContext] = []
        self.geometry, self.num_layers = form.geometry, form.geometry.layers
        self.device, self.dtype = torch.device("cpu"), getattr(torch, options.dtype)

    def take(self, num_cells: int, num_sequences: int) -> LlamaContext:
        """An empty context with so much room. Raises ModelError: there is no memory for it."""
        threads = torch.get_num_threads()
        fitting = [c for c in self._idle if c.num_cells >= num_cells and c.num_sequences >= num_sequences]
        if fitting:
            context = min(fitting, key=lambda context: context.num_cells)
            self._idle.remove(context)
            context.set_threads(threads)
            return context
        sequences = min(MAX_SEQUENCES, max(_FEWEST_SEQUENCES, 1 << (num_sequences - 1).bit_length()))
        return LlamaContext(self._weights, self._options, num_cells, sequences, threads)

    def give_back(self, context: LlamaContext) -> None:
        """The context is not used any more."""
        context.clear()
        self._idle.append(context)
        for old in self._idle[:-_IDLE]:
            old.close()
        del self._idle[:-_IDLE]

    def rotation_id(self, _: int) -> str:
        """See `LayerStack.rotation_id`: no rotation depends on the length of a prompt."""
        return ""

    def is_length_dependent(self, *_: int) -> bool:
        return False


class LlamaImage:
    """A linked prompt in a context of its own, which grows by the tokens that are appended.

    `logits` are those of the prompt's last token, float32 [vocab].
    """

    states: ClassVar[None] = None  # hybrids are not linked here

    def __init__(self, stack: Contexts, layout: Layout, num_sequences: int) -> None:
        self.stack, self.layout, self.num_tokens = stack, layout, 0
        self.logits = torch.empty(0)
        self.computed: RowMask | None = None  # [n], once it is linked
        self._hold(stack.take(layout.num_tokens + _GROWTH, num_sequences))

    def _hold(self, context: LlamaContext) -> None:
        self.context, self.spare = context, context.num_sequences - 1
        self._release = weakref.finalize(self, self.stack.give_back, context)

    def compute(self, end: int, wants_logits: bool = False) -> None:
        """Compute the prompt's tokens up to `end`."""
        self.context.decode(self.layout.tokens[self.num_tokens : end], self.num_tokens, wants_logits)
        self.num_tokens = end

    def reuse(self, sequence: int, end: int) -> None:
        """Take the tokens up to `end` from another sequence."""
        self.context.copy(sequence, 0, self.num_tokens, end)
        self.num_tokens = end

    def append(self, token: int, on_scores: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        """Append one token; returns the logits after it, float32 [vocab]."""
        assert on_scores is None
        if self.num_tokens == self.context.num_cells:
            self._grow()
        self.context.decode([token], self.num_tokens, wants_logits=True)
        self.num_tokens += 1
        self.context.remove(self.spare)
        return torch.from_numpy(self.context.logits())

    def rewind(self) -> None:
        """Forget what was appended after the prompt."""
        self.context.remove(0, self.layout.num_tokens, -1)
        self.num_tokens = self.layout.num_tokens

    def _grow(self) -> None:
        """Go on in a larger context."""
        rows, old = self._rows(0, self.num_tokens), self._release
        larger = self.stack.take(self.num_tokens + self.num_tokens // 4 + _GROWTH, self.context.num_sequences)
        spare = larger.num_sequences - 1
        larger.set_state(spare, self.stack.format.write(rows, np.arange(self.num_tokens, dtype=np.int32)))
        larger.copy(spare, 0, 0, self.num_tokens)
        old()
        self._hold(larger)

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


def compute(prepared: PreparedLink) -> Linked:
    """The passes of a link over its image.

    Raises:
        PicError: a damaged object, numbers that are not finite, or no memory.
    """
    model, layout = prepared.run.model, prepared.prompt_parts.layout
    stack = cast("Contexts", model.stack)
    clock, reused = prepared.run.clock, prepared.reused
    selection = reused.selection or prepared.run.spec.policy.select(reused.prompt)
    always = always_computed(reused.prompt, prepared.prompt_parts.required)
    computed = Narrowing(reused.prompt, prepared.run.spec.policy, selection, always).on
    groups = _groups(_reuses(reused.placed, computed))
    clock.select_s += clock.lap()

    image = LlamaImage(stack, layout, len(groups) + 2)
    sequences, bytes_read = _load(image, groups)
    load_s = clock.lap()
    clock.load_s += load_s
    _join(image, sequences)
    image.logits = torch.from_numpy(image.context.logits())
    require_finite(model.name, model.dtype, image.logits)
    for sequence in (*range(1, len(groups) + 1), image.spare):
        image.context.remove(sequence)
    timing = clock.timing(load_s)
    image.computed = computed
    rows = np.broadcast_to(computed, (model.geometry.layers, layout.num_tokens)).copy()
    as_image = cast("Image", image)
    prepared.run.context.keep(as_image, rows)
    return prepared.linked(as_image, rows, selection.scores, timing, bytes_read)


def _load(image: LlamaImage, groups: Mapping[int, Sequence[ReusedCells]]) -> tuple[NDArray[np.int64], int]:
    """Read and check every object, and set it in the sequence of its distance.

    Returns:
        int64 [n], the sequence of each reused row, 0 for computed ones; the bytes that were read.
    """
    sequences, bytes_read = np.zeros(image.layout.num_tokens, dtype=np.int64), 0
    for sequence, (distance, reuses) in enumerate(groups.items(), 1):
        bytes_read += _set(image, sequence, reuses, is_moved=any(groups))
        image.context.copy(sequence, image.spare, -1, -1)
        image.context.shift(sequence, distance)
        for reuse in reuses:
            sequences[reuse.rows] = sequence
    return sequences, bytes_read


def _join(image: LlamaImage, sequences: NDArray[np.int64]) -> None:
    """Grow the prompt from left to right by reused and computed runs; the tail is the last."""
    for end, sequence in _runs(sequences):
        if sequence:
            image.reuse(sequence, end)
        else:
            image.compute(end, wants_logits=end == image.layout.num_tokens)


def _reuses(placed: Sequence[PlacedObject], computed: RowMask) -> Iterator[ReusedCells]:
    for part in placed:
        rows = part.start + np.flatnonzero(~computed[part.start : part.end])
        if len(rows):
            yield ReusedCells(part, rows, rows - part.start + part.offset)


def _groups(reuses: Iterator[ReusedCells]) -> Mapping[int, list[ReusedCells]]:
    """By distance. Raises InputError: more distances than llama.cpp has sequences."""
    groups = defaultdict[int, list[ReusedCells]](list)
    for reuse in reuses:
        groups[reuse.distance].append(reuse)
    if len(groups) > MAX_SEQUENCES - 2:
        raise InputError(
            f"the prompt has {len(groups)} documents, but llama.cpp moves {MAX_SEQUENCES - 2} at most; link fewer"
        )
    return groups


def _set(image: LlamaImage, sequence: int, reuses: Sequence[ReusedCells], is_moved: bool) -> int:
    """Set a sequence to rows of objects, where these were compiled. Returns the bytes that were read.

    Args:
        is_moved: a pass will move keys, and multiply all of them by the model's scales: they are divided before.
    """
    stack, num_bytes, layers = image.stack, 0, list[LayerRows]()
    for layer in range(stack.geometry.layers):
        parts = list[LayerRows]()
        for reuse in reuses:
            file = reuse.part.file
            num_bytes += file.stored_bytes(layer)
            keys, values = stack.format.unpack(layer, *file.layer(layer))
            parts.append((keys[reuse.source], values[reuse.source]))
        key, value = (np.concatenate(both) if len(parts) > 1 else both[0] for both in zip(*parts, strict=True))
        if is_moved and stack.facts.scales:
            key = (key / np.asarray(stack.facts.scales[layer], dtype=np.float32)).astype(key.dtype)
        layers.append((key, value))
    positions = np.concatenate([reuse.positions for reuse in reuses])
    image.context.set_state(sequence, stack.format.write(layers, positions))
    return num_bytes


def _runs(sequences: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """The end of each run of equal numbers, and the number."""
    borders = np.flatnonzero(np.diff(sequences)) + 1
    for end in [*borders.tolist(), len(sequences)]:
        yield end, int(sequences[end - 1])
