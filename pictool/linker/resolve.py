"""What a prompt is made of: documents given as files, objects, keys or texts become chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.compiler.chunking import make_chunks, read_text
from pictool.compiler.compile import CODEC, Compiled, compile, object_key
from pictool.core import Chunk
from pictool.errors import ForeignObjectError, InputError, ObjectError, RemoteError, StoreError
from pictool.store.bundles import is_object_list, read_object_list
from pictool.store.entries import is_key
from pictool.store.format import ObjectFile
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

Document = str | Path | Chunk
_ATTEMPTS = 8  # to open what was just compiled, while others evict


@dataclass(frozen=True)
class Part:
    """A chunk of the prompt. `path` is the object it was given as, or None for a text that is compiled if needed.

    `sinks` is the number of dummy tokens it is, or would be, compiled with; `codec` how its KV is, or would be, kept.
    A text with `probes` needs an object with a table of fixups; it is compiled with so many if there is none.
    """

    chunk: Chunk
    path: Path | None
    sinks: int
    codec: str = CODEC
    probes: int = 0

    def key(self, model: Model) -> str:
        return object_key(model, self.chunk, self.sinks, self.codec)

    def is_served_by(self, file: ObjectFile) -> bool:
        """Whether an object of this key has all that is needed of it."""
        return not self.probes or file.meta.fixups is not None


def resolve_documents(
    model: Model,
    store: Store,
    documents: Sequence[Document],
    sinks: int = 0,
    chunk_tokens: int | None = None,
    codec: str = CODEC,
    probes: int = 0,
) -> list[Part]:
    """Find out what each document is: a chunk, an object file (`.kvo`), a text file, or a key (as in git, abbreviated).

    Raises:
        PicError: names the document, and what is wrong with it.
    """
    parts: list[Part] = []
    store.prefetch(str(one) for one in documents if is_key(str(one)))
    for document in documents:
        if isinstance(document, Chunk):
            parts.append(Part(document, None, sinks, codec, probes))
        elif Path(document).suffix == ".kvo":
            parts.extend(_object_parts(model, Path(document)))
        elif Path(document).exists():
            text = read_text(Path(document))
            chunks = make_chunks(model, text, str(document), chunk_tokens)
            parts.extend(Part(chunk, None, sinks, codec, probes) for chunk in chunks)
        else:
            parts.extend(_object_parts(model, store.path(_key(store, str(document)))))
    return parts


def _key(store: Store, name: str) -> str:
    try:
        return store.find(name)
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
        if file.meta.parent is not None:
            raise InputError(f"{path}: is a block of a prefix chain, of use only behind its own; name a document")
        if file.meta.key != model.key(tokens, file.meta.sinks, file.meta.codec):
            raise ForeignObjectError(
                f"{path}: its key {file.meta.key[:12]} is not that of its tokens and this salt; compile it again, or "
                "link with the --salt that it was compiled with"
            )
        return [Part(Chunk(file.text(), tokens, str(path)), path, file.meta.sinks, file.meta.codec)]


def open_objects(
    model: Model, store: Store, parts: Sequence[Part], on_compile: Callable[[Compiled], None] | None = None
) -> tuple[list[ObjectFile], float]:
    """Open the object of every part; texts that are not compiled yet are compiled first (and reported).

    Returns:
        the open objects, to be closed by the caller, and the seconds that compiling took.

    Raises:
        PicError: an object of another model, or one that is not what its part was made of.
    """
    store.prefetch(part.key(model) for part in parts if part.path is None)
    with ExitStack() as opened:
        found = {i: opened.enter_context(file) for i, part in enumerate(parts) if (file := _open(model, store, part))}
        started = time.perf_counter()
        for _ in range(_ATTEMPTS):
            missing = {i: part for i, part in enumerate(parts) if i not in found}
            if not missing:
                break
            found |= _compile_missing(model, store, missing, on_compile, opened)
        else:
            raise StoreError(f"{store.root}: objects are evicted before they can be linked; allow the store more")
        compile_s = time.perf_counter() - started
        for i, part in enumerate(parts):
            _require_same(model, found[i], part.chunk)
        opened.pop_all()
    return [found[i] for i in range(len(parts))], compile_s


def _open(model: Model, store: Store, part: Part) -> ObjectFile | None:
    """The object of a part; None if it is to be compiled (not in the store, its header damaged, or without a table)."""
    if part.path is not None:
        file = ObjectFile(part.path)
        if part.path == store.path(file.meta.key):
            store.mark_used(file)
        return file
    try:
        file = store.open(part.key(model))
    except RemoteError as error:
        store.skip_remote(error)
        return None
    except (StoreError, ObjectError):
        return None
    if part.is_served_by(file):
        return file
    file.close()
    return None


def _require_same(model: Model, file: ObjectFile, chunk: Chunk) -> None:
    file.meta.require(model.target, file.name)
    if tuple(file.tokens()) != chunk.tokens:
        raise InputError(f"{file.name}: was replaced while it was being linked; run the command again")


def _compile_missing(
    model: Model,
    store: Store,
    missing: Mapping[int, Part],
    on_compile: Callable[[Compiled], None] | None,
    opened: ExitStack,
) -> dict[int, ObjectFile]:
    """Compile what is missing, and open each object as soon as it is there; but for what was evicted even before."""
    found: dict[int, ObjectFile] = {}

    def take(done: Compiled) -> None:
        if done.is_new and on_compile:
            on_compile(done)
        for i, part in missing.items():
            if i not in found and part.key(model) == done.key:
                with suppress(StoreError):
                    file = store.peek(done.key)
                    if part.is_served_by(file):
                        found[i] = opened.enter_context(file)
                    else:
                        file.close()

    kinds = {(part.sinks, part.codec, part.probes) for part in missing.values()}
    for sinks, codec, probes in sorted(kinds, reverse=True):  # an object with a table serves those who need none
        chunks = [p.chunk for p in missing.values() if (p.sinks, p.codec, p.probes) == (sinks, codec, probes)]
        compile(model, store, chunks, sinks=sinks, codec=codec, probes=probes, on_done=take)
    return found
