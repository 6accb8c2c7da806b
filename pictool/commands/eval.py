"""`pic eval`: a dataset's questions under several algorithms, each compared with full recompute."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.commands.common import UsageError, note, open_model, open_store, print_json, require_text
from pictool.commands.eval_progress import answers_bar
from pictool.commands.eval_report import print_summary
from pictool.commands.link import parse_fields
from pictool.commands.outputs import output_path
from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.eval.cases import SpecOptions
    from pictool.eval.datasets.base import Dataset
    from pictool.runtime.model import Model

PICTURES = (".svg", ".png")


@dataclass(frozen=True)
class EvalOptions:
    """The options of `pic eval`; None where the user said nothing."""

    dataset: str
    params: Sequence[str]
    algo: Sequence[str]
    output: str | None
    limit: int | None
    jobs: int | None
    chunk_tokens: int | None
    head: str | None
    query_template: str | None
    metric: str | None
    max_new_tokens: int | None
    skip_long: bool
    force: bool
    plot: str | None
    codec: str | None = None


def run_eval(
    options: EvalOptions, *, model: str | None, store: str | None, remote: str | None, device: str | None,
    dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    from pictool.eval.algorithms import DEFAULT_ALGORITHMS, parse_algorithms
    from pictool.eval.datasets import open_dataset
    from pictool.eval.evaluate import RunOptions, default_jobs, evaluate
    from pictool.eval.summary import require_metric, summarise

    require_metric(options.metric)
    algorithms = parse_algorithms(options.algo or DEFAULT_ALGORITHMS)
    dataset = open_dataset(options.dataset, parse_fields(options.params))
    check_outputs(options, dataset)
    settings, to = make_settings(options), open_store(store, remote)
    opened = open_model(model, device, dtype)
    run = RunOptions(
        output=None if options.output is None else Path(options.output),
        limit=options.limit, jobs=default_jobs(opened) if options.jobs is None else options.jobs,
        skip_long=options.skip_long, force=options.force,
    )  # fmt: skip
    with answers_bar(title(dataset, opened)) as bar:
        done = evaluate(opened, to, dataset, algorithms, settings, run, on_progress=bar, on_note=note)
    summary = summarise(done, options.metric)
    if done.skipped:
        note(left_out(done.skipped, opened))
    if options.plot is not None:
        from pictool.eval.plot import write_pareto

        note(f"wrote {' and '.join(map(str, write_pareto(summary, Path(options.plot))))}")
    note(f"results are in {done.path}")
    if as_json:
        print_json(summary.report())
    else:
        print_summary(summary)


def check_outputs(options: EvalOptions, dataset: Dataset) -> None:
    """Refuse what could not be written, or would destroy the dataset, before the long run."""
    inputs = [dataset.params["path"]] if "path" in dataset.params else []
    if options.output is not None:
        output_path("-o", options.output, inputs)
    if options.plot is None:
        return
    if Path(options.plot).suffix not in PICTURES:
        raise UsageError(f"--plot {options.plot}: must end in {' or '.join(PICTURES)}; both are written")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot: needs matplotlib; install pictool[plot], or leave --plot out")
    for suffix in PICTURES:
        output_path("--plot", str(Path(options.plot).with_suffix(suffix)), inputs)


def make_settings(options: EvalOptions) -> SpecOptions:
    from pictool.compiler.compile import CODEC
    from pictool.eval.cases import SpecOptions

    head, template = options.head, options.query_template
    return SpecOptions(
        chunk_tokens=options.chunk_tokens,
        head=None if head is None else require_text("the head", head),
        query_template=None if template is None else require_text("the query template", template),
        max_new_tokens=options.max_new_tokens,
        codec=options.codec or CODEC,
    )


def left_out(skipped: Sequence[str], model: Model) -> str:
    few = ", ".join(skipped[:3]) + (", …" if len(skipped) > 3 else "")
    what = "1 case is left out, which does" if len(skipped) == 1 else f"{len(skipped)} cases are left out, which do"
    return f"{what} not fit {model.name}: {few}"


def title(dataset: Dataset, model: Model) -> str:
    return f"{Path(dataset.params.get('path', dataset.name)).name}, {model.name}"
