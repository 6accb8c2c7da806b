"""Requests: the spec that the command line and the settings describe together."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.console.errors import UsageError, of_command_line
from pictool.commands.console.verbosity import note
from pictool.commands.settings.options import (
    ANSWER,
    POLICY,
    SPECS,
    ChunkOption,
    NewTokensOption,
    argument,
    option,
)
from pictool.commands.settings.settings import Settings
from pictool.commands.settings.types import parse_seed
from pictool.errors import InputError
from pictool.reading import exists

if TYPE_CHECKING:
    from pictool.linker.grid import LabelledPolicy
    from pictool.linker.policies.base import Policy
    from pictool.linker.spec import Document, Spec
    from pictool.store.store import Store

STDIN = "-"  # as the name of a file, in place of what is read from it


AlgosOption = Annotated[
    list[str], option("--algo", "SPEC", f"Policy (PIC_ALGO), or several to compare: {SPECS}", POLICY)
]
CompareOption = Annotated[
    bool, option("--compare", None, "Also compute the whole prompt; print the speedup and whether answers agree.")
]


@dataclass(frozen=True)
class RequestOptions:
    """What a command line says of a request; None where it says nothing."""

    documents: Annotated[
        list[str],
        argument("DOCUMENT", "Text, PDF, HTML or Office files (- is stdin), .kvo objects or keys, in prompt order."),
    ] = field(default_factory=list)
    query: Annotated[Optional[str], option("-q, --query", "TEXT", "The question; - is stdin.")] = None
    algos: AlgosOption = field(default_factory=list)
    max_new_tokens: NewTokensOption = None
    temperature: Annotated[float, option("--temperature", "T", "Sampling temperature; 0 is greedy.", ANSWER)] = 0.0
    top_p: Annotated[
        float,
        option(
            "--top-p", "P", "Nucleus sampling: sample from the likeliest tokens that make up probability P.", ANSWER
        ),
    ] = 1.0
    seed: Annotated[int, option("--seed", "N", "Seed of sampling.", ANSWER, type=parse_seed)] = 0
    stop: Annotated[list[str], option("--stop", "TEXT", "End the answer at this text; repeatable.", ANSWER)] = field(
        default_factory=list
    )
    chunk_tokens: ChunkOption = None

    def spec(self, settings: Settings) -> Spec:
        """The spec of this request. Raises UsageError: no query, or sampling that makes no sense; InputError."""
        from pictool.core import Sampling

        if self.query is None:
            raise UsageError("no query; give one with --query")
        with of_command_line():
            sampling = Sampling(self.temperature, self.top_p, self.seed, tuple(self.stop))
        policy = next((named.policy for named in named_policies(self.algos)), None)
        return make_spec(
            settings, self.query, policy, self.max_new_tokens, documents=list(self.documents), sampling=sampling,
            chunk_tokens=self.chunk_tokens,
        )  # fmt: skip


def named_policies(algos: Sequence[str]) -> list[LabelledPolicy]:
    """The policies of `--algo`. Raises UsageError: several, one of which depends on earlier requests."""
    from pictool.linker.grid import parse_grid, parse_repeatable

    with of_command_line():
        named = parse_grid(algos)
        return named if len(named) < 2 else parse_repeatable(algos)


def make_spec(
    settings: Settings, query: str, policy: Policy | None = None, max_new_tokens: int | None = None, **more: Any
) -> Spec:
    """The spec of a question. Where the caller says nothing, the settings do.

    Args:
        more: other fields of the spec.

    Raises:
        InputError: a policy of the settings that there is not, or a text that is none.
    """
    from pictool.linker.spec import MAX_NEW_TOKENS, Spec

    return Spec(
        query=require_text("the query", query), policy=policy or policy_of_settings(settings), head=settings.head,
        query_template=settings.query_template, separator=settings.separator, codec=settings.codec,
        after=settings.after,
        max_new_tokens=max_new_tokens or MAX_NEW_TOKENS, **more,
    )  # fmt: skip


def policy_of_settings(settings: Settings) -> Policy:
    """The policy that the settings name, else the default. Raises InputError: it names the file or the variable."""
    from pictool.linker.grid import parse_policy
    from pictool.linker.policies import DEFAULT

    try:
        return parse_policy(settings.algo or DEFAULT)
    except InputError as error:
        raise InputError(f"{settings.origin('algo')}: algo: {error}") from error


def with_stdin(spec: Spec) -> Spec:
    """The spec with the text of stdin in place of the document or the query that is named `-`.

    Raises:
        UsageError: more than one is. InputError: no text.
    """
    from pictool.core import Text

    named = [spec.query, *spec.documents].count(STDIN)
    if named > 1:
        raise UsageError(f"-: only one of documents and query can be read from stdin, not {named}; use files")
    if not named:
        return spec
    text = read_stdin()
    if spec.query == STDIN:
        return replace(spec, query=text.rstrip("\n"))  # as $(…) gives it
    documents = [Text(text, "stdin") if name == STDIN else name for name in spec.documents]
    return replace(spec, documents=documents)


def read_stdin() -> str:
    """The text that is written to stdin, until its end. Raises InputError as `read_text` does."""
    from pictool.compiler.chunking import MAX_FILE_BYTES, decode_text

    return decode_text("stdin", sys.stdin.buffer.read(MAX_FILE_BYTES + 1))


def parse_fields(params: Sequence[str]) -> dict[str, str]:
    """The values of `-p FIELD=VALUE`.

    Raises:
        UsageError: no value, or a field that is named twice.
    """
    values: dict[str, str] = {}
    for param in params:
        name, equals, value = param.partition("=")
        if not equals:
            raise UsageError(f"-p {param}: must be FIELD=VALUE")
        if name in values:
            raise UsageError(f"-p {name}={values[name]} and -p {param}: use only one of them")
        values[name] = value
    return values


def require_text(what: str, text: str) -> str:
    """The text, if it is Unicode; an argument or a YAML escape can smuggle in half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what}: invalid UTF-8 at character {error.start}; convert it first") from error
    return text


