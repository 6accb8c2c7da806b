"""What a prompt is made of: documents given as files, objects, keys or texts become chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.compiler.chunking import make_chunks, read_text
from pictool.compiler.compile import Compiled, compile, object_key
from pictool.core import Chunk
from pictool.errors import ForeignObjectError, InputError, ObjectError, StoreError
from pictool.store.format import ObjectFile
from pictool.store.objectlist import is_object_list, read_object_list
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

Document = str | Path | Chunk


@dataclass(frozen=True)
class Part:
    """A chunk of the prompt. `path` is the object it was given as, or None for a text that is compiled if needed.

    `sinks` is the number of dummy tokens it is, or would be, compiled with. A text with `probes` needs an object with a
    table of fixups; it is compiled with so many if there is none.
    """

    chunk: Chunk
    path: Path | None
    sinks: int
    probes: int = 0


def resolve_documents(
    model: Model,
    store: Store,
    documents: Sequence[Document],
    sinks: int = 0,
    chunk_tokens: int | None = None,
    probes: int = 0,
) -> list[Part]:
    """Find out what each document is: a chunk, an object file (`.kvo`), a text file, or a key (as in git, abbreviated).

    Raises:
        PicError: names the document, and what is wrong with it.
    """
    parts: list[Part] = []
    for document in documents:
        if isinstance(document, Chunk):
            parts.append(Part(document, None, sinks, probes))
        elif Path(document).suffix == ".kvo":
            parts.extend(_object_parts(model, Path(document)))
        elif Path(document).exists():
            text = read_text(Path(document))
            chunks = make_chunks(model, text, str(document), chunk_tokens)
            parts.extend(Part(chunk, None, sinks, probes) for chunk in chunks)
        else:
            parts.extend(_object_parts(model, store.path(_key(store, str(document)))))
    return parts


def _key(store: Store, name: str) -> str:
    try:
        return store.resolve(name)
    except StoreError as error:
        if all(c in "0123456789abcdef" for c in name):
            raise
        raise InputError(f"{name}: no such file") from error


def _object_parts(model: Model, path: Path) -> list[Part]:
    if is_object_list(path):
        return [part for member in read_object_list(path) for part in _object_parts(model, member)]
    with ObjectFile(path) as file:
        file.meta.require(model.target, str(path))
        tokens = tuple(int(token) for token in file.tokens())
        if file.meta.key != model.target.key(tokens, file.meta.sinks, file.meta.codec):
            raise ForeignObjectError(
                f"{path}: its key {file.meta.key[:12]} is not that of its tokens; compile it again"
            )
        return [Part(Chunk(file.text(), tokens, str(path)), path, file.meta.sinks)]


def open_objects(
    model: Model, store: Store, parts: Sequence[Part], on_compile: Callable[[Compiled], None] | None = None
) -> tuple[list[ObjectFile], float]:
    """Open the object of every part; texts that are not compiled yet are compiled first (and reported).

    Returns:
        the open objects, to be closed by the caller, and the seconds that compiling took.

    Raises:
        PicError: an object of another model, or one that is not what its part was made of.
    """
    with ExitStack() as opened:
        found = {i: opened.enter_context(file) for i, part in enumerate(parts) if (file := _open(model, store, part))}
        started = time.perf_counter()
        missing = [part for i, part in enumerate(parts) if i not in found]
        _compile_missing(model, store, missing, on_compile)
        compile_s = time.perf_counter() - started
        for i, part in enumerate(parts):
            if i not in found:
                found[i] = opened.enter_context(store.open(object_key(model, part.chunk, part.sinks)))
        for i, part in enumerate(parts):
            _require_same(model, found[i], part.chunk)
        opened.pop_all()
    return [found[i] for i in range(len(parts))], compile_s


def _open(model: Model, store: Store, part: Part) -> ObjectFile | None:
    """The object of a part; None if it is to be compiled (not in the store, its header damaged, or without a table)."""
    if part.path is not None:
        return ObjectFile(part.path)
    try:
        file = store.open(object_key(model, part.chunk, part.sinks))
    except (StoreError, ObjectError):
        return None
    if part.probes and file.meta.fixups is None:
        file.close()
        return None
    return file


def _require_same(model: Model, file: ObjectFile, chunk: Chunk) -> None:
    file.meta.require(model.target, str(file.path))
    if tuple(file.tokens()) != chunk.tokens:
        raise InputError(f"{file.path}: was replaced while it was being linked; run the command again")


def _compile_missing(
    model: Model, store: Store, missing: Sequence[Part], on_compile: Callable[[Compiled], None] | None
) -> None:
    for sinks, probes in sorted({(part.sinks, part.probes) for part in missing}):
        chunks = [part.chunk for part in missing if (part.sinks, part.probes) == (sinks, probes)]
        for done in compile(model, store, chunks, sinks=sinks, probes=probes):
            if done.is_new and on_compile:
                on_compile(done)
