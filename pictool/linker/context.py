"""Where the KV that a link reuses comes from: objects of its chunks, or the stored beginning of the prompt (§3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pictool.core import Chunk, CompileOptions, FixupTable, Identity, Layout, RowMask
from pictool.errors import NotFiniteError, ObjectError, PicError, RemoteError, StoreError, UnwritableStoreError
from pictool.linker.loader import PlacedObject
from pictool.linker.policies.base import Policy, Prompt, Selection
from pictool.linker.prefixes import BLOCK
from pictool.linker.resolve import OnCompile, Part, open_objects
from pictool.runtime import turns
from pictool.runtime.memory.image import Image
from pictool.runtime.memory.pool import PooledImage
from pictool.runtime.memory.states import LinearState
from pictool.runtime.tensors import to_bytes
from pictool.store.files import allow_open_files
from pictool.store.objects.chains import Chain
from pictool.store.objects.format import CompiledChunk, ObjectFile, ObjectMeta
from pictool.store.store import Store
from pictool.store.upkeep import find_problem, take_out

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_CHAIN_CODEC = "none"  # chains are exact


@dataclass(frozen=True)
class ReusePlan:
    """What a link reuses: open objects where they are in the prompt, and the prompt with what only these tell.

    `compile_s` is what compiling took of the time.
    """

    placed: list[PlacedObject]
    prompt: Prompt
    compile_s: float = 0.0


class Context(Protocol):
    """Where the KV that is reused comes from."""

    def open(
        self, prompt: Prompt, parts: Sequence[Part], policy: Policy, selection: Selection | None, opened: ExitStack
    ) -> ReusePlan:
        """Open what is reused, until `opened` is closed. `parts` are head and chunks; `selection` may come later."""
        ...

    def open_maps(self, reused: ReusePlan, opened: ExitStack) -> ReusePlan:
        """Open the objects with the states of stored runs (`PlacedObject.stored`), as `open`."""
        ...

    def prepare(self, image: Image) -> None:
        """Prepare an image before anything is computed."""

    def keep(self, image: Image, rows: RowMask) -> None:
        """Store what was computed, if that is to be reused; `rows` is bool [layers, n]."""

    def recover(self, error: PicError) -> bool:
        """After something turned out damaged or lost: do without it. False if the link cannot be tried again."""
        ...


def context_of(store: Store, policy: Policy, on_compile: OnCompile | None) -> Context:
    """The context that a policy needs."""
    block = policy.needs.chain_block
    return ChainContext(store, block) if block else ObjectContext(store, on_compile)


def reused_parts(
    prompt: Prompt, parts: Sequence[Part], policy: Policy, selection: Selection | None
) -> list[tuple[Part, int]]:
    """The parts of which something is, or may be, reused or compared, each with its start; `parts` are head and chunks.

    Args:
        selection: None if it is not made yet.
    """
    may_be_any = selection is None or bool(policy.check_layers(prompt.model.geometry.layers))
    return [
        (part, start)
        for part, (start, end) in zip(parts, [prompt.layout.head, *prompt.layout.chunks], strict=True)
        if start < end
        and part.has_object
        and (may_be_any or (selection is not None and not selection.rows[start:end].all()))
    ]


class ObjectContext:
    """The objects of head and chunks. Texts that are not compiled yet are compiled first."""

    def __init__(self, store: Store, on_compile: OnCompile | None) -> None:
        self._store, self._on_compile = store, on_compile
        self._texts: Callable[[], set[str]] = set  # keys of objects that can be compiled again
        self._files: list[Path] = []  # objects that cannot: they were named as files or keys
        self._healed: set[str] = set()  # those that were
        self._stuck: set[str] = set()  # damaged ones that cannot be taken out of the store

    def open(
        self, prompt: Prompt, parts: Sequence[Part], policy: Policy, selection: Selection | None, opened: ExitStack
    ) -> ReusePlan:
        """Open the objects of those parts of which something is, or may be, reused or compared."""
        needed = reused_parts(prompt, parts, policy, selection)
        objects = [part for part, _ in needed]
        self._texts = lambda: {key for part in objects if part.file is None for key in part.keys(prompt.model)}
        self._files = [part.file.path for part in objects if part.file is not None]
        files, compile_s = open_objects(prompt.model, self._store, objects, opened, self._on_compile, self._stuck)
        placed = [
            PlacedObject(file, start, part.offset, len(part.chunk))
            for file, (part, start) in zip(files, needed, strict=True)
        ]
        if policy.needs.tables:
            prompt = replace(prompt, tables=_tables(placed, prompt.layout))
        return ReusePlan(placed, prompt, compile_s)

    def open_maps(self, reused: ReusePlan, opened: ExitStack) -> ReusePlan:
        model, placed = reused.prompt.model, list[PlacedObject]()
        wanted = {part: [_map_part(model, part, run) for run in part.stored] for part in reused.placed}
        missing = list(dict.fromkeys(own for parts in wanted.values() for own in parts if own.file is None))
        texts = self._texts
        self._texts = lambda: texts() | {own.key(model) for own in missing}
        files, compile_s = open_objects(model, self._store, missing, opened, None, self._stuck)
        of_part = dict(zip(missing, files, strict=True))
        for own, file in of_part.items():
            if file.meta.cut != own.options.cut:
                raise ObjectError(
                    f"{file.name}: has states after {file.meta.cut} tokens, not {own.options.cut}; delete it"
                )
        for part, parts in wanted.items():
            placed.append(replace(part, maps=tuple(own.file or of_part[own] for own in parts)))
        return replace(reused, placed=placed, compile_s=reused.compile_s + compile_s)

    def prepare(self, image: Image) -> None:
        pass

    def keep(self, image: Image, rows: RowMask) -> None:
        pass

    def recover(self, error: PicError) -> bool:
        """An object that was read while it came from a remote, or is damaged here, is compiled here from its text.

        Raises:
            ObjectError: numbers are not finite because those of an object are not that was named as a file or key.
        """
        if isinstance(error, RemoteError):
            self._store.skip_remote(error)
            return True
        damaged = [key for key in sorted(self._texts() - self._healed) if self._take_out(key)]
        if isinstance(error, NotFiniteError):
            damaged += [key for key in sorted(self._texts() - self._healed) if self._leave_out(key)]
            for path in () if damaged else self._files:
                with ObjectFile(path) as file:
                    file.verify()
        self._healed.update(damaged)
        return bool(damaged)

    def _leave_out(self, key: str) -> bool:
        """Do without the remote's object, if it was read while it came, and is not taken into the store."""
        if self._store.path(key).exists():
            return False
        try:
            self._store.fetch(key)
        except RemoteError as error:
            self._store.skip_remote(error)
            return True
        return False

    def _take_out(self, key: str) -> bool:
        """Take an object out if it is damaged; one that cannot be taken out is not used any more."""
        problem = find_problem(self._store, key)
        if not isinstance(problem, ObjectError):
            return False
        try:
            if not take_out(self._store, key):
                return False
        except UnwritableStoreError:
            self._stuck.add(key)
        self._store.warn_of_damage(problem)
        return True


