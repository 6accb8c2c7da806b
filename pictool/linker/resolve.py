"""What a prompt is made of: documents given as files, objects, keys or texts become chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.compiler.chunking import make_chunks, read_text
from pictool.compiler.compile import Compiled, compile, object_key
from pictool.core import Chunk
from pictool.errors import ForeignObjectError, InputError, StoreError
from pictool.store.format import ObjectFile
from pictool.store.objectlist import is_object_list, read_object_list
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

Document = str | Path | Chunk


@dataclass(frozen=True)
class Part:
    """A chunk of the prompt. `path` is the object it was given as, or None for a text that is compiled if needed.

    `sinks` is the number of dummy tokens it is, or would be, compiled with.
    """

    chunk: Chunk
    path: Path | None
    sinks: int


def resolve_documents(
    model: Model, store: Store, documents: Sequence[Document], sinks: int = 0, chunk_tokens: int | None = None
) -> list[Part]:
    """Find out what each document is: a chunk, an object file (`.kvo`), a text file, or a key (as in git, abbreviated).

    Raises:
        PicError: names the document, and what is wrong with it.
    """
    parts: list[Part] = []
    for document in documents:
        if isinstance(document, Chunk):
            parts.append(Part(document, None, sinks))
        elif Path(document).suffix == ".kvo":
            parts.extend(_object_parts(model, Path(document)))
        elif Path(document).exists():
            text = read_text(Path(document))
            parts.extend(Part(chunk, None, sinks) for chunk in make_chunks(model, text, str(document), chunk_tokens))
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


def require_objects(
    model: Model, store: Store, parts: Sequence[Part], on_compile: Callable[[Compiled], None] | None = None
) -> list[Path]:
    """The object file of every part; texts that are not compiled yet are compiled first (and reported)."""
    texts = [part for part in parts if part.path is None]
    for sinks in sorted({part.sinks for part in texts}):
        chunks = [part.chunk for part in texts if part.sinks == sinks]
        for done in compile(model, store, chunks, sinks=sinks):
            if done.is_new and on_compile:
                on_compile(done)
    return [part.path or store.path(object_key(model, part.chunk, part.sinks)) for part in parts]
