"""The functions of `import pictool`: what the commands do, called with plain arguments instead of a spec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import CODEC, Compiled, compile_chunks
from pictool.core import Chunk, CompileOptions, PromptText, Text
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
    sinks: int = 0,
    codec: str = CODEC,
    force: bool = False,
    alone: bool = False,
    probes: int = 0,
    probe_model: Model | None = None,
    cut: int | None = None,
    on_done: Callable[[Compiled], None] | None = None,
) -> list[Compiled]:
    """Compile chunks (or texts) to objects; a single one needs no list. What the store has costs no model run.

    Args:
        sinks: dummy BOS tokens before every chunk, whose KV is dropped (EPIC §5.4).
        codec: how the KV is kept (`store.codecs`).
        force: compute and replace also what is there.
        alone: each chunk in a forward of its own, so that its last bits do not depend on what is compiled with it.
        probes: prefixes after which every chunk is measured for its table of fixups; 0 for no table.
        probe_model: measures the chunks, by their text; the target's speculative model if it is known, else the target.
        cut: of a hybrid, after how many tokens of a chunk its states can be linked (docs/design.md §8).
        on_done: called for each chunk as soon as its object is in the store.

    Raises:
        PicError: see `compile_chunks`.
    """
    options = CompileOptions(sinks, codec, probes, cut=cut)
    listed = [chunks] if isinstance(chunks, Chunk | Text | str) else chunks
    made = [make_chunk(model, each.text, each.source) if isinstance(each, Text) else each for each in listed]
    return compile_chunks(
        model, store, made, options, force=force, alone=alone, probe_model=probe_model, on_done=on_done
    )  # fmt: skip


def link(
    model: Model,
    store: Store,
    documents: Sequence[Document],
    tail: str | PromptText,
    policy: Policy | str,
    *,
    head: str | PromptText = "",
    sinks: int | None = None,
    chunk_tokens: int | None = None,
    codec: str = CODEC,
    on_compile: Callable[[Compiled], None] | None = None,
) -> Linked:
    """Link documents into a prompt of these very texts: head + documents + tail. No chat template is applied.

    Head and tail are the caller's own template: markers in them are control tokens, and BOS comes before them if the
    tokenizer puts it before texts. Documents are text. Those of a `Frame` are as the model's template wrote them.

    Args:
        documents: chunks, texts in memory (`Text`), text files, object files or keys, in prompt order; one needs no
            list. Texts are compiled first if need be.
        tail: text after the documents; always computed in full.
        policy: which rows are recomputed: one of `make_policy`, or its specification, as `legolink-16`.
        head: text before the documents; compiled like a chunk, at position 0.
        sinks: dummy tokens of documents that are compiled here (default: what the policy needs).
        chunk_tokens: text files are cut into chunks of at most so many tokens.
        codec: how the KV of texts is kept. The head's is always kept without loss: it is exact under every policy.
        on_compile: called for each object that had to be compiled.

    Raises:
        PicError: an unusable document or object, or a prompt that is too long for the model.
    """
    spec = Spec.raw(documents, tail, _policy_of(policy), head)
    spec = replace(spec, sinks=sinks, chunk_tokens=chunk_tokens, codec=codec)
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
    """Link, decode, and (with `compare`) do the same under full recompute, on the engine of the model.

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
    """Answer a question from the files of folders, and name its sources, as `pic ask`. Needs `pictool[documents]`.

    Args:
        folders: folders or files; one needs no list.
        num_passages: that are linked at most, of at most `passage_tokens` each. What the store lacks is compiled.
        include, exclude: patterns of files, as .gitignore has them.
        reader: a command that reads files of other kinds, as `pandoc -t plain {}`.
        on_text, on_compile: as of `answer`.

    Raises:
        InputError: no file that can be read, or no passage with a word of the question. PicError: see `answer`.
    """
    from pictool.conversation import Conversation
    from pictool.documents.finding import FileFilter, find_files
    from pictool.documents.library import LibraryReader

    listed = [folders] if isinstance(folders, str | Path) else folders
    files = find_files(listed, FileFilter(tuple(include), tuple(exclude)))
    with LibraryReader(model, passage_tokens, reader, store) as library_reader:
        library = library_reader.read(files)
    spec = Spec(policy=_policy_of(policy), max_new_tokens=max_new_tokens, codec=codec)
    with engine_of(model)(model, store) as engine:
        conversation = Conversation(engine, library, spec, num_passages)
        return conversation.ask(question, on_text=on_text, on_compile=on_compile)


def _policy_of(policy: Policy | str) -> Policy:
    return named_policy(policy) if isinstance(policy, str) else policy
