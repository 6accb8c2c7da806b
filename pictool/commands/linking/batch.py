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
from pictool.commands.linking.request import CompareOption, RequestOptions, beside, named_policies
from pictool.commands.settings.engine import find_engine
from pictool.commands.settings.options import BATCH, OUTPUT, POLICY, EngineOption, JsonOption, option
from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError, PicError

if TYPE_CHECKING:
    from pictool.engines.answer_file import AnswerFile
    from pictool.engines.base import Answer, Engine
    from pictool.eval.datasets.records import Record
    from pictool.fidelity.verify import Canary, Drift
    from pictool.linker.spec import Spec

_KEYS = ("id", "documents", "query", "head", "max_new_tokens", "stop")
_UNUSED = ("answers", "kind", "metric")  # of files that pic eval reads too


@dataclass(frozen=True)
class BatchRequest:
    """A line of the file. `digest` covers the line and the options that apply to all lines."""

    line: int
    id: str
    digest: str
    spec: Spec


@dataclass(frozen=True)
class LinkOptions:
    """What a link does besides answering, and whether it is one of a batch."""

    batch: Annotated[Optional[str], option("--batch", "FILE", "Answer the requests in a JSON Lines file.", BATCH)] = (
        None
    )
    verify: Annotated[
        Optional[float],
        option(
            "--verify",
            "SHARE",
            "Also answer this share of the requests under full recompute, and report the differences.",
            BATCH,
        ),
    ] = None
    max_kl: Annotated[
        Optional[float],
        option(
            "--max-kl",
            "NATS",
            "With --verify: exit with 1 if the mean KL of whole answers is above NATS.",
            BATCH,
            min=0,
        ),
    ] = None
    auto_ratio: Annotated[
        bool,
        option("--auto-ratio", None, "Recompute as many rows as fit in the loading time, at least 15 %.", POLICY),
    ] = False
    compare: CompareOption = False
    trace: Annotated[
        Optional[str],
        option("--trace", "FILE", "Write a trace of the link, for pic inspect and pic tui.", OUTPUT),
    ] = None
    output: Annotated[Optional[str], option("-o, --output", "FILE", "Write the JSON report to a file.", OUTPUT)] = None
    as_json: JsonOption = False
    engine: EngineOption = None

    def canary(self, seed: int) -> Canary:
        """Which requests are verified; none without --verify. Raises UsageError: --max-kl alone; no share."""
        from pictool.fidelity.verify import Canary

        if self.max_kl is not None and self.verify is None:
            raise UsageError("--max-kl: needs verified answers; set their share with --verify")
        with of_command_line():
            return Canary(self.verify or 0.0, seed)

    def of_one(self) -> str | None:
        """The name of an option that applies to one link, if there is one."""
        named = {"--compare": self.compare, "--trace": self.trace, "--auto-ratio": self.auto_ratio}
        return next((name for name, value in named.items() if value), None)


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
            f"{answers.path}: {num_stale} of its answers are computed again: an input file, the model, an option or "
            "the release has changed, or is not recorded"
        )
    return found


def run_batch(path: Path, options: LinkOptions, request: RequestOptions, settings: Settings, canary: Canary) -> None:
    """Answer every request of a file; failures are reported at the end.

    Raises:
        UsageError: options of one request. InputError: an unusable file; requests that failed; drift above `max_kl`.
    """
    from pictool.engines.answer_file import AnswerFile
    from pictool.eval.datasets.records import read_records

    check_batch(options, request)
    output = None if options.output is None else output_path("-o", options.output, [path])
    objects = settings.codec, settings.after
    common = repr([request, settings.head, settings.query_template, settings.separator, *objects, settings.algo])
    requests = [_request_of(record, request, settings, common) for record in read_records(path)]
    engine_type = find_engine(options.engine, model=settings.model)
    results: dict[int, Mapping[str, Any]] = {}
    store, model = open_store(settings), open_model(settings, engine_type.name)
    with ExitStack() as opened:
        answers = None if output is None else opened.enter_context(AnswerFile(output, requests))
        running = opened.enter_context(engine_type(model, store))
        if answers is not None:
            results |= answered(answers, made_of(running))
        # A request has no answer yet, or one that was not verified and has to be.
        waiting = [
            each for each in requests
            if (known := results.get(each.line)) is None or (known["compare"] is None and canary.picks(each.digest))
        ]  # fmt: skip
        show = opened.enter_context(answers_bar(path.name))
        show(len(results), len(requests))
        for each, outcome in answer_each(running, waiting, canary):
            report = {"error": str(outcome)} if isinstance(outcome, PicError) else outcome.report()
            results[each.line] = {"id": each.id, **report}
            if answers is not None:
                answers.append(each, results[each.line])
            show(len(results), len(requests))
    store.drain()
    ordered = [results[line] for line in sorted(results)]
    drift = drift_of(ordered)
    if options.as_json:
        print_json({"answers": ordered, "drift": drift.report()})
    elif output is None:
        for result in ordered:
            print(json.dumps({"id": result["id"], "answer": result.get("answer")}, ensure_ascii=False))
    if canary.share:
        note(str(drift))
    if failed := [line for line, result in sorted(results.items()) if "error" in result]:
        first = results[failed[0]]["error"]
        raise InputError(f"{path}: {len(failed)} of {len(results)} requests failed; request {failed[0]}: {first}")
    require_little(drift, options.max_kl, f"{path}: the verified answers have")


def check_batch(options: LinkOptions, request: RequestOptions) -> None:
    """Refuse options of a single request."""
    if name := options.of_one():
        raise UsageError(f"--batch: {name} applies to a single request; omit it (--verify 1 compares all)")
    for name in ("query", "documents"):
        if getattr(request, name):
            raise UsageError(f"--batch: the file has the {name} of each request; omit it on the command line")
    if len(named_policies(request.algos)) > 1:
        raise UsageError("--batch: needs a single policy; pic eval compares several")


def drift_of(reports: Sequence[Mapping[str, Any]]) -> Drift:
    """How far the answers of reports are from those of full recompute, as far as they were compared."""
    from pictool.engines.base import Comparison
    from pictool.fidelity.verify import Drift

    return Drift.of(len(reports), [Comparison.of(report["compare"]) for report in reports if report.get("compare")])


def require_little(drift: Drift, max_kl: float | None, what: str) -> None:
    """Raise InputError if verified answers are farther from those of full recompute than `max_kl`."""
    if max_kl is not None and drift.nats is not None and drift.nats > max_kl:
        raise InputError(
            f"{what} a KL of {drift.nats:.3g} to full recompute, above --max-kl {max_kl:g}; use a policy that "
            "recomputes more rows (see pic tune)"
        )


def _request_of(record: Record, request: RequestOptions, settings: Settings, common: str) -> BatchRequest:
    from pictool.core import Text

    if unknown := [key for key in record.values if key not in (*_KEYS, *_UNUSED)]:
        raise record.error(f"unknown key {', '.join(unknown)[:200]}; known keys: {', '.join(_KEYS)}")
    documents: list[str | Text] = []
    for name, value in record.items("documents"):
        if isinstance(value, dict):
            documents.append(Text(record.inner(name, value).text("text"), f"{record.place}: {name}"))
        elif isinstance(value, str) and value:
            documents.append(beside(record.path, value))
        else:
            raise record.key_error(name, 'must be a path, a key, or {"text": …}')
    most = record.whole_number_or_none("max_new_tokens")
    stop = request.stop if record.values.get("stop") is None else list(record.texts("stop"))
    own = replace(request, query=record.text("query"), max_new_tokens=most or request.max_new_tokens, stop=stop)
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
