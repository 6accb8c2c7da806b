"""`pic eval`: a dataset's questions under several policies, each compared with full recompute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

from pictool.commands.console.errors import of_command_line
from pictool.commands.console.outputs import output_path, print_json
from pictool.commands.console.progress import answers_bar
from pictool.commands.console.verbosity import note
from pictool.commands.console.words import count
from pictool.commands.linking.request import parse_fields, text_or_silent
from pictool.commands.settings.engine import runnable
from pictool.commands.settings.options import (
    ANSWER,
    COMPILING,
    DATASET,
    OUTPUT,
    POLICY,
    SALT,
    SPECS,
    ChunkOption,
    HeadOption,
    JsonOption,
    SeparatorOption,
    TemplateOption,
    argument,
    command,
    make_app,
    option,
)
from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

    from pictool.commands.console.terminal import LabelledTable
    from pictool.eval.cases import SpecOptions
    from pictool.eval.datasets.base import Dataset
    from pictool.eval.statistics import Estimate
    from pictool.eval.summary import Summary
    from pictool.runtime.model import Model

NONE = "-"
LEGEND = (
    "KL, all: of the first token and of all of full's answer. same: equal answers.\n"
    "Times: medians, ms. peak: rise of memory over what the process keeps, MB.\n"
    "read: KV of objects a question, MB."
)

app = make_app()


@dataclass(frozen=True)
class EvalOptions:
    """The options of `pic eval`; None where the user said nothing."""

    dataset: Annotated[str, argument("DATASET", "A file of questions, or the name of a plug-in dataset.")]
    limit: Annotated[Optional[int], option("--limit", "N", "Ask only the first N questions.", min=1)] = None
    metric: Annotated[Optional[str], option("--metric", "NAME", "f1, em, rouge_l or contains (the dataset's own).")] = (
        None
    )
    params: Annotated[list[str], option("-p", "FIELD=VALUE", "Set a field of the dataset. Repeatable.", DATASET)] = (
        field(default_factory=list)
    )
    algo: Annotated[
        list[str],
        option("--algo", "SPEC", f"Policy: {SPECS}", POLICY),
    ] = field(default_factory=list)
    head: HeadOption = None
    query_template: TemplateOption = None
    separator: SeparatorOption = None
    max_new_tokens: Annotated[
        Optional[int],
        option(
            "--max-new-tokens", "N", "Generate at most N tokens per answer (the dataset's own limit).", ANSWER, min=1
        ),
    ] = None
    stop: Annotated[
        list[str], option("--stop", "TEXT", "End answers at this text; repeatable (the dataset's own).", ANSWER)
    ] = field(default_factory=list)
    chunk_tokens: ChunkOption = None
    codec: Annotated[
        Optional[str], option("--codec", "NAME", "Codec of stored KV (none). An unknown name lists all.", COMPILING)
    ] = None
    output: Annotated[
        Optional[str],
        option(
            "-o, --output",
            "FILE",
            "Results file (JSON Lines; by default in the store). Appends to an existing file.",
            OUTPUT,
        ),
    ] = None
    as_json: JsonOption = False


@command(app, "eval", "model", "device", "dtype", "store", "remote", *SALT)
def run_eval(options: EvalOptions, settings: Settings) -> None:
    """Compare policies by their answers to a dataset. Each is compared with full recompute.

    \b
      pic eval questions.jsonl --algo legolink-16 --algo cacheblend:ratio=.1,.2
    """
    from pictool.eval.datasets import open_dataset
    from pictool.eval.evaluate import EvaluationOptions, evaluate
    from pictool.eval.policies import DEFAULT_POLICIES, parse_policies
    from pictool.eval.summary import require_metric, summarise

    with of_command_line():
        require_metric(options.metric)
        policies = parse_policies(options.algo or DEFAULT_POLICIES)
    dataset = open_dataset(options.dataset, parse_fields(options.params))
    if options.output is not None:
        output_path("-o", options.output, [dataset.params["path"]] if "path" in dataset.params else [])
    spec_options, store = make_spec_options(options), open_store(settings)
    model = open_model(replace(settings, separator=None))
    policies = policies if options.algo else runnable(model, policies)
    run = EvaluationOptions(None if options.output is None else Path(options.output), options.limit)
    with answers_bar(title(dataset, model)) as bar:
        done = evaluate(model, store, dataset, policies, spec_options, run, on_progress=bar, on_note=note)
    summary = summarise(done, options.metric)
    if done.skipped:
        note(left_out(done.skipped, model))
    note(f"results are in {done.path}")
    if options.as_json:
        print_json(summary.report())
    else:
        from pictool.commands.console.terminal import open_screen

        print_summary(summary, open_screen())


def make_spec_options(options: EvalOptions) -> SpecOptions:
    """How every case becomes a spec; `pic.yaml` and the environment have no part in it."""
    from pictool.compiler.compile import CODEC
    from pictool.eval.cases import SpecOptions

    return SpecOptions(
        chunk_tokens=options.chunk_tokens,
        head=text_or_silent("the head", options.head),
        query_template=text_or_silent("the query template", options.query_template),
        separator=text_or_silent("the separator", options.separator),
        max_new_tokens=options.max_new_tokens,
        codec=options.codec or CODEC,
        stop=tuple(options.stop),
    )


def left_out(skipped: Sequence[str], model: Model) -> str:
    few = ", ".join(skipped[:3]) + (", …" if len(skipped) > 3 else "")
    what = "1 case skipped" if len(skipped) == 1 else f"{len(skipped)} cases skipped"
    return f"{what}, prompt too long for {model.name}: {few}"


def title(dataset: Dataset, model: Model) -> str:
    return f"{Path(dataset.params.get('path', dataset.name)).name}, {model.name}"


def print_summary(summary: Summary, console: Console) -> None:
    model = summary.header["model"]
    console.print(
        f"{summary.title}: {count(summary.questions, 'question')} over {count(summary.units, 'set')} of documents, "
        f"{summary.tokens:.0f} tokens a prompt; {model['name']}, {model['dtype']} on {model['device']}, "
        f"{count(summary.header['threads'], 'thread')}",
        soft_wrap=True,
    )
    for table in (quality_table(summary), cost_table(summary), *parts_tables(summary)):
        console.print()
        console.print(table)
    console.print(f"\n{LEGEND}")


def quality_table(summary: Summary) -> LabelledTable:
    """Scores with 95 % intervals, the difference to full, and fidelity to it."""
    from pictool.commands.console.terminal import LabelledTable

    columns = ["policy", summary.metric, "95 %", "diff", "95 %", "lost", "won", "KL", "all", "same"]
    table = LabelledTable(columns)
    for line in summary.lines:
        difference = f"{line.difference.mean:+.3f}"
        against = [difference, interval(line.difference, "{:+.2f}"), percent(line.lost), percent(line.won)]
        if line is summary.lines[0]:
            against = [NONE] * 4
        table.add_row(
            line.label, f"{line.score.mean:.3f}", interval(line.score, "{:.2f}"),
            *against,
            *(NONE if kl is None else number(kl.mean) for kl in (line.kl, line.answer_kl)), percent(line.same_answer),
        )  # fmt: skip
    return table


def cost_table(summary: Summary) -> LabelledTable:
    """Rows, times and bytes; times are medians."""
    from pictool.commands.console.terminal import LabelledTable

    table = LabelledTable(["policy", "rows", "TTFT", "speedup", "load", "select", "compute", "tok/s", "peak", "read"])
    for line in summary.lines:
        timing = line.timing
        table.add_row(
            line.label, percent(line.row_share), ms(timing.ttft_s), f"{line.speedup:.2f}x", ms(timing.load_s),
            ms(timing.select_s), ms(timing.recompute_s),
            NONE if line.decode_tokens_per_s is None else f"{line.decode_tokens_per_s:.0f}",
            size(line.peak_bytes), size(line.bytes_read),
        )  # fmt: skip
    return table


def parts_tables(summary: Summary) -> Iterator[LabelledTable]:
    """Scores, and the share of answers that are full's, by kind of question."""
    lines, metric = summary.lines, summary.metric
    if summary.kinds:
        yield parts_table(metric, summary.kinds, {line.label: {
            kind: with_interval(line.by_kind.get(kind)) for kind in summary.kinds} for line in lines})  # fmt: skip
        yield parts_table("same", summary.kinds, {line.label: {
            kind: percent(share) for kind, share in line.same_by_kind.items()} for line in lines[1:]})  # fmt: skip