def text_or_silent(what: str, text: str | None) -> str | None:
    """As `require_text`; None stays None."""
    return None if text is None else require_text(what, text)


def beside(file: Path, document: str) -> str:
    """A document's path, relative to the file that names it; a name without a file there is kept as it is (a key)."""
    joined = os.path.normpath(file.parent / document)
    looks_like_file = "/" in document or "." in document
    return joined if looks_like_file or os.path.exists(joined) else document


def check_documents(names: Sequence[str]) -> list[Document]:
    """The documents of a command line; files that are no plain text are read.

    Anything but a file that can be read, an object or a key is refused before a model is loaded.
    """
    from pictool.compiler.chunking import needs_reader, read_text
    from pictool.core import Text
    from pictool.linker.resolve import no_such_file

    documents: list[Document] = list(names)
    for at, name in enumerate(names):
        path = Path(name)
        if name == STDIN:
            continue
        if not exists(name):
            if not all(character in "0123456789abcdef" for character in name):
                raise no_such_file(name)
        elif path.suffix != ".kvo" and needs_reader(path):
            documents[at] = Text(read_document(path), name)
        elif path.suffix != ".kvo" and (path.is_file() or path.is_dir()):
            read_text(path)
    return documents


def read_document(path: Path) -> str:
    """The text of a file: a plain text as it is, other kinds by the readers of `pic ask`. Raises InputError."""
    from pictool.compiler.chunking import needs_reader, read_text

    if not needs_reader(path):
        return read_text(path)
    from pictool.documents.reading import read_whole

    return read_whole(path, note)


def check_keys(store: Store, documents: Sequence[Document], salt: str) -> None:
    """Refuse keys of no object, before a model is loaded for them; of a whole key the remote may have one."""
    from pictool.store.entries import is_key

    for name in (str(document) for document in documents if isinstance(document, str | Path)):
        if not exists(name) and Path(name).suffix != ".kvo" and not (is_key(name) and store.remote is not None):
            store.resolve(name, salt)


def note_measuring(what: str) -> None:
    note(f"measuring {what}, once for this machine and model")
