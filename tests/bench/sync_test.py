"""One request after another: rows and bytes by hand, baselines that compute the same, nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import subjects
import tiny
import torch

from pictool.bench import single_request
from pictool.bench.options import PromptOptions
from pictool.bench.prompts import BenchPrompt, with_speculative
from pictool.bench.repeats import median_ratio
from pictool.bench.shapes import save_speculative
from pictool.bench.single_request import run_linked, run_transformers
from pictool.bench.sync import SyncResult, bench_sync
from pictool.errors import InputError
from pictool.fidelity.transformers_module import transformers_module
from pictool.linker.grid import LabelledPolicy, parse_grid
from pictool.linker.policies import make_policy
from pictool.runtime.model import Model
from pictool.store.store import Store

OPTIONS = PromptOptions(chunks=3, chunk_tokens=40, tail_tokens=8, new_tokens=4, repeats=2)
CONTEXT, PROMPT = 3 * 40, 3 * 40 + 8


def run(model: Model, specs: list[str], directory: Path, options: PromptOptions = OPTIONS) -> SyncResult:
    return bench_sync(model, parse_grid(specs), options, directory)


@pytest.fixture
def result(model: Model, tmp_path: Path) -> SyncResult:
    return run(model, ["legolink-16", "naive", "legolink-1", "full", "cacheblend-50"], tmp_path)


def test_full_is_first_and_transformers_last(result: SyncResult) -> None:
    labels = [method.label for method in result.methods]
    assert labels == ["full", "legolink-16", "naive", "legolink-1", "cacheblend-50", "transformers"]
    assert all(len(method.samples) == 2 for method in result.methods)


def test_rows_and_bytes_are_those_of_the_policy(model: Model, result: SyncResult) -> None:
    every = CONTEXT * model.token_bytes
    found = {method.label: (method.samples[0].rows, method.samples[0].bytes_read) for method in result.methods}
    assert found == {
        "full": (PROMPT, 0),
        "legolink-16": (2 * 16 + 8, every),
        "naive": (8, every),
        "legolink-1": (2 * 1 + 8, every),
        "cacheblend-50": (PROMPT, every // 2),  # of two layers the first is computed in full
        "transformers": (PROMPT, 0),
    }
    assert result.prompt_tokens == PROMPT
    assert {method.label: method.row_floor for method in result.methods}["legolink-16"] == PROMPT / (2 * 16 + 8)


def test_ratios_are_of_the_repeats(result: SyncResult) -> None:
    full = [sample.ttft_s for sample in result.methods[0].samples]
    for method in result.methods:
        assert method.speedup == median_ratio(full, [sample.ttft_s for sample in method.samples])
    assert result.methods[0].speedup == 1


def test_parts_of_a_link_are_its_ttft_and_transformers_has_none(result: SyncResult) -> None:
    for method in result.methods[:-1]:
        for each in method.samples:
            assert each.load_s is not None and each.select_s is not None and each.recompute_s is not None
            assert each.load_s + each.select_s + each.recompute_s == pytest.approx(each.ttft_s)
    assert result.methods[-1].median["load_s"] is None


def test_the_report_is_json_with_raw_samples(result: SyncResult) -> None:
    report = json.loads(json.dumps(result.report()))
    assert [len(method["samples"]) for method in report["methods"]] == [2] * 6


def test_transformers_generates_the_tokens_of_full(store: Store) -> None:
    subject = subjects.subject("llama3")
    prompt = BenchPrompt(store, tuple(subjects.make_chunks((17, 29))), " why?")
    linked = run_linked(subject.model, prompt, make_policy("full", {}), 12)
    plain = run_transformers(subject.model, transformers_module(subject.model), prompt.ids(subject.model), 12)
    assert linked.tokens == plain.tokens and len(set(plain.tokens)) > 3
    assert linked.rows == plain.rows


@pytest.mark.parametrize("architecture", subjects.ARCHITECTURES)
def test_the_baseline_holds_no_weight_twice_and_computes_the_same(architecture: str) -> None:
    subject = subjects.subject(architecture)
    plain = transformers_module(subject.model)
    ours, others = ({p.data_ptr() for p in module.parameters()} for module in (subject.model.module, plain))
    assert ours == others
    own = tiny.random_module(tiny.CONFIGS[architecture]()).config._attn_implementation  # transformers' own choice
    assert plain.config._attn_implementation == own and subject.model.config._attn_implementation == "pictool"
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        difference = (plain(ids).logits - subject.reference(ids).logits).abs().max()
    # Gemma 2's soft cap is left out by SDPA, which older transformers choose.
    assert difference <= (1e-2 if architecture == "gemma2" and own == "sdpa" else 1e-4)


def test_a_request_without_new_tokens_decodes_nothing(model: Model, store: Store) -> None:
    prompt = BenchPrompt(store, tuple(subjects.make_chunks((9,))), " why?")
    done = run_linked(model, prompt, make_policy("full", {}), 0)
    assert done.tokens == () and done.decode_tokens_per_s is None
    assert run_linked(model, prompt, make_policy("full", {}), 1).decode_tokens_per_s is None
    assert (run_linked(model, prompt, make_policy("full", {}), 3).decode_tokens_per_s or 0) > 0


def test_cold_runs_forget_the_objects_before_each_link(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[int] = []
    monkeypatch.setattr(single_request, "drop_page_cache", lambda paths: dropped.append(len(list(paths))))
    run(model, ["naive"], tmp_path / "warm", PromptOptions(2, 9, 4, 0, 1))
    assert not dropped
    run(model, ["naive"], tmp_path / "cold", PromptOptions(2, 9, 4, 0, 1, is_cold=True))
    assert dropped == [2] * 4  # full and naive, a warm-up and one repeat


def test_speccache_takes_the_speculative_model(model: Model, tmp_path: Path) -> None:
    small = save_speculative("tiny", str(tmp_path / "small"))
    policies = with_speculative(parse_grid(["speccache-25"]), small)
    found = bench_sync(model, policies, OPTIONS, tmp_path).methods[1]
    assert found.params["spec_model"] == small
    assert 8 + 0.25 * CONTEXT <= found.samples[0].rows <= 8 + 1.2 * 0.25 * CONTEXT


def test_the_number_of_runs_is_told(model: Model, tmp_path: Path) -> None:
    runs: list[None] = []
    bench_sync(model, parse_grid(["naive"]), PromptOptions(2, 9, 4, 0, 2), tmp_path, lambda: runs.append(None))
    assert len(runs) == 3 * 3  # full, naive, transformers; a warm-up and two repeats


def test_what_does_not_fit_is_refused_before_it_runs(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r" 153632 .*--chunk-tokens"):
        run(model, ["naive"], tmp_path, PromptOptions(chunks=300))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(InputError, match=r"/objects: .*--store"):
        run(model, ["naive"], tmp_path)


def test_full_alone_needs_no_object(model: Model, tmp_path: Path) -> None:
    policies: list[LabelledPolicy] = parse_grid(["full"])
    assert bench_sync(model, policies, OPTIONS, tmp_path).object_bytes == 0
