"""The functions of `import pictool`: what the commands do, with plain arguments instead of a spec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import CODEC, Compiled, compile_chunks
from pictool.compiler.contexts import PREVIOUS
from pictool.core import Chunk, CompileOptions, Contexts, PromptText, Text
from pictool.engines import engine_of
from pictool.engines.base import Answer
from pictool.linker import link as linker
from pictool.linker.grid import named_policy
from pictool.linker.link import Linked
from pictool.linker.policies import DEFAULT
from pictool.linker.policies.base import Policy
from pictool.linker.spec import MAX_NEW_TOKENS, Document, Spec
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.conversation import Reply
    from pictool.runtime.model import Model


def compile(
    model: Model,
    store: Store,
    chunks: Iterable[Chunk | Text | str] | Chunk | Text | str,
    *,
    after: str | Contexts = PREVIOUS,
    codec: str = CODEC,
    force: bool = False,
    alone: bool = False,
    cut: int | None = None,
    on_done: Callable[[Compiled], None] | None = None,
) -> list[Compiled]:
    """Compile chunks or texts to objects; a single one needs no list. What the store has is not computed again.

    Args:
        after: the context that each chunk is compiled after, whose KV is dropped (`compiler/contexts.py`).
        codec: how to store the KV (`store.codecs`).
        force: also compute and replace objects that the store has.
        alone: compute each chunk in its own forward, so that its last bits do not depend on the other chunks.
        cut: for a hybrid, the number of a chunk's tokens after which its states can be linked (docs/design.md §8).
        on_done: called for each chunk as soon as its object is in the store.

    Raises:
        PicError: see `compile_chunks`.
    """
    options = CompileOptions(codec, cut, after)
    listed = [chunks] if isinstance(chunks, Chunk | Text | str) else chunks
    made = [make_chunk(model, each.text, each.source) if isinstance(each, Text) else each for each in listed]
    return compile_chunks(model, store, made, options, force=force, alone=alone, on_done=on_done)


def link(
    model: Model,
    store: Store,
    documents: Sequence[Document],
    tail: str | PromptText,
    policy: Policy | str,
    *,
    head: str | PromptText = "",
    after: str | Contexts = PREVIOUS,
    chunk_tokens: int | None = None,
    codec: str = CODEC,
    on_compile: Callable[[Compiled], None] | None = None,
) -> Linked:
    """Link documents into a prompt: head + documents + tail, exactly these texts, without a chat template.

    Head and tail are your own template: markers in them become control tokens, and BOS comes first if the tokenizer
    adds it to texts. Markers in documents are text. The texts of a `Frame` stay as the model's template wrote them.

    Args:
        documents: chunks, texts in memory (`Text`), text files, object files or keys, in prompt order; one needs no
            list. Texts are compiled first if needed.
        tail: text after the documents; always computed in full.
        policy: which rows to recompute: a policy from `make_policy`, or a specification such as `legolink-16`.
        head: text before the documents; compiled like a chunk, at position 0.
        after: the context of documents that are compiled here, as in `compile`.
        chunk_tokens: cut text files into chunks of at most this many tokens.
        codec: how to store the KV of texts. The head's is always stored losslessly: it is exact under every policy.
        on_compile: called for each object that is compiled.

    Raises:
        PicError: an unusable document or object, or a prompt that is too long for the model.
    """
    spec = Spec.raw(documents, tail, _policy_of(policy), head)
    spec = replace(spec, after=after, chunk_tokens=chunk_tokens, codec=codec)
    return linker.link(model, store, spec, on_compile=on_compile)


def answer(
    model: Model,
    store: Store,
    spec: Spec,
    *,
    compare: bool = False,
    on_text: Callable[[str], None] | None = None,
    on_compile: Callable[[Compiled], None] | None = None,
) -> Answer:
    """Link and decode on the model's engine; with `compare`, also answer under full recompute.

    Raises:
        PicError: see `Engine.answer`.
    """
    with engine_of(model)(model, store) as engine:
        return engine.answer(spec, compare=compare, on_text=on_text, on_compile=on_compile)


def ask(
    model: Model,
    store: Store,
    folders: Sequence[str | Path] | str | Path,
    question: str,
    *,
    policy: Policy | str = DEFAULT,
    num_passages: int = 8,
    passage_tokens: int = 256,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    reader: str | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    codec: str = CODEC,
    on_text: Callable[[str], None] | None = None,
    on_compile: Callable[[Compiled], None] | None = None,
) -> Reply:
    """Answer a question from the files in folders, and name the sources, as `pic ask`. Needs `pictool[documents]`.

    Args:
        folders: folders or files; one needs no list.
        num_passages: link at most this many, of at most `passage_tokens` each. What the store lacks is compiled.
        include, exclude: patterns of files, as in .gitignore.
        reader: a command that reads other kinds of files, such as `pandoc -t plain {}`.
        on_text, on_compile: as in `answer`.

    Raises:
        InputError: no file that can be read, or no passage with a word of the question. PicError: see `answer`.
    """
    from pictool.conversation import Conversation
    from pictool.documents.finding import FileFilter, find_files
    from pictool.documents.library import LibraryReader

    listed = [folders] if isinstance(folders, str | Path) else folders
    files = find_files(listed, FileFilter(tuple(include), tuple(exclude)))
    spec = Spec(policy=_policy_of(policy), max_new_tokens=max_new_tokens, codec=codec)
    with (
        LibraryReader(model, passage_tokens, reader, store) as library_reader,
        engine_of(model)(model, store) as engine,
    ):
        conversation = Conversation(engine, library_reader.read(files), spec, num_passages)
        return conversation.ask(question, on_text=on_text, on_compile=on_compile)


def _policy_of(policy: Policy | str) -> Policy:
    return named_policy(policy) if isinstance(policy, str) else policy
