"""`pic link`: documents and a query to an answer."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.commands.common import (
    UsageError,
    codec_setting,
    note,
    open_model,
    open_store,
    print_json,
    require_text,
    to_json,
)
from pictool.commands.config import setting
from pictool.commands.engine import find_engine
from pictool.commands.outputs import depfile_path, model_files, output_path, write_depfile
from pictool.commands.script import LinkScript, read_script
from pictool.store.store import Store, atomic_write

if TYPE_CHECKING:
    from pictool.engines.base import Feature
    from pictool.linker.spec import Spec
    from pictool.runtime.model import Model

DEFAULT_ALGO = "legolink"
DEFAULT_MAX_NEW_TOKENS = 64
AUTO = "auto"  # as ratio: what the loading controller chooses


@dataclass(frozen=True)
class LinkOptions:
    """The options of `pic link`; None where the user said nothing."""

    documents: Sequence[str]
    query: str | None
    algo: str | None
    k: int | None
    ratio: str | None
    params: Sequence[str]
    head: str | None
    query_template: str | None
    script: str | None
    max_new_tokens: int | None
    temperature: float
    top_p: float
    seed: int
    stop: Sequence[str]
    chunk_tokens: int | None
    sinks: int | None
    codec: str | None = None
    fallback: str | None = None


def run_link(
    options: LinkOptions, *, model: str | None, store: str | None, remote: str | None, salt: str | None,
    device: str | None,
    dtype: str | None, engine: str, compare: bool, trace: str | None, output: str | None, depfile: bool, as_json: bool,
) -> None:  # fmt: skip
    script = read_script(Path(options.script)) if options.script else LinkScript()
    inputs = input_files(options, script)
    check_outputs(output, trace, depfile, inputs)
    is_auto = policy_values(options, script).get("ratio") == AUTO
    needed: dict[Feature, str] = {"auto_ratio": "--ratio auto"} if is_auto else {}
    engine_type = find_engine(engine, needed | ({} if trace is None else {"trace": "--trace"}))
    spec = make_spec(options, script)
    opened, to = open_model(model, device, dtype, salt), open_store(store, remote)
    if is_auto:
        spec = with_auto_ratio(opened, to, spec)
    is_quiet = as_json or output is not None
    with engine_type(opened, to) as running:
        result = running.answer(
            spec, compare=compare, on_text=None if is_quiet else Stream(),
            on_compile=lambda done: note(f"compiled {done.chunk.source} first ({len(done.chunk)} tokens)"),
        )  # fmt: skip
    if trace is not None:
        result.write_trace(trace)
    if output is not None:
        if depfile:  # first, so that a target never stands without it
            write_depfile(Path(output), [*inputs, *model_files(opened)])
        with atomic_write(Path(output)) as file:
            file.write(to_json(result.report()).encode() + b"\n")
    if as_json:
        print_json(result.report())
    elif output is None:
        print_result(result.report())
    to.drain()


def input_files(options: LinkOptions, script: LinkScript) -> list[Path]:
    """The files that the answer is made of, beside the model's: link script and documents, less those given as keys."""
    scripts = [Path(options.script)] if options.script else []
    named = [Path(one) for one in (*script.documents, *options.documents)]
    return scripts + [path for path in named if path.exists()]


def check_outputs(output: str | None, trace: str | None, depfile: bool, inputs: Sequence[Path]) -> None:
    """Refuse what could not be written, or would destroy an input, before the long run."""
    if depfile and output is None:
        raise UsageError("--depfile: needs -o, whose prerequisites it tells")
    if output is not None:
        output_path("-o", output, inputs)
    if output is not None and depfile:
        output_path("--depfile", str(depfile_path(Path(output))), inputs)
    if trace is not None:
        output_path("--trace", trace, inputs)
    if trace is not None and output is not None and Path(trace) == Path(output):
        raise UsageError(f"--trace {trace}: is what -o writes too; name another")


