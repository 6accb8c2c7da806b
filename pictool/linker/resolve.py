"""What a prompt is made of, and where: documents (files, objects, keys, chunks) become parts, which are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pictool.compiler.chunking import (
    FOREIGN,
    encode_within,
    is_foreign,
    make_chunks,
    read_text,
    require_own_text,
    require_text,
)
from pictool.compiler.compile import object_key
from pictool.core import Chunk, CompileOptions, GeneratedChunk, Layout, PromptText, RowMask, Separator, Text
from pictool.errors import ForeignObjectError, InputError, ObjectError, StoreError
from pictool.linker.spec import Spec
from pictool.reading import exists
from pictool.runtime import turns
from pictool.runtime.chat.template import separator_between
from pictool.store.entries import is_key
from pictool.store.objects.bundles import is_object_list, read_object_list
from pictool.store.objects.format import ObjectFile
from pictool.store.opened import opened as open_objects
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.linker.plan import LinkPlan
    from pictool.runtime.model import Model

_MARGIN = 16  # tokens, of which several may be one character


@dataclass(frozen=True)
class Part:
    """A chunk of the prompt, and what its object is, or would be, compiled with.

    `file` is the object that the document was given as, open since it was read to see what it is; None for a text,
    whose object is opened, and compiled if need be, by `ObjectContext`. `generated` is the key of a generated object
    that is linked in its place; empty if there is none. The part is the object's tokens from `offset` on. One that has
    no object is computed.
    """

    chunk: Chunk
    options: CompileOptions = CompileOptions()
    file: ObjectFile | None = None
    offset: int = 0
    has_object: bool = True
    generated: str = ""

    @classmethod
    def of(cls, chunk: Chunk, options: CompileOptions) -> Part:
        generated = chunk.object if isinstance(chunk, GeneratedChunk) else ""
        return cls(chunk, options, has_object=not isinstance(chunk, Separator), generated=generated)

    @property
    def is_separator(self) -> bool:
        return isinstance(self.chunk, Separator)

    def key(self, model: Model) -> str:
        """The key of what its tokens are, or would be, compiled to."""
        return object_key(model, self.chunk, self.options) if self.file is None else self.file.meta.key

    def keys(self, model: Model) -> list[str]:
        """The objects in the store that may be linked, the best first."""
        return [*filter(None, [self.generated]), self.key(model)]

    def after(self, linked: set[str]) -> Part:
        """The part once its link is done, of whose objects those with the keys `linked` were used."""
        return Part(self.chunk, self.options, generated=self.generated if self.generated in linked else "")

    def path(self, model: Model, store: Store) -> Path:
        """Where its object is, or would be."""
        return store.path(self.key(model)) if self.file is None else self.file.path


def separated(model: Model, parts: Sequence[Part], separator: str) -> list[Part]:
    """Parts with what separates them; those that continue the one before them follow it directly."""
    result, known = list[Part](), dict[str, Part]()
    for part in parts:
        if separator and result and not (part.chunk.continues or part.is_separator or result[-1].is_separator):
            text = separator_between(_end_of(model, result[-1], separator), separator)
            if text not in known:
                known[text] = Part.of(Separator(text, model.encode(text), "separator"), CompileOptions())
            result += [known[text]] if known[text].chunk.tokens else []
        result.append(part)
    return result


def _end_of(model: Model, part: Part, separator: str) -> str:
    """The end of a part's text, as long as a separator at least. What an object says of its text does not count."""
    if part.file is None:
        return part.chunk.text
    return str(model.tokenizer.decode(list(part.chunk.tokens[-len(separator) - _MARGIN :])))


