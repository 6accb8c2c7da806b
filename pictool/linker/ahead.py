"""Compiling what a link needs ahead of it, in steps, for a caller that does other work in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import TYPE_CHECKING

from pictool.compiler.compile import Compiled, compile_chunks
from pictool.core import Chunk, CompileOptions
from pictool.errors import ObjectError, RemoteError, StoreError, UnwritableStoreError
from pictool.linker.context import reused_parts
from pictool.linker.link import lay_out_spec
from pictool.linker.policies.base import Prompt
from pictool.linker.resolve import OnCompile, Part
from pictool.linker.spec import Spec
from pictool.runtime.prefill import pack_tokens, plan_packs
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model


def compile_in_steps(model: Model, store: Store, spec: Spec, on_compile: OnCompile | None = None) -> Iterator[None]:
    """Compile what `link` would compile for a spec: the same objects, one forward of the model each step.

    What cannot be written, is evicted meanwhile, or is in the store and damaged, is left to `link`.

    Raises:
        PicError: as `link` does of documents.
    """
    if spec.policy.needs.chain_block:
        return

    def report(done: Compiled) -> None:
        if done.is_new and on_compile is not None:
            on_compile(done)

    for options, chunks in _packs(model, _uncompiled(model, store, spec)):
        try:
            compile_chunks(model, store, chunks, options, check=False, on_done=report)
        except UnwritableStoreError:
            return
        yield


def _uncompiled(model: Model, store: Store, spec: Spec) -> list[Part]:
    """The parts that may be reused, and of which the store has no object, or none with the table that they need."""
    policy = spec.policy
    policy.prepare(model)
    with ExitStack() as opened:
        laid = lay_out_spec(model, store, spec, opened)
        prompt = Prompt(model, laid.layout, laid.texts)
        selection = None if policy.needs.selects_late else policy.select(prompt)
        reused = [part for part, _ in reused_parts(prompt, laid.parts, policy, selection) if part.file is None]
    store.prefetch(part.keys(model)[0] for part in reused)
    return [part for part in reused if not any(_has(store, key, part) for key in part.keys(model))]


def _has(store: Store, key: str, part: Part) -> bool:
    """Whether the store or its remote has an object of this key, with the table that the part needs."""
    is_here = store.path(key).exists()
    if is_here and not part.options.probes:
        return True
    if not is_here and store.remote is None:
        return False
    try:
        with store.peek(key) as file:
            return part.is_served_by(file)
    except RemoteError as error:
        store.skip_remote(error)
    except (StoreError, ObjectError):
        pass
    return False


def _packs(model: Model, parts: Sequence[Part]) -> list[tuple[CompileOptions, list[Chunk]]]:
    """Chunks by the forwards in which `link` would compute them; those with tables first, as they serve the others."""
    packs: list[tuple[CompileOptions, list[Chunk]]] = []
    keys: set[str] = set()
    for options, group in groupby(sorted(parts, key=_options, reverse=True), key=_options):
        own = {key: part.chunk for part in group if (key := part.key(model)) not in keys}
        keys |= own.keys()
        chunks = list(own.values())
        lengths = [options.sinks + len(chunk) for chunk in chunks]
        packs += [(options, [chunks[i] for i in sorted(pack)]) for pack in plan_packs(lengths, pack_tokens(model))]
    return packs


def _options(part: Part) -> CompileOptions:
    return part.options
