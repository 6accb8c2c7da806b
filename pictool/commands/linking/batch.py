"""`pic link --batch`: the requests of a file, a line each, answered by one process; a share of them verified."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.console.errors import UsageError, of_command_line
from pictool.commands.console.outputs import output_path, print_json
from pictool.commands.console.progress import answers_bar
from pictool.commands.console.verbosity import note
from pictool.commands.linking.request import RequestOptions, beside
from pictool.commands.settings.engine import find_engine
from pictool.commands.settings.options import BATCH, option
from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError, PicError

if TYPE_CHECKING:
    from pictool.engines.answer_file import AnswerFile
    from pictool.engines.base import Answer, Comparison, Engine
    from pictool.eval.datasets.records import Record
    from pictool.fidelity.verify import Canary
    from pictool.linker.spec import Spec

_KEYS = ("id", "documents", "query", "head", "max_new_tokens")
_UNUSED = ("answers", "kind")  # of files that pic eval reads too
_OF_ONE = ("query", "documents")  # options of a single request


@dataclass(frozen=True)
class BatchRequest:
    """A line of the file. `digest` covers the line and the options that apply to all lines."""

    line: int
    id: str
    digest: str
    spec: Spec


@dataclass(frozen=True)
class VerifyOptions:
    """Options of batches, and of answers that are compared with full recompute."""

    batch: Annotated[Optional[str], option("--batch", "FILE", "Answer the requests in a JSON Lines file.", BATCH)] = (
        None
    )
    verify: Annotated[
        Optional[float],
        option(
            "--verify",
            "SHARE",
            "Also answer this share of requests under full recompute, and report the differences.",
            BATCH,
        ),
    ] = None
    max_kl: Annotated[
        Optional[float],
        option("--max-kl", "NATS", "With --verify: exit with 1 if the mean KL is above NATS.", BATCH, min=0),
    ] = None

    def canary(self, seed: int) -> Canary:
        """Which requests are verified; none without --verify.

        Raises:
            UsageError: --max-kl alone; no share.
        """
        from pictool.fidelity.verify import Canary

        if self.max_kl is not None and self.verify is None:
            raise UsageError("--max-kl: applies to verified answers; set their share with --verify")
        with of_command_line():
            return Canary(self.verify or 0.0, seed)


@dataclass(frozen=True)
class BatchOptions:
    """Options of --batch.

    Fields:
        max_kl: bounds the mean of the verified answers; None: the mean is only reported.
    """

    path: Path
    output: Path | None
    canary: Canary
    max_kl: float | None
    as_json: bool

    @classmethod
    def of(cls, verified: VerifyOptions, output: str | None, canary: Canary, as_json: bool) -> BatchOptions:
        """The options of a command line with --batch. Raises InputError: -o names a file that cannot be written."""
        assert verified.batch is not None
        path = None if output is None else output_path("-o", output, [verified.batch])
        return cls(Path(verified.batch), path, canary, verified.max_kl, as_json)

    def must_run(self, request: BatchRequest, known: Mapping[str, Any] | None) -> bool:
        """Whether a request has no answer yet, or one that was not verified and has to be."""
        return known is None or (known["compare"] is None and self.canary.picks(request.digest))


def made_of(engine: Engine) -> Callable[[BatchRequest], str | None]:
    """Makes digests of all that determines an engine's answers."""
    from pictool.engines.answer_file import Contents, digest_of, engine_identity, spec_identity

    contents = Contents()
    common = cache(lambda policy: engine_identity(engine, policy))
    return lambda request: digest_of(
        lambda: [common(request.spec.policy), spec_identity(request.spec, engine, contents)], engine.model.salt
    )


def answered(answers: AnswerFile[Any], made_of: Callable[[Any], str | None]) -> dict[int, Mapping[str, Any]]:
    """The answers that need not be asked again; a note says how many have to be, and why."""
    found, num_stale = answers.answered(made_of)
    if num_stale:
        note(
            f"{answers.path}: {num_stale} of its answers are asked again: a file that they follow from, the model, an "
            "option or the release is another one, or is not recorded"
        )
    return found