def _map_part(model: Model, part: PlacedObject, run: tuple[int, int]) -> Part:
    """What has the states of a run [a, b) of an object's tokens: itself, or the object of its first b tokens."""
    (cut, end), meta = run, part.file.meta
    if (meta.cut, meta.num_tokens) == run:
        return Part(Chunk("", (), part.file.name), file=part.file)
    tokens = tuple(part.file.tokens()[:end].tolist())
    text = part.file.text() if end == meta.num_tokens else str(model.tokenizer.decode(list(tokens)))
    return Part(Chunk(text, tokens, part.file.name), CompileOptions(codec=meta.codec, cut=cut))


def _tables(placed: Sequence[PlacedObject], layout: Layout) -> tuple[FixupTable | None, ...]:
    """The table of every chunk's object, in prompt order; 0 for tokens that have none, since they are computed."""
    objects = {part.start: part for part in placed}
    return tuple(_table(objects.get(start), end - start) for start, end in layout.chunks if start < end)


def _table(part: PlacedObject | None, length: int) -> FixupTable | None:
    if part is None:
        return np.zeros(length, dtype=np.float16)
    table = part.file.fixups()
    return None if table is None else table[part.offset : part.offset + length]


class ChainContext:
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
        return ReusePlan(placed, replace(prompt, cached=self._count * self._block))

    def open_maps(self, reused: ReusePlan, opened: ExitStack) -> ReusePlan:
        return reused

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
            self._keys[depth], self._model.target, self._block, 0, _CHAIN_CODEC, parent=parent,
            rotation=self._rotation or None, salted=self._blocks[depth].salted,
        )  # fmt: skip
        tokens = self._layout.tokens[slice(*self._span(depth))]
        return CompiledChunk(meta, str(self._model.tokenizer.decode(tokens.tolist())), tokens, pairs, states=states)


def _state_bytes(state: LinearState) -> tuple[memoryview, ...]:
    return tuple(to_bytes(part) for part in (state.tail, state.recurrent) if part is not None)


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

    def keep_image(self, model: Model, image: PooledImage) -> None:
        """Store the blocks of a prompt and its answer up to the first that a linked part is in; warns as `keep`."""
        model.require_storable()
        self._identify(model, Layout.of(image.raw_tokens, [], []))
        try:
            for depth in range(len(self._keys)):
                if self._chain.has(depth):
                    continue
                layers = range(image.stack.num_layers)
                pairs = [tuple(map(to_bytes, image.raw(layer, *self._span(depth)))) for layer in layers]
                if not self._chain.put(depth, self._chunk(depth, pairs)):
                    return
                turns.checkpoint()
        except StoreError as error:
            self._store.on_warning(f"a prefix is not kept: {error}")
