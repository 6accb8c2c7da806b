"""The loading controller (CacheBlend §5.1) on numbers made by hand, the paper's own among them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pictool.controller.cost import MIN_RATIO, Estimator, PromptSize, Speed, fit_nonnegative

CONTEXT = 4096
SIZE = PromptSize(CONTEXT, 0, 8, 1000)


def loads_in(seconds: float, size: PromptSize = SIZE) -> Speed:
    """A speed at which `size` is loaded in so many seconds."""
    return Speed(seconds / (size.context * size.token_bytes), 0.0)


def prefills_in(seconds: float, context: int = CONTEXT) -> Estimator:
    return Estimator(seconds / context, 0.0, 0.0)


# The paper's example, §5, per layer of a 4K context


def test_llama_7b_from_nvme_can_recompute_80_percent() -> None:
    """15 % takes 3 ms, loading 16 ms: more can be recomputed, as long as the delay is below 16 ms."""
    seven = prefills_in(0.003 / 0.15)
    choice = seven.choose_ratio(SIZE, loads_in(0.016))
    assert choice.ratio == 0.8
    assert choice.load_s == pytest.approx(0.016) and choice.prefill_s == pytest.approx(0.02)
    assert seven.recompute_s(0.15, SIZE) == pytest.approx(0.003)
    assert seven.recompute_s(choice.ratio, SIZE) == pytest.approx(0.016)


def test_llama_70b_stays_at_15_percent() -> None:
    """15 % takes 7 ms, loading 4 ms: loading does not hide the recompute, and less would cost quality."""
    seventy = prefills_in(0.007 / 0.15)
    assert seventy.choose_ratio(SIZE, loads_in(0.004)).ratio == MIN_RATIO
    assert seventy.recompute_s(MIN_RATIO, SIZE) == pytest.approx(0.007)


# The parts of an estimate


def test_only_what_grows_with_the_context_is_scaled() -> None:
    estimator = Estimator(2e-5, 0.01, 3e-9)
    size = replace(SIZE, tail=32)
    tail = estimator.prefill_s(CONTEXT + 32) - estimator.prefill_s(CONTEXT)
    context = estimator.prefill_s(CONTEXT) - 0.01
    assert estimator.recompute_s(0, size) == pytest.approx(0.01 + tail)
    assert estimator.recompute_s(0.3, size) == pytest.approx(0.01 + tail + 0.3 * context)
    assert estimator.recompute_s(1, size) == pytest.approx(estimator.prefill_s(CONTEXT + 32))


def test_loading_is_bytes_and_objects() -> None:
    assert prefills_in(1.0).load_s(SIZE, Speed(1e-9, 1e-3)) == pytest.approx(CONTEXT * 1000 * 1e-9 + 8e-3)


def test_layers_that_are_computed_whole_are_not_loaded() -> None:
    estimator = replace(prefills_in(4.0), whole=0.25)
    assert estimator.recompute_s(0.2, SIZE) == pytest.approx(1 + 3 * 0.2)
    assert estimator.load_s(SIZE, loads_in(4.0)) == pytest.approx(3.0)


def test_scattered_rows_take_longer_but_never_longer_than_all() -> None:
    estimator = replace(prefills_in(1.0), scattered=2.0)
    assert [estimator.recompute_s(ratio, SIZE) for ratio in (0, 0.2, 0.5, 1)] == pytest.approx([0, 0.4, 1, 1])
    assert estimator.choose_ratio(SIZE, loads_in(0.6)).ratio == pytest.approx(0.3)
    assert estimator.choose_ratio(SIZE, loads_in(1.0)).ratio == 1


def test_without_context_or_if_prefill_costs_nothing_the_ratio_is_the_least() -> None:
    choice = prefills_in(1.0).choose_ratio(PromptSize(0, 5, 0, 1000), loads_in(1.0))
    assert (choice.ratio, choice.load_s, choice.prefill_s) == (MIN_RATIO, 0, 0)
    assert prefills_in(0.0).choose_ratio(SIZE, loads_in(1.0)).ratio == MIN_RATIO


# Fits


def test_a_fit_finds_the_coefficients() -> None:
    truth = Estimator(2e-5, 0.004, 3e-9)
    rows = [[length - 2, 2, 1.0, truth.prefill_s(length)] for length in (64, 256, 1024, 4096)]
    apart = replace(truth, scattered=1.5).recompute_s(0.125, PromptSize(1022, 2, 1, 1000))
    fitted = Estimator.fit([*rows, [1022, 2, 0.125, apart]], 0.25)
    found = (fitted.token_s, fitted.constant_s, fitted.pair_s, fitted.scattered, fitted.whole)
    assert found == pytest.approx((2e-5, 0.004, 3e-9, 1.5, 0.25), rel=1e-6)


def test_a_fit_finds_the_speed() -> None:
    sizes, objects = [1e6, 4e6, 8e6], [16, 4, 2]
    loads = [3e-10 * size + 2e-4 * count for size, count in zip(sizes, objects, strict=True)]
    assert fit_nonnegative([sizes, objects], loads) == pytest.approx([3e-10, 2e-4])


def test_no_coefficient_is_below_zero() -> None:
    """Falling times would want a negative rate."""
    seconds = {64: 0.5, 256: 0.02, 1024: 0.17, 4096: 3.0}
    rows = [[length, 0, 1.0, taken] for length, taken in seconds.items()]
    fitted = Estimator.fit([*rows, [1024, 0, 0.125, 0.01]])
    assert min(fitted.token_s, fitted.constant_s, fitted.pair_s) >= 0 and fitted.scattered >= 1
    assert fitted.prefill_s(4096) > fitted.prefill_s(64)


# What holds for all numbers

times = st.floats(1e-6, 1e3)
ratios = st.floats(0, 1)
estimators = st.builds(
    Estimator, st.floats(1e-7, 1e-2), st.floats(0, 1), st.floats(0, 1e-6), st.floats(1, 9), st.floats(0, 0.9)
)
sizes = st.builds(PromptSize, st.integers(1, 10**6), st.integers(0, 1000), st.integers(1, 500), st.integers(1, 10**6))
speeds = st.builds(Speed, st.floats(0, 1e-6), st.floats(0, 0.1))


@given(estimators, sizes, speeds, ratios, ratios)
def test_more_work_takes_longer(estimator: Estimator, size: PromptSize, speed: Speed, a: float, b: float) -> None:
    low, high = sorted((a, b))
    longer = replace(size, context=size.context + 1, objects=size.objects + 1)
    assert estimator.recompute_s(low, size) <= estimator.recompute_s(high, size)
    assert estimator.recompute_s(a, size) <= estimator.recompute_s(a, longer) * (1 + 1e-9)
    assert estimator.load_s(size, speed) <= estimator.load_s(longer, speed)


@given(estimators, sizes, speeds, speeds)
def test_a_slower_device_gets_no_smaller_ratio(
    estimator: Estimator, size: PromptSize, speed: Speed, more: Speed
) -> None:
    slower = Speed(speed.byte_s + more.byte_s, speed.object_s + more.object_s)
    choice, other = estimator.choose_ratio(size, speed), estimator.choose_ratio(size, slower)
    assert MIN_RATIO <= choice.ratio <= other.ratio <= 1
    if MIN_RATIO < choice.ratio < 1:  # in hundredths
        below, above = (estimator.recompute_s(choice.ratio + step, size) for step in (-0.006, 0.006))
        assert below <= choice.load_s <= above


@given(st.lists(st.tuples(st.integers(3, 10**5), times), min_size=1, max_size=6), times)
def test_any_measurement_gives_a_usable_fit(points: list[tuple[int, float]], apart: float) -> None:
    fitted = Estimator.fit([*([tokens, 2, 1.0, seconds] for tokens, seconds in points), [100, 2, 0.125, apart]])
    assert all(
        0 <= value < float("inf") for value in (fitted.token_s, fitted.constant_s, fitted.pair_s, fitted.scattered)
    )
    assert fitted.prefill_s(max(length for length, _ in points)) > 0
