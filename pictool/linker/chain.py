"""The stored beginning of a prompt: what `prefix` reuses in place of objects, and what it stores (DESIGN §3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pictool.core import Layout, RowMask
from pictool.errors import StoreError
from pictool.linker.loader import Placed
from pictool.runtime.image import Image
from pictool.runtime.tensors import to_bytes
from pictool.store.chains import Chain
from pictool.store.files import allow_open_files
from pictool.store.format import CompiledChunk, ObjectFile, ObjectMeta
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_CODEC = "none"  # chains are exact


class PromptChain:
    """A prompt's blocks of `block` tokens, in a store."""

    def __init__(self, model: Model, store: Store, layout: Layout, block: int) -> None:
        rotation = model.stack.rotation_id(layout.num_tokens)
        self._keys = model.target.chain_keys(layout.tokens, block, rotation, model.salt)
        self._store, self._chain = store, Chain(store, self._keys)
        self._model, self._tokens, self._block = model, layout.tokens, block
        # The tail is always computed, so no block of it is read.
        self._limit = allow_open_files(layout.num_context // block)
        self._count = 0

    def open(self) -> list[Placed]:
        """The longest stored beginning, where it stands; whole blocks of the context only."""
        files = self._chain.open(self._limit)
        self._count = next((i for i, file in enumerate(files) if not self._is_own(i, file)), len(files))
        for file in files[self._count :]:
            file.close()
        return [Placed(file, i * self._block) for i, file in enumerate(files[: self._count])]

    def skip_damaged(self) -> bool:
        """After a block's KV turned out damaged: whether there is one, before which the chain ends from now on."""
        found = self._chain.find_damaged(self._count)
        if found is None:
            return False
        self._limit, problem = found
        self._store.on_warning(f"{problem}; computed again")
        return True

    def keep(self, image: Image, rows: RowMask) -> None:
        """Store the whole blocks of the prompt whose `rows` [n] were computed, the tail's among them.

        A store that cannot be written costs the next prompt time, and this one nothing but a warning.
        """
        try:
            for depth in range(self._count, len(self._keys)):
                if not self._chain.put(depth, self._compiled(image, rows, depth)):
                    return
        except StoreError as error:
            self._store.on_warning(f"the prefix chain is not stored: {error}")

    def _is_own(self, depth: int, file: ObjectFile) -> bool:
        """Whether a block is of this model, and of the tokens that its key is made of."""
        meta = file.meta
        tokens = self._tokens[depth * self._block : (depth + 1) * self._block]
        return (
            (meta.target, meta.codec, meta.num_tokens) == (self._model.target, _CODEC, self._block)
            and meta.parent == (self._keys[depth - 1] if depth else "")
            and np.array_equal(file.tokens(), tokens)
        )

    def _compiled(self, image: Image, rows: RowMask, depth: int) -> CompiledChunk:
        start, end = depth * self._block, (depth + 1) * self._block
        assert image.fresh_keys is not None and rows[start:end].all()
        first = int(rows[:start].sum())  # of the block, among the computed rows
        pairs = [
            (to_bytes(key[0, :, first : first + self._block]), to_bytes(image.value(layer)[0, :, start:end]))
            for layer, key in enumerate(image.fresh_keys)
        ]
        parent = self._keys[depth - 1] if depth else ""
        meta = ObjectMeta(self._keys[depth], self._model.target, self._block, 0, _CODEC, parent=parent)
        tokens = self._tokens[start:end]
        return CompiledChunk(meta, str(self._model.tokenizer.decode(tokens.tolist())), tokens, pairs)
