"""`pic link`: documents and a query to an answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool import __version__
from pictool.commands.console.errors import UsageError
from pictool.commands.console.outputs import output_path, print_json, write_json
from pictool.commands.console.verbosity import note
from pictool.commands.console.words import count
from pictool.commands.linking.batch import LinkOptions, drift_of, require_little, run_batch
from pictool.commands.linking.request import (
    STDIN,
    RequestOptions,
    check_documents,
    check_keys,
    named_policies,
    note_measuring,
    with_stdin,
)
from pictool.commands.settings.engine import find_engine
from pictool.commands.settings.options import (
    SALT,
    command,
    make_app,
)
from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import Settings
from pictool.reading import exists

if TYPE_CHECKING:
    from pictool.compiler.compile import Compiled
    from pictool.engines.base import Answer, Engine, Feature
    from pictool.fidelity.verify import Canary
    from pictool.linker.grid import LabelledPolicy
    from pictool.linker.spec import Spec
    from pictool.store.store import Store

app = make_app()


@dataclass(frozen=True)
class LinkCommand:
    """The parsed command line. `policies` are those that are compared, if several are named."""

    settings: Settings
    options: LinkOptions
    spec: Spec
    policies: list[LabelledPolicy]
    is_verified: bool

    @property
    def is_quiet(self) -> bool:
        """Whether the answer is not streamed: it is printed as JSON, written to a file, or one of several."""
        return self.options.as_json or self.options.output is not None or bool(self.policies)


@command(
    app, "link", "model", "device", "dtype", "head", "query_template", "separator", "after", "codec", "store",
    "remote", "require_signed", *SALT,
)  # fmt: skip
def run_link(request: RequestOptions, settings: Settings, options: LinkOptions) -> None:
    """Link documents into a prompt, and answer a question.

    \b
      pic link a.txt b.txt -q "Which festival does Gadwick hold?" --compare
      pic link a.txt -q "Who?" --trace link.trace
      pic link a.txt b.txt -q "Who?" --algo legolink-16 --algo cacheblend-15
    """
    canary = options.canary(request.seed)
    if options.batch is not None:
        run_batch(Path(options.batch), options, request, settings, canary)
        return
    parsed = parse(request, settings, options, canary)
    with ExitStack() as opened:
        reports = link(parsed, opened)
        if options.output is not None:
            write_json(options.output, reports if parsed.policies else reports[0])
        show(parsed, reports)
        if parsed.is_verified:
            drift = drift_of(reports)
            note(str(drift))
            require_little(drift, options.max_kl, "the answer has")


def parse(request: RequestOptions, settings: Settings, options: LinkOptions, canary: Canary) -> LinkCommand:
    """The command line of one request, checked as far as no model is needed. Raises PicError."""
    documents = check_documents(request.documents)
    check_outputs(options, request.documents)
    policies = named_policies(request.algos)
    if len(policies) > 1 and (name := replace(options, compare=False).of_one()):
        raise UsageError(f"{name}: applies to a single policy; choose one with --algo")
    spec = with_stdin(replace(request.spec(settings), documents=documents))
    if options.auto_ratio and (spec.policy.knob is None or not spec.policy.knob.is_share):
        raise UsageError(f"--auto-ratio: {spec.policy.name} has no ratio; choose another policy with --algo")
    is_verified = canary.picks(json.dumps(request_json(spec, {}) | {"algo": spec.policy.params}))
    return LinkCommand(settings, options, spec, policies if len(policies) > 1 else [], is_verified)


def show(parsed: LinkCommand, reports: Sequence[dict[str, Any]]) -> None:
    """Print the answer, or as much of it as is known, in the requested form."""
    if parsed.options.as_json:
        print_json(reports if parsed.policies else reports[0])
    elif parsed.policies and parsed.options.output is None:
        print_verdict([labelled.label for labelled in parsed.policies], reports)
    elif not parsed.is_quiet:
        print_answer(reports[0], parsed.options.compare)


def link(parsed: LinkCommand, opened: ExitStack) -> list[dict[str, Any]]:
    """Link; the report for each policy. `opened` waits for what the store still writes."""
    settings, spec, options = parsed.settings, parsed.spec, parsed.options
    needed: dict[Feature, str] = {"auto_ratio": "--auto-ratio"} if options.auto_ratio else {}
    needed |= {} if options.trace is None else {"trace": "--trace"}
    engine_type = find_engine(options.engine, needed, settings.model)
    store = open_store(settings)
    check_keys(store, spec.documents, settings.salt)
    model = open_model(settings, engine_type.name)
    opened.enter_context(fetching_ends(store))
    if options.auto_ratio:
        from pictool.controller.profile import auto_ratio, with_ratio

        choice = auto_ratio(model, store, spec, note_measuring)
        note(f"ratio {choice.ratio:g} (load {choice.load_s * 1e3:.0f} ms, prefill {choice.prefill_s * 1e3:.0f} ms)")
        spec = replace(spec, policy=with_ratio(spec.policy, choice.ratio))
    with engine_type(model, store) as running:
        if parsed.policies:
            answers = compare_policies(running, spec, parsed.policies)
        else:
            on_text, compare = None if parsed.is_quiet else Stream(), options.compare or parsed.is_verified
            answers = [running.answer(spec, compare=compare, on_text=on_text, on_compile=note_compiled)]
    if not parsed.is_quiet:
        print(flush=True)  # the end of the streamed answer's line
    if options.trace is not None:
        answers[0].write_trace(options.trace)
    place = {"version": __version__, "store": str(store.root)}
    return [answer.report() | {"request": request_json(spec, place | answer.origin())} for answer in answers]


def note_compiled(compiled: Compiled) -> None:
    """Say that a text was compiled for this link."""
    note(f"compiled first: {compiled.chunk.source} ({count(len(compiled.chunk), 'token')})")


def compare_policies(engine: Engine, spec: Spec, policies: Sequence[LabelledPolicy]) -> list[Answer]:
    """The answer under each policy, compared with one full recompute of the same prompt."""
    from pictool.engines.base import compare_answers
    from pictool.linker.policies import BASELINE, make_policy

    specs = [replace(spec, policy=labelled.policy, is_fresh=True) for labelled in policies]
    for variant in specs:
        engine.require_supported(variant)
    engine.warm_up(specs[0])
    for variant in specs:  # before any is timed, so that no run includes compiling
        engine.link(variant, on_compile=note_compiled)
    full = engine.run(replace(specs[0], policy=make_policy(BASELINE)))
    answers = [engine.run(variant) for variant in specs]
    return [replace(answer, compare=compare_answers(answer, full)) for answer in answers]


def print_verdict(labels: Sequence[str], reports: Sequence[Mapping[str, Any]]) -> None:
    """A line for each policy, and the answer of full recompute."""
    from pictool.commands.console.terminal import open_screen, table

    rows = []
    for label, report in zip(labels, reports, strict=True):
        compare = report["compare"]
        rows.append([
            label, f"{report['timing']['ttft_s'] * 1e3:.1f}", f"{compare['speedup']:.2f}x",
            f"{report['tokens']['recomputed']:.0f}", f"{compare['kl']:.3g}", _kl_text(compare),
            "yes" if compare["same_answer"] else "no", " ".join(report["answer"].split()),
        ])  # fmt: skip
    full = reports[0]["compare"]
    rows.append(
        ["full", f"{full['ttft_s'] * 1e3:.1f}", "1.00x", "all", "0", "0", "yes", " ".join(full["answer"].split())]
    )
    columns = ["policy", "TTFT ms", "speedup", "rows", "KL", "KL all", "same", "answer"]
    open_screen().print(table(columns, rows, left=(0, 7)))


def request_json(spec: Spec, origin: Mapping[str, Any]) -> dict[str, Any]:
    """What is needed to ask the same again: the request, and what the answer was made of."""
    return {
        "query": spec.query, "head": spec.head, "query_template": spec.query_template, "separator": spec.separator,
        "documents": [str(document) if isinstance(document, str | Path) else STDIN for document in spec.documents],
        "max_new_tokens": spec.max_new_tokens, "sampling": spec.sampling.options, "after": spec.after,
        "chunk_tokens": spec.chunk_tokens, "codec": spec.codec, **origin,
    }  # fmt: skip


@contextmanager
def fetching_ends(store: Store) -> Iterator[None]:
    """Wait at the end for what is being fetched; after an error give it up, and after an interrupt do not wait."""
    try:
        yield
    except Exception:
        store.cancel()
        store.drain()
        raise
    except BaseException:
        store.cancel()
        raise
    store.drain()


def check_outputs(options: LinkOptions, documents: Sequence[str]) -> None:
    """Refuse what could not be written, or would destroy an input, before the long run."""
    inputs = [name for name in documents if name != STDIN and exists(name)]
    for name, value in (("-o", options.output), ("--trace", options.trace)):
        if value is not None:
            output_path(name, value, inputs)
    if options.trace is not None and options.output is not None and Path(options.trace) == Path(options.output):
        raise UsageError(f"--trace {options.trace}: is also the -o file; choose another")


def print_answer(report: Mapping[str, Any], shows_compare: bool = True) -> None:
    """Print a summary of the streamed answer on stderr, and the comparison if it was parsed for."""
    tokens, timing, compare = report["tokens"], report["timing"], report["compare"]
    rows = f"{tokens['recomputed']:.0f} of {tokens['context']} context rows recomputed"
    if tokens["context"] == tokens["head"]:
        rows = "no documents, nothing linked"
    decoded = f"{count(tokens['generated'], 'token')} in {timing['decode_s'] * 1e3:.0f} ms"
    if report["finish_reason"] == "length":
        decoded += f", cut at {count(tokens['generated'], 'token')} (--max-new-tokens)"
    note(f"{report['algo']}: {rows}, TTFT {timing['ttft_s'] * 1e3:.1f} ms, {decoded}")
    if compare and shows_compare:
        print(f"full         {compare['answer']}")
        print(f"speedup      {compare['speedup']:.2f}x (TTFT {compare['ttft_s'] * 1e3:.1f} ms under full)")
        print(f"agreement    {'same answer' if compare['same_answer'] else 'another answer'}, "
              f"{compare['common_prefix']} tokens in common, KL of the whole answer {_kl_text(compare)}, "
              f"of the first token {compare['kl']:.3g}")  # fmt: skip


def _kl_text(compare: Mapping[str, Any]) -> str:
    """KL over all tokens; - from an engine that does not give it."""
    kl = compare.get("answer_kl")
    return "-" if kl is None else f"{kl:.3g}"


class Stream:
    """Prints an answer piece by piece, without the white space around it; that within waits for what follows."""

    def __init__(self) -> None:
        self._waiting, self._has_begun = "", False

    def __call__(self, text: str) -> None:
        text = self._waiting + text
        if not self._has_begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._waiting = text[len(shown) :]
        self._has_begun = self._has_begun or bool(shown)
        sys.stdout.write(shown)
        sys.stdout.flush()