def parts_table(title: str, counts: Mapping[str, int], cells: Mapping[str, Mapping[str, str]]) -> LabelledTable:
    """Policies, and parts with their numbers of questions; the more numerous are the rows."""
    from pictool.commands.console.terminal import LabelledTable

    names = {part: f"{part or 'other'} ({number})" for part, number in counts.items()}
    if len(counts) <= max(len(cells), 3):
        table = LabelledTable([title, *names.values()])
        for label, by_part in cells.items():
            table.add_row(label, *(by_part.get(part, NONE) for part in counts))
        return table
    table = LabelledTable([title, *cells])
    for part, name in names.items():
        table.add_row(name, *(by_part.get(part, NONE) for by_part in cells.values()))
    return table


def interval(estimate: Estimate, form: str) -> str:
    if estimate.low is None or estimate.high is None:
        return NONE
    return f"{form.format(estimate.low)}…{form.format(estimate.high)}"


def with_interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return NONE
    if estimate.low is None:
        return f"{estimate.mean:.3f}"
    return f"{estimate.mean:.3f} {interval(estimate, '{:.2f}')}"


def number(value: float) -> str:
    """Three digits; small ones as a power of ten."""
    return "0" if value == 0 else f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"


def percent(share: float) -> str:
    return f"{share:.0%}" if share in (0, 1) or share >= 0.1 else f"{share:.1%}"


def ms(seconds: float) -> str:
    """Milliseconds, to three digits."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def size(num_bytes: float | None) -> str:
    """Megabytes."""
    if num_bytes is None:
        return NONE
    return f"{num_bytes / 1e6:,.0f}" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f}"
