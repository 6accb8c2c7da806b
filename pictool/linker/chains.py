"""Chains: the stored beginning of a prompt in blocks, each keyed by all that precedes it (docs/design.md §3)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from pictool.core import Identity, Layout, RowMask
from pictool.errors import PicError, StoreError
from pictool.linker.loader import PlacedObject
from pictool.linker.objects import Context, ReusePlan
from pictool.linker.policies.base import Policy, Prompt, Selection
from pictool.linker.prefixes import BLOCK
from pictool.linker.resolve import Part
from pictool.runtime import turns
from pictool.runtime.memory.caches import LayerKV
from pictool.runtime.memory.image import Image
from pictool.runtime.memory.states import LinearState
from pictool.runtime.tensors import to_bytes
from pictool.store.files import allow_open_files
from pictool.store.objects.chains import Chain
from pictool.store.objects.format import CompiledChunk, ObjectFile, ObjectMeta
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_CHAIN_CODEC = "none"  # chains are exact


class ChainContext(Context):
    """The stored beginning of the prompt in blocks of `block` tokens, each keyed by all that precedes it.

    What is computed is stored, so that the next prompt with the same beginning reuses more.
    """

    _model: Model
    _layout: Layout
    _blocks: list[Identity]
    _keys: list[str]
    _rotation: str
    _chain: Chain

    def __init__(self, store: Store, block: int) -> None:
        self._store, self._block = store, block
        self._limit: int | None = None  # blocks, once one turned out damaged
        self._count = 0  # blocks that are reused

    def open(
        self, prompt: Prompt, parts: Sequence[Part], policy: Policy, selection: Selection | None, opened: ExitStack
    ) -> ReusePlan:
        """Open the longest stored beginning: whole blocks of the context only, since the tail is always computed."""
        self._identify(prompt.model, prompt.layout)
        placed = self._open(opened)
        return ReusePlan(placed, replace(prompt, cached=self._count * self._block), selection, is_chain=True)

    def _identify(self, model: Model, layout: Layout) -> None:
        self._rotation = model.stack.rotation_id(layout.num_tokens)
        self._model, self._layout = model, layout
        self._blocks = model.target.identify_blocks(layout.tokens, self._block, self._rotation, model.salt)
        self._keys = [block.key for block in self._blocks]
        self._chain = Chain(self._store, self._keys)

    def _open(self, opened: ExitStack) -> list[PlacedObject]:
        if self._limit is None:
            self._limit = allow_open_files(self._layout.num_context // self._block)
        files = [opened.enter_context(file) for file in self._chain.open(self._limit)]
        self._count = next((i for i, file in enumerate(files) if not self._is_own(i, file)), len(files))
        return [PlacedObject(file, i * self._block) for i, file in enumerate(files[: self._count])]

    def prepare(self, image: Image) -> None:
        """Keep keys before their rotation, and states at the ends of blocks: those are stored."""
        image.keep_keys()
        if image.states is not None:
            image.states.keep_borders(self._block)

    def recover(self, error: PicError) -> bool:
        """The chain ends before a damaged block from now on. False if none of its blocks is damaged."""
        damaged = self._chain.find_damaged(self._count)
        if damaged is None:
            return False
        self._limit, problem = damaged
        self._store.on_warning(f"{problem}; computed again")
        return True

    def keep(self, image: Image, rows: RowMask) -> None:
        """Store the whole blocks of the prompt that were computed, the tail's among them.

        A store that cannot be written costs the next prompt time, and this one nothing but a warning.
        """
        self._model.require_storable()
        borders = {} if image.states is None else image.states.take_borders()
        try:
            for depth in range(self._count, len(self._keys)):
                states = [_state_bytes(state) for state in borders.get(self._span(depth)[1], ())]
                if not self._chain.put(depth, self._compiled(image, rows[0], depth, states)):
                    return
        except StoreError as error:
            self._store.on_warning(f"the prefix chain is not stored: {error}")

    def _is_own(self, depth: int, file: ObjectFile) -> bool:
        """Whether a block is of this model, and of the tokens that its key is made of."""
        meta = file.meta
        tokens = self._layout.tokens[depth * self._block : (depth + 1) * self._block]
        return (
            (meta.target, meta.codec, meta.num_tokens) == (self._model.target, _CHAIN_CODEC, self._block)
            and meta.parent == (self._keys[depth - 1] if depth else "")
            and np.array_equal(file.tokens(), tokens)
        )

    def _compiled(
        self, image: Image, rows: RowMask, depth: int, states: Sequence[tuple[memoryview, ...]]
    ) -> CompiledChunk:
        start, end = self._span(depth)
        assert image.fresh_keys is not None and rows[start:end].all()
        first = int(rows[:start].sum())  # of the block, among the computed rows
        pairs = [
            tuple(map(to_bytes, image.unrotated(layer, key[0, :, first : first + self._block], start, end)))
            for layer, key in enumerate(image.fresh_keys)
        ]
        return self._chunk(depth, pairs, states)

    def _span(self, depth: int) -> tuple[int, int]:
        return depth * self._block, (depth + 1) * self._block

    def _chunk(
        self, depth: int, pairs: list[tuple[memoryview, ...]], states: Sequence[tuple[memoryview, ...]] = ()
    ) -> CompiledChunk:
        parent = self._keys[depth - 1] if depth else ""
        meta = ObjectMeta(
            self._keys[depth], self._model.target, self._block, _CHAIN_CODEC, parent=parent,
            rotation=self._rotation or None, salted=self._blocks[depth].salted,
        )  # fmt: skip
        tokens = self._layout.tokens[slice(*self._span(depth))]
        return CompiledChunk(meta, str(self._model.tokenizer.decode(tokens.tolist())), tokens, pairs, states=states)


def _state_bytes(state: LinearState) -> tuple[memoryview, ...]:
    return tuple(to_bytes(part) for part in (state.tail, state.recurrent) if part is not None)


@runtime_checkable
class ExactImage(Protocol):
    """An image that gives the exact KV of its beginning, before the first linked part.

    Attributes:
        raw_tokens: the tokens of the prompt and its answer whose KV `raw` gives.
    """

    @property
    def raw_tokens(self) -> Sequence[int]: ...

    def raw(self, layer: int, start: int, end: int) -> LayerKV:
        """K and V of positions [start, end) as a chain stores them, [kv_heads, n, head_dim]."""


class KeptChain(ChainContext):
    """Exact prefixes of a pool on disk, as the same chains: read into an image's region, and written from it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, BLOCK)

    def open_after(self, model: Model, layout: Layout, start: int, opened: ExitStack) -> list[PlacedObject]:
        """The stored blocks of a prompt from token `start` on, none if the first is not there."""
        self._identify(model, layout)
        self._count, first = 0, start // self._block
        if first >= len(self._keys) or not self._chain.has(first):
            return []
        return [part for part in self._open(opened) if part.start >= start]

    def keep_image(self, model: Model, image: ExactImage) -> None:
        """Store the blocks of a prompt and its answer that an image gives; warns as `keep`."""
        model.require_storable()
        self._identify(model, Layout.of(image.raw_tokens, [], []))
        try:
            for depth in range(len(self._keys)):
                if self._chain.has(depth):
                    continue
                layers = range(model.geometry.layers)
                pairs = [tuple(map(to_bytes, image.raw(layer, *self._span(depth)))) for layer in layers]
                if not self._chain.put(depth, self._chunk(depth, pairs)):
                    return
                turns.checkpoint()
        except StoreError as error:
            self._store.on_warning(f"a prefix is not kept: {error}")
