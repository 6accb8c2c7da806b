"""Requests: the spec that the command line and the settings describe together."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.console.errors import UsageError, of_command_line
from pictool.commands.console.verbosity import note
from pictool.commands.settings.options import (
    ANSWER,
    COMPILING,
    POLICY,
    ChunkOption,
    CodecOption,
    FieldsOption,
    HeadOption,
    SeparatorOption,
    TemplateOption,
    argument,
    option,
    require_64_bits,
)
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError
from pictool.reading import exists

if TYPE_CHECKING:
    from pictool.core import Sampling
    from pictool.linker.policies.base import Policy
    from pictool.linker.spec import Document, Spec
    from pictool.store.store import Store

STDIN = "-"  # as the name of a file, in place of what is read from it
AUTO = "auto"  # as ratio: what the loading controller chooses


@dataclass(frozen=True)
class RequestOptions:
    """What a command line says of a request; None where it says nothing."""

    documents: Annotated[
        list[str], argument("DOCUMENT", "Text files (- is stdin), .kvo objects or keys, in prompt order.")
    ] = field(default_factory=list)
    query: Annotated[Optional[str], option("-q, --query", "TEXT", "The question; - is stdin.")] = None
    algos: Annotated[
        list[str],
        option(
            "--algo",
            "SPEC",
            "Policy, as NAME or NAME-NUMBER; repeat it to compare several. A wrong name lists all.",
            POLICY,
        ),
    ] = field(default_factory=list)
    k: Annotated[Optional[int], option("-k", "N", "Recompute the first N tokens of each chunk.", POLICY)] = None
    ratio: Annotated[
        Optional[str],
        option(
            "--ratio",
            "SHARE",
            "Share of rows to recompute; auto: as many as loading takes time for, at least 0.15.",
            POLICY,
        ),
    ] = None
    params: FieldsOption = field(default_factory=list)
    fallback: Annotated[
        Optional[str],
        option("--fallback", "NAME", "Policy for objects without a table of fixups (none: refuse them).", POLICY),
    ] = None
    head: HeadOption = None
    query_template: TemplateOption = None
    separator: SeparatorOption = None
    max_new_tokens: Annotated[
        Optional[int], option("--max-new-tokens", "N", "Generate at most N tokens (64).", ANSWER, min=1)
    ] = None
    temperature: Annotated[float, option("--temperature", "T", "Sampling temperature; 0 is greedy.", ANSWER)] = 0.0
    top_p: Annotated[
        float, option("--top-p", "P", "Nucleus sampling: the likeliest tokens, up to probability P.", ANSWER)
    ] = 1.0
    seed: Annotated[int, option("--seed", "N", "Seed of sampling.", ANSWER, min=0, callback=require_64_bits)] = 0
    stop: Annotated[list[str], option("--stop", "TEXT", "End the answer at this text; repeatable.", ANSWER)] = field(
        default_factory=list
    )
    chunk_tokens: ChunkOption = None
    sinks: Annotated[
        Optional[int],
        option(
            "--sinks", "N", "Dummy tokens before chunks that are compiled here (as the policy needs).", COMPILING, min=0
        ),
    ] = None
    codec: CodecOption = None

    @property
    def algo(self) -> str | None:
        """The policy that is named, if one is."""
        return self.algos[0] if self.algos else None


def make_spec(options: RequestOptions, settings: Settings) -> Spec:
    """The spec of a request: what the command line says, else the settings.

    Where the ratio is `auto`, it is the least one; the caller chooses it once the model and the store are open.

    Raises:
        UsageError: no query, or an option of the policy or of sampling that makes no sense.
        InputError: the same in the settings, or a text that is none.
    """
    from pictool.compiler.compile import CODEC
    from pictool.linker.spec import MAX_NEW_TOKENS, Spec
    from pictool.store.codecs import require_codec

    with of_command_line():
        require_codec(options.codec or CODEC)
    if options.query is None:
        raise UsageError("no query; give one with --query")
    return Spec(
        query=require_text("the query", options.query),
        documents=list(options.documents),
        policy=_make_policy(options, settings),
        head=text_or_silent("the head", _first(options.head, settings.head)),
        query_template=text_or_silent("the query template", _first(options.query_template, settings.query_template)),
        separator=text_or_silent("the separator", _first(options.separator, settings.separator)),
        max_new_tokens=_first(options.max_new_tokens, MAX_NEW_TOKENS),
        sampling=_make_sampling(options),
        sinks=options.sinks,
        chunk_tokens=options.chunk_tokens,
        codec=_first(options.codec, settings.codec),
    )


def with_stdin(spec: Spec) -> Spec:
    """The spec with the text of stdin in place of the document or the query that is named `-`.

    Raises:
        UsageError: more than one is. InputError: no text.
    """
    from pictool.core import Text

    named = [spec.query, *spec.documents].count(STDIN)
    if named > 1:
        raise UsageError(f"-: {named} of documents and query cannot all be read from stdin; name files")
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


def _make_policy(options: RequestOptions, settings: Settings) -> Policy:
    from pictool.controller.cost import MIN_RATIO
    from pictool.linker.grid import policy_with_options
    from pictool.linker.policies import DEFAULT

    values = policy_values(options)
    if values.get("ratio") == AUTO:
        values["ratio"] = MIN_RATIO
    if options.algo is None and settings.algo is not None:
        return policy_of_settings(settings, values)
    with of_command_line():
        return policy_with_options(options.algo or DEFAULT, values)


def policy_of_settings(settings: Settings, values: Mapping[str, Any]) -> Policy:
    """The policy that the settings name, with fields of the command line before its own.

    Raises:
        InputError: no such policy; it names the file or the variable. UsageError: a field that the policy lacks.
    """
    from pictool.linker.grid import parse_policy, policy_with_options

    assert settings.algo is not None
    origin = settings.origin("algo")
    try:
        policy = parse_policy(settings.algo)
    except InputError as error:
        raise InputError(f"{origin}: algo: {error}") from error
    if not values:
        return policy
    try:
        return policy_with_options(settings.algo, values)
    except InputError as error:
        raise UsageError(f"{error} (the policy is that of {origin}; --algo names another)") from error


def _make_sampling(options: RequestOptions) -> Sampling:
    from pictool.core import Sampling

    with of_command_line():
        return Sampling(options.temperature, options.top_p, options.seed, tuple(options.stop))


def policy_values(options: RequestOptions) -> dict[str, Any]:
    """The policy's fields from `-k`, `--ratio`, `--fallback` and `-p`.

    Raises:
        UsageError: a field is named twice.
    """
    ratio = None if options.ratio is None else _parse_ratio(options.ratio)
    return named_fields(options.params, k=options.k, ratio=ratio, fallback=options.fallback)


def named_fields(params: Sequence[str], **options: Any) -> dict[str, Any]:
    """The policy's fields that the command line names: by options of their own (None: unused), and by `-p`.

    Raises:
        UsageError: one is named twice.
    """
    named = {name: value for name, value in options.items() if value is not None}
    others = parse_fields(params)
    for name in named.keys() & others.keys():
        raise UsageError(f"{'-k' if name == 'k' else f'--{name}'} and -p {name}={others[name]}: name one of the two")
    return named | others


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
            raise UsageError(f"-p {name}={values[name]} and -p {param}: name one of the two")
        values[name] = value
    return values


def _parse_ratio(text: str) -> float | str:
    """The value of --ratio: a number, or auto."""
    if text == AUTO:
        return AUTO
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"--ratio {text}: must be a number from 0 to 1, or {AUTO}") from error


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def require_text(what: str, text: str) -> str:
    """The text, if it is Unicode; an argument or a YAML escape can smuggle in half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what}: is not UTF-8 text at character {error.start}; convert it first") from error
    return text