def run_batch(batch: BatchOptions, request: RequestOptions, settings: Settings, engine: str | None) -> None:
    """Answer every request of the file; failures are reported at the end.

    Raises:
        UsageError: options of one request. InputError: an unusable file; requests that failed; drift above `max_kl`.
    """
    from pictool.engines.answer_file import AnswerFile
    from pictool.fidelity.verify import Drift

    check_batch(batch, request, settings)
    requests = read_batch(batch.path, request, settings)
    engine_type = find_engine(engine, model=settings.model)
    results: dict[int, Mapping[str, Any]] = {}
    store, model = open_store(settings), open_model(settings)
    with ExitStack() as opened:
        answers = None if batch.output is None else opened.enter_context(AnswerFile(batch.output, requests))
        running = opened.enter_context(engine_type(model, store))
        if answers is not None:
            results |= answered(answers, made_of(running))
        waiting = [each for each in requests if batch.must_run(each, results.get(each.line))]
        show = opened.enter_context(answers_bar(batch.path.name))
        show(len(results), len(requests))
        for each, outcome in answer_each(running, waiting, batch.canary):
            report = {"error": str(outcome)} if isinstance(outcome, PicError) else outcome.report()
            results[each.line] = {"id": each.id, **report}
            if answers is not None:
                answers.append(each, results[each.line])
            show(len(results), len(requests))
    store.drain()
    ordered = [results[line] for line in sorted(results)]
    drift = Drift.of(len(ordered), compared_of(ordered))
    if batch.as_json:
        print_json({"answers": ordered, "drift": drift.report()})
    elif batch.output is None:
        for result in ordered:
            print(json.dumps({"id": result["id"], "answer": result.get("answer")}, ensure_ascii=False))
    if batch.canary.share:
        note(str(drift))
    raise_failures(batch, results, drift.kl_mean)


def check_batch(batch: BatchOptions, request: RequestOptions, settings: Settings) -> None:
    """Refuse options of a single request."""
    for name in _OF_ONE:
        if getattr(request, name):
            raise UsageError(f"--batch: the file has the {name} of each request; leave that of the command line out")
    if len(request.policies()) > 1:
        raise UsageError("--batch: needs one policy; pic eval compares several")
    if settings.server:
        raise UsageError("--batch: links in this process; leave --server out (--server '')")


def read_batch(path: Path, request: RequestOptions, settings: Settings) -> list[BatchRequest]:
    """The requests of a file.

    Raises:
        InputError: names the line and the key.
    """
    from pictool.eval.datasets.records import read_records

    common = repr([request, settings.head, settings.query_template, settings.separator, settings.codec, settings.algo])
    return [_request_of(record, request, settings, common) for record in read_records(path)]


def _request_of(record: Record, request: RequestOptions, settings: Settings, common: str) -> BatchRequest:
    from pictool.core import Text

    if unknown := [key for key in record.values if key not in (*_KEYS, *_UNUSED)]:
        raise record.error(f"unknown key {', '.join(unknown)[:200]}; known are {', '.join(_KEYS)}")
    documents: list[str | Text] = []
    for name, value in record.items("documents"):
        if isinstance(value, dict):
            documents.append(Text(record.inner(name, value).text("text"), f"{record.place}: {name}"))
        elif isinstance(value, str) and value:
            documents.append(beside(record.path, value))
        else:
            raise record.key_error(name, 'must be a path, a key, or {"text": …}')
    most = record.whole_number_or_none("max_new_tokens")
    own = replace(request, query=record.text("query"), max_new_tokens=most or request.max_new_tokens)
    spec = own.spec(replace(settings, head=record.text_or_none("head") or settings.head))
    spec = replace(spec, documents=documents)
    text = json.dumps(record.values, sort_keys=True)
    return BatchRequest(record.number, record.id("id"), sha256((text + common).encode()).hexdigest(), spec)


def answer_each(
    engine: Engine, requests: Sequence[BatchRequest], canary: Canary
) -> Iterator[tuple[BatchRequest, Answer | PicError]]:
    """Answer requests: those that are verified one after the other, the others as the engine likes."""
    picked = [each for each in requests if canary.picks(each.digest)]
    others = [each for each in requests if not canary.picks(each.digest)]
    for each in picked:
        try:
            yield each, engine.answer(each.spec, compare=True)
        except PicError as error:
            yield each, error
    for index, outcome in engine.answer_all([each.spec for each in others]):
        yield others[index], outcome


def compared_of(results: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """The comparisons of the answers that were verified."""
    from pictool.engines.base import Comparison

    return [Comparison.of(result["compare"]) for result in results if result.get("compare")]


def raise_failures(batch: BatchOptions, results: Mapping[int, Mapping[str, Any]], kl: float | None) -> None:
    """Raise InputError for requests that failed, or answers that are too far from those of full recompute."""
    failed = [line for line, result in sorted(results.items()) if "error" in result]
    if failed:
        first = results[failed[0]]["error"]
        raise InputError(f"{batch.path}: {len(failed)} of {len(results)} requests failed; request {failed[0]}: {first}")
    if batch.max_kl is not None and kl is not None and kl > batch.max_kl:
        raise InputError(
            f"{batch.path}: the verified answers have a KL of {kl:.3g} to full recompute, above --max-kl "
            f"{batch.max_kl:g}; take a policy with more rows (pic tune)"
        )
