"""The whole examination, in its order: the machine, the exactness rules, linked answers."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pictool.doctor.answers import Policies, examine_answers
from pictool.doctor.exactness import examine_exactness
from pictool.doctor.steps import SECTION, examine_steps
from pictool.doctor.surroundings import examine_surroundings
from pictool.doctor.verdict import DoctorReport, OnVerdict, Verdict, VerdictStatus, facts_of, guarded
from pictool.engines import GGUF, engine_name
from pictool.engines.torch import TorchEngine
from pictool.linker.grid import parse_repeatable
from pictool.linker.policies import BASELINE, DEFAULT
from pictool.runtime.chat.template import has_date, make_frame
from pictool.runtime.device import is_accelerator
from pictool.runtime.model import Model, load_model
from pictool.store.store import Store

POLICIES = (BASELINE, "naive", DEFAULT, "legolink-16", "cacheblend-15")


@dataclass(frozen=True)
class Examination:
    """What is examined.

    Fields:
        model, device, dtype: as `load_model` takes them. store: whose disk is looked at.
        policies: whose answers are compared with full recompute.
    """

    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    store: str | Path | None = None
    policies: Sequence[str] = POLICIES


def examine(examination: Examination, on_verdict: OnVerdict = lambda _: None) -> DoctorReport:
    """Examine a machine, and a model on its device in its dtype. What goes wrong is a verdict.

    Args:
        on_verdict: called with each verdict as soon as it is made.

    Raises:
        InputError: no such policy.
    """
    policies = parse_repeatable(examination.policies)
    verdicts: list[Verdict] = []
    for verdict in _verdicts(examination, policies):
        verdicts.append(verdict)
        on_verdict(verdict)
    return DoctorReport(tuple(verdicts))


def _verdicts(examination: Examination, policies: Policies) -> Iterator[Verdict]:
    yield from examine_surroundings(Store(examination.store), examination.device)
    if engine_name(examination.model) == GGUF:
        from pictool.doctor.gguf import examine_gguf

        name = examination.model or os.environ["PIC_MODEL"]
        with tempfile.TemporaryDirectory(prefix="pic-doctor-") as inside:
            yield from examine_gguf(name, examination.device, examination.dtype, Path(inside), policies)
        return
    opened: list[Model] = []
    yield from guarded("model", "model", lambda: _open(examination, opened))
    if not opened:
        return
    yield from guarded("model", "prompts", lambda: _prompts(opened[0]))
    with tempfile.TemporaryDirectory(prefix="pic-doctor-") as inside:
        yield from _on_torch(opened.pop(), Path(inside), policies)


def _open(examination: Examination, opened: list[Model]) -> Verdict:
    """Load the model, whose weights are on their device then, and append it to `opened`."""
    started = time.perf_counter()
    model = load_model(examination.model, examination.device, examination.dtype)
    _ = model.stack
    seconds, weights = time.perf_counter() - started, sum(weight.numel() for weight in model.module.parameters())
    opened.append(model)
    text = (
        f"{model.name}: {model.config.model_type}, {model.geometry.layers} layers, {weights / 1e6:,.4g}M weights, "
        f"{model.max_positions} positions, {model.dtype} on {model.device}; loaded in {seconds:.1f} s"
    )
    values = {
        "architecture": model.config.model_type, "weights": weights,
        "rope": getattr(model.config, "rope_parameters", None), "load_s": seconds, **facts_of(model),
    }  # fmt: skip
    return Verdict("model", "model", VerdictStatus.OK, text, values)


def _prompts(model: Model) -> Verdict:
    """Split a prompt into head and tail, as every link does."""
    head = len(model.encode(make_frame(model, "Which year?").head))
    if not model.tokenizer.chat_template:
        return Verdict("model", "prompts", VerdictStatus.OK, f"no chat template; a head of {head} tokens")
    text = f"its chat template is split after a head of {head} tokens"
    if has_date(model):
        return Verdict(
            "model", "prompts", VerdictStatus.NOTE, f"{text}, with today's date: the head is compiled again each day"
        )
    return Verdict("model", "prompts", VerdictStatus.OK, text)


def _on_torch(model: Model, objects: Path, policies: Policies) -> Iterable[Verdict]:
    yield from guarded("exactness", "exactness", lambda: examine_exactness(model, Store(objects / "exactness")))
    engine = TorchEngine(model, Store(objects / "torch"))
    linked = [each for each in policies if model.links(each.policy)]
    yield from guarded("answers of the torch engine", "answers", lambda: examine_answers(engine, linked))
    if is_accelerator(model.device):
        yield from guarded(SECTION, "links", lambda: examine_steps(model))