def text_or_silent(what: str, text: str | None) -> str | None:
    """As `require_text`; None stays None."""
    return None if text is None else require_text(what, text)


def beside(file: Path, document: str) -> str:
    """A document's path, relative to the file that names it; a name without a file there is kept as it is (a key)."""
    joined = os.path.normpath(file.parent / document)
    looks_like_file = "/" in document or "." in document
    return joined if looks_like_file or os.path.exists(joined) else document


def check_documents(names: Sequence[str]) -> None:
    """Refuse anything but a text, object or key before a model is loaded."""
    from pictool.compiler.chunking import read_text
    from pictool.linker.resolve import no_such_file

    for name in names:
        path = Path(name)
        if name == STDIN:
            continue
        if not exists(name):
            if not all(character in "0123456789abcdef" for character in name):
                raise no_such_file(name)
        elif path.suffix != ".kvo" and (path.is_file() or path.is_dir()):
            read_text(path)


def check_keys(store: Store, documents: Sequence[Document], salt: str) -> None:
    """Refuse keys of no object, before a model is loaded for them; of a whole key the remote may have one."""
    from pictool.store.entries import is_key

    for name in (str(document) for document in documents if isinstance(document, str | Path)):
        if not exists(name) and Path(name).suffix != ".kvo" and not (is_key(name) and store.remote is not None):
            store.resolve(name, salt)


def note_measuring(what: str) -> None:
    note(f"measuring {what}, once for this machine and model")
