"""Where the KV that a link reuses comes from: of most policies, objects of its head and chunks (docs/design.md §3)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.compiler.compile import Compiled, OnCompile, compile_chunks
from pictool.core import Chunk, RowMask
from pictool.errors import (
    InputError,
    NotFiniteError,
    ObjectError,
    PicError,
    RemoteError,
    StoreError,
    UnwritableStoreError,
)
from pictool.linker.loader import PlacedObject
from pictool.linker.policies.base import Policy, Prompt, Selection
from pictool.linker.prefixes import FoundPrefix, Prefixes
from pictool.linker.residency import Reservation
from pictool.linker.resolve import Part, PromptParts
from pictool.runtime.graphs.image import new_image
from pictool.runtime.memory.image import Image
from pictool.store.objects.format import ObjectFile
from pictool.store.scratch import memory_directory
from pictool.store.store import Store
from pictool.store.upkeep import find_problem, take_out

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_ATTEMPTS = 8  # to open what was just compiled, while others evict


@dataclass(frozen=True)
class ReusePlan:
    """What a link reuses: open objects where they are in the prompt, and the prompt with what only these tell.

    Fields:
        selection: None if the policy is still to select.
        compile_s: what compiling took of the time.
        is_chain: whether it reuses blocks of a chain, which are in no pool.
    """

    placed: list[PlacedObject]
    prompt: Prompt
    selection: Selection | None
    compile_s: float = 0.0
    is_chain: bool = False

    @property
    def may_be_resident(self) -> bool:
        """Whether a pool may have something of it."""
        return bool(self.placed) and not self.is_chain


class Context(ABC):
    """Where the KV that is reused comes from. A link calls its methods in this order, and begins again after
    `recover`.

    Attributes:
        found: what earlier prompts computed of this one, in `prefixes`, and of that what is `restored` from disk.
    """

    found: FoundPrefix | None = None
    restored: Sequence[PlacedObject] = ()
    prefixes: Prefixes | None = None

    def exclude(self, model: Model, policy: Policy, prompt_parts: PromptParts, opened: ExitStack) -> PromptParts:
        """The parts of a prompt without the objects that are not needed."""
        return prompt_parts

    @abstractmethod
    def open(
        self, prompt: Prompt, parts: Sequence[Part], policy: Policy, selection: Selection | None, opened: ExitStack
    ) -> ReusePlan:
        """Open what is reused, until `opened` is closed. `parts` are head and chunks; `selection` may come later."""

    def reserve(self, reused: ReusePlan) -> Reservation:
        """Reserve the image."""
        prompt = reused.prompt
        return Reservation(new_image(prompt.model.stack, prompt.layout), list(reused.placed))

    def prepare(self, image: Image) -> None:  # noqa: B027 (most need nothing)
        """Prepare an image before anything is computed."""

    def keep(self, image: Image, rows: RowMask) -> None:  # noqa: B027 (most keep nothing)
        """Store what was computed, if that is to be reused; `rows` is bool [layers, n]."""

    @abstractmethod
    def recover(self, error: PicError) -> bool:
        """After something turned out damaged or lost: do without it. False if the link cannot be tried again."""


class ObjectContext(Context):
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
        may_be_any = selection is None or bool(policy.check_layers(prompt.model.geometry.layers))
        needed = [
            (part, start)
            for part, (start, end) in zip(parts, [prompt.layout.head, *prompt.layout.chunks], strict=True)
            if start < end
            and part.has_object
            and (may_be_any or (selection is not None and not selection.rows[start:end].all()))
        ]
        objects = [part for part, _ in needed]
        self._texts = lambda: {key for part in objects if part.file is None for key in part.keys(prompt.model)}
        self._files = [part.file.path for part in objects if part.file is not None]
        files, compile_s = self._open_objects(prompt.model, objects, opened)
        placed = [
            PlacedObject(file, start, part.offset, len(part.chunk))
            for file, (part, start) in zip(files, needed, strict=True)
        ]
        return ReusePlan(placed, prompt, selection, compile_s)

    def _open_objects(self, model: Model, parts: Sequence[Part], opened: ExitStack) -> tuple[list[ObjectFile], float]:
        """The open object of every part; texts that are not compiled yet are compiled first (and reported).

        Where the store cannot be written, or a damaged object cannot be taken out, they are compiled into memory.

        Returns:
            the objects, and the seconds that compiling took.

        Raises:
            PicError: an object of another model, or one that is not what its part was made of.
        """
        store, named = self._store, [(part, part.keys(model)) for part in parts]
        store.prefetch(keys[0] for part, keys in named if part.file is None)
        objects = {i: file for i, named_part in enumerate(named) if (file := self._find(*named_part, opened))}
        is_stuck = any(part.file is None and keys[-1] in self._stuck for part, keys in named)
        started, target = time.perf_counter(), _memory_store(opened) if is_stuck else store
        for _ in range(_ATTEMPTS):
            missing = {i: part for i, part in enumerate(parts) if i not in objects}
            if not missing:
                break
            try:
                objects |= _compile_missing(model, target, missing, self._on_compile, opened)
            except UnwritableStoreError as error:
                if target is not store:
                    raise
                store.on_warning(f"{error}; continuing with objects in memory")
                target = _memory_store(opened)
        else:
            raise StoreError(f"{store.root}: objects are evicted before they can be linked; raise its max_size")
        compile_s = time.perf_counter() - started
        for i, (part, keys) in enumerate(named):
            if part.file is None and objects[i].meta.key != keys[-1]:  # else the key says it
                _require_same(model, objects[i], part.chunk)
        return [objects[i] for i in range(len(parts))], compile_s

    def _find(self, part: Part, keys: Sequence[str], opened: ExitStack) -> ObjectFile | None:
        """The object of a part; None if it is to be compiled (not in the store, or damaged)."""
        if part.file is not None:
            if part.file.path == self._store.path(part.file.meta.key):
                self._store.mark_used(part.file)
            return part.file
        for key in keys:
            if key in self._stuck:
                continue
            try:
                file = self._store.open(key)
                if not file.stays_open:
                    opened.callback(file.close)
                return file
            except RemoteError as error:
                self._store.skip_remote(error)
            except (StoreError, ObjectError):
                continue
        return None

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


def _memory_store(opened: ExitStack) -> Store:
    """A store for this link alone."""
    try:
        return Store(opened.enter_context(memory_directory()))
    except OSError as error:
        raise UnwritableStoreError(
            f"{error.filename}: cannot be written ({error.strerror}); free some space"
        ) from error


def _require_same(model: Model, file: ObjectFile, chunk: Chunk) -> None:
    file.meta.require(model.target, file.name)
    if file.tokens().tolist() != list(chunk.tokens):
        raise InputError(f"{file.name}: was replaced while it was being linked; run the command again")


def _compile_missing(
    model: Model, store: Store, missing: Mapping[int, Part], on_compile: OnCompile | None, opened: ExitStack
) -> dict[int, ObjectFile]:
    """Compile what is missing, and open each object as soon as it is there; but for what was evicted even before."""
    objects: dict[int, ObjectFile] = {}

    def open_compiled(compiled: Compiled) -> None:
        if compiled.is_new and on_compile:
            on_compile(compiled)
        for i, part in missing.items():
            if i not in objects and part.key(model) == compiled.key:
                with suppress(StoreError):
                    objects[i] = opened.enter_context(store.peek(compiled.key))
                    objects[i].touch()

    for options in dict.fromkeys(part.options for part in missing.values()):
        chunks = [part.chunk for part in missing.values() if part.options == options]
        compile_chunks(model, store, chunks, options, on_done=open_compiled)
    return objects