def resolve_documents(model: Model, store: Store, spec: Spec, opened: ExitStack) -> list[Part]:
    """Find out what each document is: a chunk, an object file (`.kvo`), a text file, or a key (as in git, abbreviated).

    Args:
        opened: closes the objects that are opened here.

    Raises:
        PicError: names the document, and what is wrong with it.
    """
    parts, options = list[Part](), spec.objects_for(model)
    named = [document for document in spec.documents if isinstance(document, str | Path)]
    store.prefetch(str(name) for name in named if is_key(str(name)))
    for document in spec.documents:
        if isinstance(document, Chunk):
            parts.append(Part.of(document, options))
        elif isinstance(document, Text):
            chunks = make_chunks(model, document.text, document.source, spec.chunk_tokens)
            parts.extend(Part(chunk, options) for chunk in chunks)
            turns.checkpoint()
        elif Path(document).suffix == ".kvo":
            parts.extend(_object_parts(model, store, Path(document), opened))
        elif exists(document):
            chunks = make_chunks(model, read_text(Path(document)), str(document), spec.chunk_tokens)
            parts.extend(Part(chunk, options) for chunk in chunks)
        else:
            parts.extend(_object_parts(model, store, store.path(find_key(model, store, str(document))), opened))
    if spec.policy.needs.runs_model:  # it reads the texts
        for file in (part.file for part in parts if part.file is not None):
            require_own_text(model, file)
    if any(is_foreign(model, part.chunk.tokens) for part in parts):
        model.on_note(FOREIGN)
    return parts


def resolve_plan(model: Model, store: Store, plan: LinkPlan, opened: ExitStack) -> list[Part]:
    """The parts of a prompt that is laid out already, head and chunks. They have texts if the policy reads them.

    Raises:
        PicError: an object that is missing, damaged, or not this model's and salt's.
    """
    parts = []
    for span in plan.spans:
        ids = tuple(plan.layout.tokens[span.start : span.end].tolist())
        text = str(model.tokenizer.decode(ids)) if plan.policy.needs.runs_model else ""
        if span.key is None:
            parts.append(Part(Chunk(text, ids, "prompt"), has_object=False))
            continue
        file = opened.enter_context(store.peek(span.key))
        tokens = _own_tokens(model, file, f"object {span.key[:12]}")
        if tokens[span.part] != ids:
            raise ForeignObjectError(f"object {span.key[:12]}: its tokens do not match the prompt at {span.start}")
        if text:
            require_own_text(model, file)
        chunk = Chunk(file.text() if text and len(tokens) == len(ids) else text, ids, f"object {span.key[:12]}")
        parts.append(Part(chunk, file.meta.options, file, span.offset))
    return parts


def head_chunk(model: Model, head: PromptText) -> Chunk:
    """A prompt's head, perhaps without tokens; the same one for the same text."""
    tokens = encode_within(model, head, "the head")
    kept: Chunk = model.encoder.kept.get(
        (model.salt, "head", head), 1 + len(head), lambda: Chunk(model.encoder.whole(head), tokens, "head")
    )
    return kept


def find_key(model: Model, store: Store, name: str) -> str:
    """The key that a document names, perhaps abbreviated. Raises StoreError, or InputError for no such file."""
    try:
        return store.find(name, model.salt)
    except StoreError as error:
        if all(c in "0123456789abcdef" for c in name):
            raise
        raise no_such_file(name) from error


def no_such_file(name: str) -> InputError:
    """The error for what is neither a file nor a key. What looks like a text gets a hint."""
    is_text = " " in name.strip() or "\n" in name
    shown = name if len(name) <= 200 else f"{name[:200]}…"
    return InputError(f"{shown}: no such file" + ("; a text in memory is pictool.Text(…)" if is_text else ""))


def _object_parts(model: Model, store: Store, path: Path, opened: ExitStack) -> list[Part]:
    known = open_objects.find(str(path))
    if known is None and is_object_list(path):
        return [
            replace(part, chunk=replace(part.chunk, continues=member.continues))
            for member in read_object_list(path)
            for part in _object_parts(model, store, member.path, opened)
        ]
    file = opened.enter_context(known or open_objects.keep(str(path), ObjectFile(path)))
    if store.requires_signed and not store.admits(file):
        raise ObjectError(f"{path}: not signed by a trusted key (--require-signed); sign it, or compile its text")
    tokens, meta = _own_tokens(model, file, str(path)), file.meta
    require_text(model, file.tokens(), str(path))
    return [Part(Chunk(file.text(), tokens, str(path)), meta.options, file)]


