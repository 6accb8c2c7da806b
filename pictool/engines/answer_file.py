"""A file of answers, a JSON line each, that a run which was stopped continues: `pic link --batch` and bulks.

A record says by a digest what was asked (`query`), and by another one what its answer follows from (`made_of`): the
contents of all files that were read, the model as it computes, the options, the engine, the release. An answer that
follows from something else than now is asked again.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, Protocol, Self, TypeVar

from pictool.core import Chunk, Text
from pictool.errors import InputError, PicError
from pictool.linker.policies.base import Policy
from pictool.linker.resolve import find_key
from pictool.linker.spec import Spec
from pictool.reading import exists, file_state, open_regular
from pictool.runtime.machine import installed
from pictool.store.files import atomic_write
from pictool.store.objects.bundles import is_object_list, read_object_list

if TYPE_CHECKING:
    from pictool.engines.base import Engine
    from pictool.runtime.model import Model

_OF_RECORD = ("line", "query", "made_of")


class LineRequest(Protocol):
    """What is asked on a line of a file; `digest` is the same only for the same."""

    @property
    def line(self) -> int: ...

    @property
    def digest(self) -> str: ...


Request = TypeVar("Request", bound=LineRequest)


class Contents:
    """Hashes of files' contents. A file whose inode, size and times are the same is not read again."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, path: Path) -> str:
        """The hash (hex) of what a regular file has now. Raises OSError."""
        with open(open_regular(path), "rb") as file:
            state = file_state(file.fileno())
            if state not in self._known:
                self._known[state] = hashlib.file_digest(file, "sha256").hexdigest()
            return self._known[state]


def model_identity(model: Model) -> dict[str, Any]:
    """All of a model that its answers follow from, whatever it is called."""
    tokenizer = model.tokenizer
    prompts = [
        str(tokenizer.chat_template), tokenizer.bos_token, model.bos_id, sorted(model.eos_ids), model.separator
    ]  # fmt: skip
    return {
        "fingerprint": model.fingerprint, "tokenizer": model.target.tokenizer,
        "prompts": hashlib.sha256(json.dumps(prompts).encode() + b"\n").hexdigest(), "dtype": model.dtype,
        "device": model.device,
    }  # fmt: skip


def engine_identity(engine: Engine, policy: Policy) -> list[Any]:
    """All of an engine, its model and a policy on it that answers follow from."""
    import torch

    model = engine.model
    second = None
    if policy.second_model:
        from pictool.runtime.model import load_model

        second = model_identity(load_model(policy.second_model, model.device, model.dtype))
    releases = [installed("pictool"), torch.__version__]
    return [engine.name, releases, model_identity(model), policy.name, policy.params, second]


def spec_identity(spec: Spec, engine: Engine, contents: Contents) -> list[Any]:
    """All of a spec that its answer follows from: documents by their contents.

    Raises:
        OSError, PicError: a document that cannot be read.
    """
    documents = [_document_identity(document, engine, contents) for document in spec.documents]
    return [
        documents, spec.query, spec.head, spec.query_template, spec.max_new_tokens, spec.sampling.options, spec.after,
        spec.chunk_tokens, spec.codec, spec.separator_for(engine.model),
    ]  # fmt: skip


def _document_identity(document: Any, engine: Engine, contents: Contents) -> list[Any]:
    """As `resolve_documents` finds out what it is."""
    if isinstance(document, Chunk | Text):
        return ["text", document.text, isinstance(document, Chunk) and document.continues]
    path = Path(document)
    if path.suffix == ".kvo":
        members = [member.path for member in read_object_list(path)] if is_object_list(path) else []
        return ["objects", *map(contents.of, [path, *members])]
    if exists(document):
        return ["file", contents.of(path)]
    with engine.store.peek(find_key(engine.model, engine.store, str(document))) as file:
        return ["object", file.meta.key, file.meta.codec]


def digest_of(identity: Callable[[], Sequence[Any]], salt: str) -> str | None:
    """A digest of what an answer follows from, the salt too, which cannot be had back; None if it cannot be known."""
    try:
        text = json.dumps(identity(), sort_keys=True)
    except (OSError, PicError):  # the request says so when it runs, and what fails is asked again anyway
        return None
    return hmac.new(salt.encode(errors="surrogatepass"), text.encode(), hashlib.sha256).hexdigest()


class AnswerFile(Generic[Request]):
    """Answers as JSON Lines, appended and synced one at a time. A context manager, in which the file is locked.

    A last line that is not whole was being written when a run was stopped, and is dropped. Of what is asked again,
    both records are there until a run has come to its end.

    Raises:
        InputError: the file cannot be used, another process writes it, or it has answers to other queries.
    """

    def __init__(self, path: Path, requests: Sequence[Request]) -> None:
        self.path = path
        self._made_of: Callable[[Request], str | None] = lambda request: None
        self._requests = {request.line: request for request in requests}
        self._begun: dict[int, str | None] = {}
        self._num_records = 0
        self._records: dict[int, Mapping[str, Any]] = {}  # the last of each line
        self._file = _open_locked(path)
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._file:
            if error is None and len(self._records) < self._num_records:
                with atomic_write(self.path) as file:
                    file.writelines(map(_to_line, self._records.values()))

    def answered(self, made_of: Callable[[Request], str | None]) -> tuple[dict[int, Mapping[str, Any]], int]:
        """The answers that hold, by line, and how many do not, because they follow from something else.

        Args:
            made_of: gives the digest of what a request's answer follows from now (`digest_of`).
        """
        self._made_of = made_of
        found: dict[int, Mapping[str, Any]] = {}
        num_stale = 0
        for line, request in self._requests.items():
            self._begun[line] = self._made_of(request)
            record = self._records.get(line)
            if record is None or "error" in record:
                continue
            if self._begun[line] is not None and record.get("made_of") == self._begun[line]:
                found[line] = {name: value for name, value in record.items() if name not in _OF_RECORD}
            else:
                num_stale += 1
        return found, num_stale

    def append(self, request: Request, result: Mapping[str, Any]) -> None:
        """Write an answer. One whose files changed since `answered` holds for nobody, and is asked again next time."""
        made_of = self._made_of(request)
        is_known = made_of == self._begun.get(request.line, made_of)
        record = {"line": request.line, "query": request.digest, "made_of": made_of if is_known else None, **result}
        self._file.write(_to_line(record))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._add(record)

    def _add(self, record: Mapping[str, Any]) -> None:
        self._records[record["line"]] = record
        self._num_records += 1

    def _read(self) -> None:
        self._file.seek(0)
        whole, _, rest = self._file.read().rpartition(b"\n")
        for number, line in enumerate(whole.split(b"\n") if whole else (), 1):
            try:
                record = json.loads(line)
                request = self._requests.get(record["line"])
                is_ours = request is not None and ("made_of" not in record or request.digest == record["query"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise InputError(
                    f"{self.path}:{number}: is not an answer to a query; choose another file with -o"
                ) from error
            if not is_ours:
                raise InputError(f"{self.path}:{number}: answers another query; choose another file with -o")
            self._add(record)
        if rest:
            self._file.truncate(len(whole) + bool(whole))


def _to_line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def _open_locked(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise InputError(f"{path}: is not a regular file; choose another with -o")
    file = path.open("a+b")
    try:
        lock_output(path, file)
    except InputError:
        file.close()
        raise
    return file


def lock_output(path: Path, file: BinaryIO) -> None:
    """Lock a file of answers until it is closed. Raises InputError if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"{path}: another process is writing it; wait for it, or choose another file with -o"
        ) from error
