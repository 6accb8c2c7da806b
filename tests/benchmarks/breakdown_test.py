"""The parts of TTFT add up to it; timing changes no result and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks import breakdown
from benchmarks.breakdown import Parts, Stopwatch, bench_breakdown, link_in_parts
from pictool.bench.options import PromptOptions
from pictool.bench.prompts import BenchPrompt, make_prompt, with_speculative
from pictool.bench.shapes import save_speculative
from pictool.bench.single_request import link_prompt
from pictool.linker.fusor import Fusor
from pictool.linker.grid import LabelledPolicy, parse_grid
from pictool.linker.link import Linked
from pictool.runtime.model import Model

OPTIONS = PromptOptions(chunks=3, chunk_tokens=40, tail_tokens=8, repeats=2)


@pytest.fixture
def policies(tmp_path: Path) -> list[LabelledPolicy]:
    grid = parse_grid(["full", "naive", "legolink-16", "cacheblend-50", "speccache-25"])
    return with_speculative(grid, save_speculative("tiny", str(tmp_path / "small")))


@pytest.fixture
def prompt(model: Model, policies: list[LabelledPolicy], tmp_path: Path) -> BenchPrompt:
    return make_prompt(model, policies, OPTIONS, tmp_path)


def test_parts_add_up_to_the_ttft_of_the_link(
    model: Model, policies: list[LabelledPolicy], prompt: BenchPrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    links: list[Linked] = []

    def kept(*args: object) -> Linked:
        links.append(link_prompt(*args))  # type: ignore[arg-type]
        return links[-1]

    monkeypatch.setattr(breakdown, "link_prompt", kept)
    for labelled in policies:
        parts = link_in_parts(model, prompt, labelled.policy)
        assert parts.ttft == pytest.approx(links[-1].timing.ttft_s)
        assert min(parts.load, parts.scoring, parts.select, parts.logits, parts.other, *parts.checks) >= 0
        assert len(parts.layers) == len(parts.checks) == model.geometry.layers and min(parts.layers) > 0


def test_only_checked_layers_check_and_only_speccache_scores(
    model: Model, policies: list[LabelledPolicy], prompt: BenchPrompt
) -> None:
    for labelled in policies:
        parts = link_in_parts(model, prompt, labelled.policy)
        checked = labelled.policy.check_layers(model.geometry.layers)
        assert [seconds > 0 for seconds in parts.checks] == [layer in checked for layer in range(2)]
        assert bool(checked) == (labelled.policy.name == "cacheblend")
        assert (parts.scoring > 0) == (labelled.policy.name == "speccache")


def test_timing_changes_no_result(model: Model, policies: list[LabelledPolicy], prompt: BenchPrompt) -> None:
    for labelled in policies:
        with Stopwatch(model):
            timed = link_prompt(model, prompt, labelled.policy, False).image.logits
        plain = link_prompt(model, prompt, labelled.policy, False).image.logits
        assert timed is not None and plain is not None and torch.equal(timed, plain)


def test_every_layer_is_timed_once_and_the_logits(
    model: Model, policies: list[LabelledPolicy], prompt: BenchPrompt
) -> None:
    for labelled in policies:
        layers = model.geometry.layers
        with Stopwatch(model) as watch:
            link_prompt(model, prompt, labelled.policy, False)
        counts = {name: len(seconds) for name, seconds in watch.seconds.items()}
        checks = {"check": len(labelled.policy.check_layers(layers))} if labelled.policy.check_layers(layers) else {}
        scoring = {"scoring": 1} if labelled.policy.needs.runs_model else {}
        assert counts == {"layer": layers, "logits": 1, **checks, **scoring}


def test_a_link_that_is_interrupted_while_it_is_timed_leaves_nothing_behind(
    model: Model, policies: list[LabelledPolicy], prompt: BenchPrompt
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = link_prompt(model, prompt, policies[1].policy, False).image.logits
    with pytest.raises(KeyboardInterrupt), patch.object(Fusor, "prefill_layer", interrupt), Stopwatch(model):
        link_prompt(model, prompt, policies[1].policy, False)
    after = link_prompt(model, prompt, policies[1].policy, False).image.logits
    assert before is not None and after is not None and torch.equal(before, after)


def test_medians_are_part_by_part() -> None:
    several = [Parts(i, 0, i, (i, 2 * i), (0, i), i, 0) for i in (1.0, 5.0, 2.0)]
    assert Parts.medians(several) == Parts(2, 0, 2, (2, 4), (0, 2), 2, 0)
    assert Parts(1, 2, 4, (8, 16), (32, 64), 128, 256).ttft == 511


def test_a_run_has_all_policies_and_raw_samples(model: Model, policies: list[LabelledPolicy], tmp_path: Path) -> None:
    result = bench_breakdown(model, policies, OPTIONS, tmp_path)
    assert [method.label for method in result.methods] == [labelled.label for labelled in policies]
    assert all(len(method.samples) == 2 for method in result.methods)
    assert result.methods[3].checked == (1,) and result.prompt_tokens == 128
    assert sum(result.methods[3].share(part) for part in result.methods[3].parts.layers) < 1
    json.dumps(result.report())