def _own_tokens(model: Model, file: ObjectFile, path: str) -> tuple[int, ...]:
    """The tokens of an object that a prompt of this model and salt can link; `path` is what messages call it."""
    meta = file.meta
    meta.require(model.target, path)
    if meta.num_tokens > model.max_positions:
        raise InputError(
            f"{path}: {meta.num_tokens} tokens, but the model has {model.max_positions} positions; cut the text with "
            "--chunk-tokens"
        )
    tokens = tuple(int(token) for token in file.tokens())
    if meta.parent is not None:
        raise InputError(f"{path}: is a block of a prefix chain, usable only within its chain; link a document")
    meta.require_known_context(path)
    if meta.key != meta.key_of(tokens, model.salt):
        raise ForeignObjectError(
            f"{path}: its key {meta.key[:12]} does not match its tokens and this salt; compile it again, or "
            "link with the salt it was compiled with"
        )
    if not max(tokens) < model.config.vocab_size:
        raise ObjectError(
            f"{path}: contains the token {max(tokens)}, which the model does not have; compile the text again"
        )
    return tokens


@dataclass(frozen=True)
class PromptParts:
    """A prompt that is laid out. `parts` are head and chunks; `required` [N] are the rows that no object has."""

    layout: Layout
    texts: tuple[str | PromptText, ...]  # of head, chunks and tail
    parts: tuple[Part, ...]
    required: RowMask | None = None

    @property
    def objects(self) -> list[Part]:
        """The parts that have an object, or will have one: documents, and the head if it has tokens."""
        return [part for part in self.parts if part.chunk.tokens and not part.is_separator]

    def without_objects(self, indices: Sequence[int]) -> PromptParts:
        """The same, with these parts computed."""
        if not indices:
            return self
        parts, required = list(self.parts), np.zeros(self.layout.num_context, dtype=bool)
        if self.required is not None:
            required |= self.required
        for index in indices:
            if parts[index].has_object:
                parts[index] = replace(parts[index], has_object=False)
            start, end = (self.layout.head, *self.layout.chunks)[index]
            required[start:end] = True
        return replace(self, parts=tuple(parts), required=required)


def lay_out_spec(model: Model, store: Store, spec: Spec, opened: ExitStack) -> PromptParts:
    """Find out what each document is, put separators between them and before the tail, and lay out the prompt.

    Objects that documents name are open until `opened` is closed.

    Raises:
        PicError: names the document and what is wrong with it; no tail, or a prompt that is too long for the model.
    """
    if spec.plan is not None:
        return _lay_out_plan(model, store, spec.plan, opened)
    frame, separator = spec.frame(model), spec.separator_for(model)
    documents = separated(model, resolve_documents(model, store, spec, opened), separator)
    tail = frame.tail_after(_end_of(model, documents[-1], separator), separator) if documents else frame.tail
    head = Part(head_chunk(model, frame.head), spec.head_object_for(model))
    parts, tokens = (head, *documents), encode_within(model, tail, "the query")
    if not tokens:
        raise InputError(
            f"the query and its template have no tokens under the tokenizer of {model.name}; nothing to answer"
        )
    layout = Layout.of(head.chunk.ids, [part.chunk.ids for part in documents], tokens)
    require_room(model, layout.num_tokens)
    laid_out = PromptParts(layout, (frame.head, *(part.chunk.text for part in documents), tail), parts)
    if spec.policy.needs.chain_block:  # a chain says itself what it has
        return laid_out
    return laid_out.without_objects([index for index, part in enumerate(parts) if part.is_separator])


def _lay_out_plan(model: Model, store: Store, plan: LinkPlan, opened: ExitStack) -> PromptParts:
    require_room(model, plan.layout.num_tokens)
    parts, tail = resolve_plan(model, store, plan, opened), plan.layout.tokens[plan.layout.tail[0] :].tolist()
    last = str(model.tokenizer.decode(tail)) if plan.policy.needs.runs_model else ""
    pairs = [*((part.chunk.text, part.chunk.tokens) for part in parts), (last, tail)]
    texts = tuple(model.encoder.as_tokenized(text, ids) for text, ids in pairs)
    required = None if plan.policy.needs.chain_block else plan.required  # a chain says itself what it has
    return PromptParts(plan.layout, texts, tuple(parts), required)


def require_room(model: Model, num_tokens: int) -> None:
    """Refuse a prompt that is longer than the model's positions. Raises InputError."""
    if num_tokens > model.max_positions:
        raise InputError(
            f"the prompt has {num_tokens} tokens, but {model.name} has {model.max_positions} positions; "
            "link fewer or shorter documents"
        )
