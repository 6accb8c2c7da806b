"""Growing prompts: exact lengths at a fixed size of chunks; where memory ends, a curve ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import linregress

from benchmarks import context
from benchmarks.context import (
    ContextOptions,
    ContextResult,
    Curve,
    CurvePoint,
    Growth,
    bench_context,
    longer_half,
    make_prompts,
    plot_context,
)
from pictool.bench.repeats import MedianRange
from pictool.bench.single_request import run_linked
from pictool.errors import InputError
from pictool.linker.grid import parse_grid
from pictool.runtime.model import Model
from pictool.store.store import Store

OPTIONS = ContextOptions(start=64, stop=300, chunk_tokens=24, tail_tokens=8, repeats=1)


def test_prompts_have_exactly_these_tokens_and_chunks_of_one_size(model: Model, store: Store) -> None:
    prompts = make_prompts(model, parse_grid(["naive"]), OPTIONS, store)
    assert [tokens for tokens, _ in prompts] == [64, 128, 256]
    for tokens, prompt in prompts:
        lengths = [len(chunk) for chunk in prompt.chunks]
        assert len(prompt.ids(model)) == tokens
        assert lengths[:-1] == [24] * (len(lengths) - 1) and sum(lengths) == tokens - 8


def test_a_longer_prompt_begins_like_a_shorter_one_and_all_are_compiled(model: Model, store: Store) -> None:
    (_, short), (_, longer), (_, longest) = make_prompts(model, parse_grid(["naive"]), OPTIONS, store)
    assert longest.chunks[:5] == longer.chunks[:5] and longer.chunks[:2] == short.chunks[:2]
    # 56 = 2·24 + 8, 120 = 5·24, 248 = 10·24 + 8: ten whole chunks, and one of 8 that is in two prompts
    assert len(store.keys()) == 10 + 1


def test_all_policies_are_measured_at_all_lengths(model: Model, tmp_path: Path) -> None:
    result = bench_context(model, parse_grid(["legolink-2", "full"]), OPTIONS, tmp_path)
    assert [curve.label for curve in result.curves] == ["full", "legolink-2", "transformers"]
    for curve in result.curves:
        assert [point.tokens for point in curve.points] == [64, 128, 256] and curve.out_of_memory is None
    rows = [point.rows for point in result.curves[1].points]
    assert rows == [8 + 2 * 2, 8 + 2 * 4, 8 + 2 * 10]  # of every chunk but the first
    assert [point.speedup for point in result.curves[0].points] == [1, 1, 1]
    assert result.curves[2].recompute is None and result.curves[1].recompute is not None
    for curve in json.loads(json.dumps(result.report()))["curves"]:
        assert {*curve["growth"]} == {"ttft", "long_ttft", "recompute"} and len(curve["points"][0]["samples"]) == 1


def out_of_memory_from(tokens: int, labels: set[str]) -> Callable[..., Any]:
    """`run_linked` that finds no memory for some policies from so many tokens on."""

    def run(model: Model, prompt: Any, policy: Any, *more: Any) -> Any:
        if policy.name in labels and len(prompt.ids(model)) >= tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run_linked(model, prompt, policy, *more)

    return run


def test_a_curve_ends_where_memory_does_and_the_others_go_on(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "run_linked", out_of_memory_from(128, {"full"}))
    full, naive, plain = bench_context(model, parse_grid(["naive"]), OPTIONS, tmp_path).curves
    assert [point.tokens for point in full.points] == [64] and full.out_of_memory == 128
    assert [len(curve.points) for curve in (naive, plain)] == [3, 3] and naive.out_of_memory is None
    assert [point.speedup is None for point in naive.points] == [False, True, True]
    assert full.ttft is None


def curve(seconds: list[float], recompute: list[float]) -> Curve:
    points = [
        CurvePoint(1024 << i, MedianRange(ttft, ttft, ttft), compute, 1.0, 0, None, 1.0, ())
        for i, (ttft, compute) in enumerate(zip(seconds, recompute, strict=True))
    ]
    return Curve("x", {}, tuple(points), None)


def test_exponents_are_over_all_lengths_over_the_longer_half_and_of_computing() -> None:
    found = curve([1, 2, 4, 16], [1, 4, 16, 64])
    assert found.ttft is not None and found.long_ttft is not None and found.recompute is not None
    assert (found.ttft.exponent, found.ttft.error) == pytest.approx((1.3, 0.1732), abs=1e-4)  # scipy.stats.linregress
    assert found.long_ttft.exponent == pytest.approx(2) and found.long_ttft.error is None
    assert (found.recompute.exponent, found.recompute.error) == pytest.approx((2, 0), abs=1e-9)


def test_the_last_length_must_fit_the_model(model: Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r" 262144 .* --to "):
        bench_context(model, parse_grid(["naive"]), ContextOptions(stop=1 << 18), tmp_path)


def test_a_picture_is_svg_and_png_with_the_exponents() -> None:
    result = ContextResult((1024, 2048), (curve([1, 4], [1, 4]), Curve("y", {}, (), 1024)))
    plot_context(result, "a title", "out")
    text = Path("out.svg").read_text()
    assert all(f"<!-- {shown} -->" in text for shown in ("a title", "x", "2.00; -"))
    assert Path("out.png").read_bytes()[:4] == b"\x89PNG"


# Growth


def test_a_power_law_gives_its_exponent() -> None:
    tokens = [1024, 2048, 4096, 8192]
    fit = Growth.fit(tokens, [3e-9 * n**1.7 for n in tokens])
    assert fit is not None and fit.error is not None
    assert fit.exponent == pytest.approx(1.7) and fit.error == pytest.approx(0, abs=1e-6)


def test_exponent_and_error_are_those_of_scipy() -> None:
    tokens = [1000, 1500, 4000, 9000, 30000]
    seconds = np.random.default_rng(0).uniform(0.5, 2, 5) * np.array(tokens) ** 1.3
    fit, expected = Growth.fit(tokens, list(seconds)), linregress(np.log(tokens), np.log(seconds))
    assert fit is not None
    assert (fit.exponent, fit.error) == pytest.approx((expected.slope, expected.stderr))


def test_two_lengths_have_no_error_and_one_no_exponent() -> None:
    fit = Growth.fit([10, 100], [1.0, 10.0])
    assert fit is not None and fit.exponent == pytest.approx(1.0) and fit.error is None
    assert Growth.fit([10], [1.0]) is None and Growth.fit([], []) is None
    assert [str(growth) for growth in (Growth(1.234, None), Growth(2.0, 0.056))] == ["1.23", "2.00 ± 0.06"]


def test_the_longer_half_has_the_middle_one() -> None:
    assert [list(range(n))[longer_half(n)] for n in (1, 2, 5, 6)] == [[0], [1], [2, 3, 4], [3, 4, 5]]
