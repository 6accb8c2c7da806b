"""`pic tune`: the cheapest policy that meets a target on your model and documents, written to `pic.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

from pictool.commands.console.errors import UsageError, of_command_line
from pictool.commands.console.outputs import print_json
from pictool.commands.console.progress import answers_bar
from pictool.commands.console.verbosity import note
from pictool.commands.console.words import count
from pictool.commands.settings.engine import runnable
from pictool.commands.settings.file import write_setting
from pictool.commands.settings.options import (
    COMPILING,
    DATASET,
    POLICY,
    SALT,
    SPECS,
    ChunkOption,
    JsonOption,
    argument,
    command,
    make_app,
    option,
)
from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import FILE, Settings, find_file
from pictool.errors import InputError
from pictool.needs import require_extra

if TYPE_CHECKING:
    from pictool.eval.cases import SpecOptions
    from pictool.runtime.model import Model
    from pictool.tuning.questions import Questions
    from pictool.tuning.tune import Measure, TuningResult, TuningTarget

DEFAULT_SHARE = "15%"
_GOALS = {"share": "share", "answer_kl": "all", "differ": "differ", "loss": "loss"}  # in the table
LEGEND = (
    "meets, fails: shown at {level:.0%}, for all policies together. open: not clear yet;\n"
    "blocked: one with more rows of its kind fails. rows: context share a layer.\n"
    "KL, all: of the first and of all tokens of full's answer. TTFT: median, ms.\n"
    "same: answers that are full's. open (~N): about N units would certify it."
)

app = make_app()


@dataclass(frozen=True)
class TuneOptions:
    """The options of `pic tune`; None where the user said nothing."""

    documents: Annotated[list[str], argument("DOCUMENT", "Text files to make prompts from.")] = field(
        default_factory=list
    )
    questions: Annotated[
        Optional[str],
        option(
            "--questions",
            "FILE",
            "JSON Lines with query and optional answers, or a dataset of pic eval. Required.",
            DATASET,
        ),
    ] = None
    limit: Annotated[int, option("--limit", "N", "Ask at most N questions.", DATASET, min=1)] = 1000
    per_prompt: Annotated[
        int, option("--per-prompt", "N", "Use at most N documents per prompt, ranked by BM25.", DATASET, min=1)
    ] = 8
    target_share: Annotated[
        Optional[str],
        option(
            "--target-share",
            "SHARE",
            f"Highest share of blind reuse's KL that may remain ({DEFAULT_SHARE}). The default target.",
        ),
    ] = None
    target_answer_kl: Annotated[
        Optional[float],
        option(
            "--target-answer-kl",
            "NATS",
            "Target instead: the highest mean KL of whole answers to full recompute.",
            min=0,
        ),
    ] = None
    target_differ: Annotated[
        Optional[str],
        option(
            "--target-differ",
            "SHARE",
            "Target instead: the share of answers that may differ from full recompute, such as 5%.",
        ),
    ] = None
    target_loss: Annotated[
        Optional[str],
        option(
            "--target-loss",
            "SHARE",
            "Target instead: the share of full recompute's score that may be lost, such as 1%.",
        ),
    ] = None
    algo: Annotated[list[str], option("--algo", "SPEC", f"Policy: {SPECS}", POLICY)] = field(default_factory=list)
    dry_run: Annotated[bool, option("-n, --dry-run", None, "Write nothing.")] = False
    chunk_tokens: ChunkOption = None
    codec: Annotated[
        Optional[str], option("--codec", "NAME", "Codec of stored KV (none). An unknown name lists all.", COMPILING)
    ] = None
    as_json: JsonOption = False


@command(app, "tune", "model", "device", "dtype", "store", "remote", "separator", *SALT)
def run_tune(options: TuneOptions, settings: Settings) -> None:
    """Choose the cheapest policy that meets a target. It is written to pic.yaml.

    \b
      pic tune docs/*.txt --questions questions.jsonl --target-share 15%
      pic tune --questions dataset.jsonl --target-loss 1%
    """
    from pictool.eval import EXTRA
    from pictool.eval.policies import parse_policies
    from pictool.tuning.questions import questions_of_file, read_corpus
    from pictool.tuning.tune import DEFAULT_POLICIES, TuningResult, tune

    target = target_of(options)
    require_extra(*EXTRA)
    with of_command_line():
        policies = parse_policies(options.algo or DEFAULT_POLICIES)
    if options.questions is None:
        raise UsageError("no questions to tune on; pass some with --questions")
    check_inputs(options, options.questions)
    store, model = open_store(settings), open_model(settings)
    policies = policies if options.algo else runnable(model, policies)
    spec_options = make_spec_options(options, settings)
    corpus = read_corpus(model, options.documents, options.chunk_tokens, options.per_prompt)
    questions = without_long(model, questions_of_file(options.questions, corpus, options.limit), spec_options)
    rounds = list[TuningResult]()
    try:
        with answers_bar(f"{count(questions.num_units, 'question')}, {model.name}") as bar:
            tuned = tune(
                model, store, questions, policies, target, spec_options,
                on_progress=bar, on_note=note, on_round=rounds.append,
            )  # fmt: skip
    except KeyboardInterrupt:
        note("stopped; nothing is written. Run the same command to continue")
        if rounds:
            show(rounds[-1], model, options)
        raise
    show(tuned, model, options)
    finish(tuned, options)


def target_of(options: TuneOptions) -> TuningTarget:
    """What the user wants; by default a share of blind reuse's KL. Raises UsageError: several targets, or no share."""
    from pictool.tuning.tune import TuningTarget

    measures: tuple[Measure, ...] = ("share", "answer_kl", "differ", "loss")
    named = [name for name in measures if getattr(options, f"target_{name}") is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(map(_target_option, named))}: use only one of them")
    measure = named[0] if named else measures[0]
    value = getattr(options, f"target_{measure}") if named else DEFAULT_SHARE
    limit = _share(_target_option(measure), value) if isinstance(value, str) else value
    if not limit > 0:
        raise UsageError(f"{_target_option(measure)}: must be above 0; only full and prefix reach 0")
    return TuningTarget(measure, limit)


def _target_option(measure: str) -> str:
    return f"--target-{measure.replace('_', '-')}"


def _share(name: str, text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise UsageError(f"{name} {text}: must be a share above 0 and below 1, such as 1% or 0.01")
    return share


def check_inputs(options: TuneOptions, questions: str) -> None:
    """Read documents, and the beginning of the questions, before a model is loaded for them. Raises InputError."""
    from pictool.compiler.chunking import read_text
    from pictool.eval.datasets import datasets
    from pictool.eval.datasets.records import first_record
    from pictool.store.codecs import require_codec

    with of_command_line():
        require_codec(options.codec or "none")
    for name in options.documents:
        read_text(Path(name))
    if questions not in datasets():
        first_record(Path(questions))


def make_spec_options(options: TuneOptions, settings: Settings) -> SpecOptions:
    """How questions become prompts: as `pic link` makes them."""
    from pictool.eval.cases import SpecOptions

    return SpecOptions(
        head=settings.head,
        query_template=settings.query_template,
        separator=settings.separator,
        codec=options.codec or "none",
        chunk_tokens=None if options.documents else options.chunk_tokens,
    )


def without_long(model: Model, questions: Questions, spec_options: SpecOptions) -> Questions:
    """The questions whose prompts fit the model.

    Raises:
        InputError: none does.
    """
    from pictool.tuning.questions import fitting

    kept, num_skipped = fitting(model, questions, spec_options)
    if num_skipped:
        note(f"{count(num_skipped, 'question')} skipped: prompt too long for {model.name}")
    if not kept.listed:
        raise InputError(f"{questions.origin}: no prompt fits {model.name}; lower --per-prompt, or set --chunk-tokens")
    return kept


def show(tuned: TuningResult, model: Model, options: TuneOptions) -> None:
    """Print the results so far, in the requested form."""
    if options.as_json:
        print_json(tuned.report())
    else:
        print_tuned(tuned, model)


def print_tuned(tuned: TuningResult, model: Model) -> None:
    """The frontier as a table, and what it says of answers."""
    from pictool.commands.console.terminal import LabelledTable, open_screen
    from pictool.commands.eval import ms, number, percent

    console, target = open_screen(), tuned.target
    goal = f"{_GOALS[target.measure]} {target.limit:.3g}"
    console.print(
        f"{tuned.units} of {count(tuned.available, 'question')} ({tuned.questions}); {model.name}, {model.dtype} on "
        f"{model.device}; target: {goal}", soft_wrap=True,
    )  # fmt: skip
    table = LabelledTable(
        ["policy", "rows", "KL", "all", _GOALS[target.measure] + " at most", "lost", "same", "TTFT", "n", ""]
    )
    for line in sorted(tuned.lines, key=lambda line: line.rows):
        has_answers = not tuned.no_answers
        needed = "" if line.finding.needed is None else f" (~{line.finding.needed})"  # units for a certificate
        table.add_row(
            line.label, percent(line.rows), number(line.kl), number(line.answer_kl), number(line.finding.high),
            f"{line.loss:+.3f}" if has_answers else "-", percent(line.same_answer) if has_answers else "-",
            ms(line.ttft_s), str(line.finding.units), f"{line.finding.status}{needed}",
        )  # fmt: skip
    table.add_row("full", "100%", "0", "0", "0", "0", "100%", ms(tuned.full_ttft_s), str(tuned.units), "meets")
    console.print()
    console.print(table)
    console.print(f"\n{LEGEND.format(level=1 - tuned.level)}")
    if tuned.no_answers:
        console.print(f"Answers cannot be certified: {tuned.no_answers}.", soft_wrap=True)


def finish(tuned: TuningResult, options: TuneOptions) -> None:
    """Write the policy, or say why there is none.

    Raises:
        InputError: too few questions to say, or no claim is possible.
    """
    from pictool.tuning.tune import TuneOutcome

    if tuned.outcome is TuneOutcome.NO_CLAIM:
        raise InputError(f"answers cannot be certified: {tuned.no_answers}; nothing is written. Try --target-share")
    if tuned.outcome is TuneOutcome.UNCLEAR:
        raise InputError(f"{unclear(tuned)}; nothing is written")
    assert tuned.chosen is not None
    if tuned.outcome is TuneOutcome.ONLY_FULL:
        note("only full meets the target")
    else:
        others = [line.label for line in tuned.lines if line.finding.status == "open"]
        more = f"; still open: {', '.join(others)}" if others else ""
        by_mean = "" if tuned.by_mean == tuned.chosen else f"; best guess by the mean alone: {tuned.by_mean}"
        note(f"{tuned.chosen} computes the fewest rows of all policies that meet the target{by_mean}{more}")
    if options.dry_run:
        return
    path = find_file() or Path(FILE)
    write_setting(path, "algo", tuned.chosen)
    note(f"wrote algo: {tuned.chosen} to {path}")


def unclear(tuned: TuningResult) -> str:
    """Why the sample decides nothing, and how many questions it may take."""
    needed = [line.finding.needed for line in tuned.lines if line.finding.needed is not None]
    text = f"{count(tuned.units, 'question')} are too few"
    if needed:
        text += f"; about {min(needed)} are needed (--limit, or more documents)"
    return f"{text}. Best guess so far: {tuned.by_mean or 'full'}"