def make_spec(options: LinkOptions, script: LinkScript) -> Spec:
    """The spec that the command line and the link script describe together; the command line comes first.

    Where the ratio is to be found out (`with_auto_ratio`), it has the least one.

    Raises:
        UsageError: no query, or `-p` without a value.
        InputError: an option that the policy does not have, or a text that is none.
    """
    from pictool.controller.decision import MIN_RATIO
    from pictool.core import Sampling
    from pictool.linker.policies import make_policy
    from pictool.linker.spec import Spec

    values = policy_values(options, script)
    if values.get("ratio") == AUTO:
        values["ratio"] = MIN_RATIO

    query = options.query if options.query is not None else script.query
    if query is None:
        raise UsageError("no query; give one with --query, or in a link script (-T)")
    head = _first(options.head, script.head, setting("head", None))
    template = _first(options.query_template, script.query_template, setting("query_template", None))
    return Spec(
        query=require_text("the query", query),
        documents=[*script.documents, *options.documents],
        policy=make_policy(options.algo or script.algo or DEFAULT_ALGO, values),
        head=None if head is None else require_text("the head", head),
        query_template=None if template is None else require_text("the query template", template),
        max_new_tokens=_first(options.max_new_tokens, script.max_new_tokens) or DEFAULT_MAX_NEW_TOKENS,
        sampling=Sampling(options.temperature, options.top_p, options.seed, tuple(options.stop)),
        sinks=options.sinks,
        chunk_tokens=options.chunk_tokens,
        codec=codec_setting(_first(options.codec, script.codec)),
    )


def policy_values(options: LinkOptions, script: LinkScript) -> dict[str, Any]:
    """The policy's fields from the script (if it names the same policy), `-k`, `--ratio` and `-p`."""
    values = dict(script.params) if options.algo in (None, script.algo) else {}
    if options.k is not None:
        values["k"] = options.k
    if options.ratio is not None:
        values["ratio"] = parse_ratio(options.ratio)
    if options.fallback is not None:
        values["fallback"] = options.fallback
    return values | parse_fields(options.params)


def parse_fields(params: Sequence[str]) -> dict[str, str]:
    """The values of `-p FIELD=VALUE`."""
    values = {}
    for given in params:
        name, equals, value = given.partition("=")
        if not equals:
            raise UsageError(f"-p {given}: must be FIELD=VALUE")
        values[name] = value
    return values


def parse_ratio(given: str) -> float | str:
    """The value of --ratio: a number, or auto."""
    if given == AUTO:
        return AUTO
    try:
        return float(given)
    except ValueError as error:
        raise UsageError(f"--ratio {given}: must be a number from 0 to 1, or {AUTO}") from error


def with_auto_ratio(model: Model, store: Store, spec: Spec) -> Spec:
    """The spec with the ratio that suits its length and the speed of the store (CacheBlend §5.1)."""
    from pictool.commands.plan import note_measuring
    from pictool.controller.calibration import auto_ratio, with_ratio

    choice = auto_ratio(model, store, spec, on_measure=note_measuring)
    assert choice.load_s is not None
    note(f"ratio {choice.ratio:g} (load {choice.load_s * 1e3:.0f} ms, prefill {choice.prefill_s * 1e3:.0f} ms)")
    return replace(spec, policy=with_ratio(spec.policy, choice.ratio))


def print_result(report: Mapping[str, Any]) -> None:
    """The end of the streamed answer's line, a summary on stderr, and the comparison."""
    print(flush=True)
    tokens, timing, compare = report["tokens"], report["timing"], report["compare"]
    note(
        f"{report['algo']}: {tokens['recomputed']:.0f} of {tokens['context']} context rows recomputed, "
        f"TTFT {timing['ttft_s'] * 1e3:.1f} ms, {tokens['generated']} tokens in {timing['decode_s'] * 1e3:.0f} ms"
    )
    if compare:
        print(f"full         {compare['answer']}")
        print(f"speedup      {compare['speedup']:.2f}x (TTFT {compare['ttft_s'] * 1e3:.1f} ms under full)")
        print(f"agreement    {'same answer' if compare['same_answer'] else 'another answer'}, "
              f"{compare['common_prefix']} tokens in common, KL of the first token {compare['kl']:.3g}")  # fmt: skip


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


class Stream:
    """Prints an answer piece by piece, without the white space around it; that within waits for what follows."""

    def __init__(self) -> None:
        self._waiting, self._is_begun = "", False

    def __call__(self, text: str) -> None:
        text = self._waiting + text
        if not self._is_begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._waiting = text[len(shown) :]
        self._is_begun = self._is_begun or bool(shown)
        sys.stdout.write(shown)
        sys.stdout.flush()
