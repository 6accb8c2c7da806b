"""The loading controller (CacheBlend §5.1) on numbers made by hand, the paper's own among them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pictool.controller.cost import ComputeMeasurement, Estimator, PromptSize, Speed, Work, fit_nonnegative, layer_work
from pictool.controller.decision import MIN_RATIO, Tier, choose_ratio, choose_tier, make_plan

CONTEXT = 4096
SIZE = PromptSize(CONTEXT, 0, 8, 1000)
REUSE = layer_work(1)


def loads_in(seconds: float, size: PromptSize = SIZE) -> Speed:
    """A speed at which `size` is loaded in so many seconds."""
    return Speed(seconds / size.num_bytes, 0.0)


def prefills_in(seconds: float, context: int = CONTEXT) -> Estimator:
    return Estimator(seconds / context, 0.0, 0.0, 0.0, REUSE)


# The paper's example, §5, per layer of a 4K context


def test_llama_7b_from_nvme_can_recompute_80_percent() -> None:
    """15 % takes 3 ms, loading 16 ms: more can be recomputed, as long as the delay is below 16 ms."""
    seven = prefills_in(0.003 / 0.15)
    choice = choose_ratio(seven, SIZE, loads_in(0.016))
    assert choice.ratio == 0.8 and choice.equal == pytest.approx(0.8)
    assert choice.load_s == pytest.approx(0.016) and choice.prefill_s == pytest.approx(0.02)
    assert seven.recompute_s(0.15, SIZE) == pytest.approx(0.003)
    assert seven.recompute_s(choice.ratio, SIZE) == pytest.approx(0.016)


def test_llama_70b_stays_at_15_percent() -> None:
    """15 % takes 7 ms, loading 4 ms: loading does not hide the recompute, and less would cost quality."""
    seventy = prefills_in(0.007 / 0.15)
    choice = choose_ratio(seventy, SIZE, loads_in(0.004))
    assert choice.ratio == MIN_RATIO and choice.equal == pytest.approx(0.004 * 0.15 / 0.007)
    assert seventy.recompute_s(MIN_RATIO, SIZE) == pytest.approx(0.007)


def test_the_cheapest_tier_that_recompute_hides() -> None:
    """Fig. 10 (b): 15 % in 7 ms hides all but the slowest; of the others the cheapest is taken."""
    tiers = [Tier("ram", 2.0, loads_in(0.001)), Tier("nvme", 0.2, loads_in(0.004)), Tier("hdd", 0.03, loads_in(0.05))]
    choice = choose_tier(prefills_in(0.007 / 0.15), SIZE, tiers, 0.15)
    assert choice.tier is tiers[1] and choice.is_hidden
    assert choose_tier(prefills_in(0.4), SIZE, tiers, 0.15).tier is tiers[2]
    nothing = choose_tier(prefills_in(0.001), SIZE, tiers, 0.15)
    assert nothing.tier is tiers[0] and not nothing.is_hidden


def test_of_equal_prices_the_faster_tier_and_of_equal_delays_the_cheaper() -> None:
    slow, fast = Tier("slow", 1.0, loads_in(0.003)), Tier("fast", 1.0, loads_in(0.002))
    dear = Tier("dear", 2.0, fast.speed)
    assert choose_tier(prefills_in(1.0), SIZE, [slow, fast], 0.5).tier is fast
    assert choose_tier(prefills_in(0.0001), SIZE, [dear, fast], 0.5).tier is fast


# The parts of an estimate


def test_only_what_grows_with_the_context_is_scaled() -> None:
    estimator = Estimator(2e-5, 0.01, 3e-9, 0.0, layer_work(4))
    size = replace(SIZE, tail=32)
    tail = estimator.prefill_s(CONTEXT + 32) - estimator.prefill_s(CONTEXT)
    context = estimator.prefill_s(CONTEXT) - 0.01
    assert estimator.recompute_s(0, size) == pytest.approx(0.01 + tail)
    assert estimator.recompute_s(0.3, size) == pytest.approx(0.01 + tail + 0.3 * context)
    assert estimator.recompute_s(1, size) == pytest.approx(estimator.prefill_s(CONTEXT + 32))


def test_loading_is_bytes_and_objects() -> None:
    assert prefills_in(1.0).load_s(SIZE, Speed(1e-9, 1e-3)) == pytest.approx(CONTEXT * 1000 * 1e-9 + 8e-3)


def test_a_policy_that_checks_layers_computes_and_projects_more_and_loads_less() -> None:
    work = layer_work(4, (1, 2, 3), 0.25)
    assert work == (Work(1, 0, False), Work(0.25, 1, True), Work(0, 1.25, True), Work(0, 1.25, True))
    assert layer_work(4, (2,), 0.25)[1:] == (Work(1, 0, False), Work(0.25, 1, True), Work(0, 1, True))
    estimator = replace(prefills_in(4.0), work=work)
    assert estimator.recompute_s(0.2, SIZE) == pytest.approx(1 + 0.25 + 0.2 + 2 * 0.25)
    assert estimator.load_s(SIZE, loads_in(4.0)) == pytest.approx(3.0)


def test_runs_cost_most_when_half_of_the_rows_are_computed() -> None:
    """Of rows chosen at random: none has many runs, nor have all; where nothing is reused there is one."""
    estimator = Estimator(0.0, 0.0, 0.0, 0.01, layer_work(4, (2,)))
    assert [estimator.recompute_s(ratio, SIZE) for ratio in (0, 1)] == [0, 0]
    assert estimator.recompute_s(0.5, SIZE) == pytest.approx(0.01 * CONTEXT / 4 * 2 / 4)


def test_up_to_the_ratio_that_is_chosen_loading_hides_recompute() -> None:
    """With runs, half of the rows may take longer than all: then either all are computed, or few."""
    estimator = replace(prefills_in(1.0), run_s=8.0 / CONTEXT)
    assert [estimator.recompute_s(ratio, SIZE) for ratio in (0.5, 1)] == pytest.approx([2.5, 1])
    assert choose_ratio(estimator, SIZE, loads_in(1.01)).ratio == 1
    few = choose_ratio(estimator, SIZE, loads_in(0.99), minimum=0.01)
    assert few.equal is not None and few.equal < 0.2 and few.ratio == pytest.approx(few.equal, abs=0.0051)
    assert estimator.recompute_s(few.equal, SIZE) == pytest.approx(0.99)


def test_layers_are_pipelined() -> None:
    """Fig. 10 (a): of two equal sides one layer's time comes on top; of unequal ones the longer is seen in full."""
    estimator = replace(prefills_in(8.0), work=layer_work(8))
    assert estimator.ttft_s(1, SIZE, loads_in(8.0)) == pytest.approx(9.0)
    assert estimator.ttft_s(1, SIZE, loads_in(0.8)) == pytest.approx(8.1)
    assert estimator.ttft_s(0.1, SIZE, loads_in(8.0)) == pytest.approx(8.1)
    assert estimator.ttft_s(1, SIZE, replace(loads_in(8.0), open_s=0.5)) == pytest.approx(9.0 + 8 * 0.5)


def test_a_device_s_time_comes_on_top_of_the_loader_s() -> None:
    assert Speed(1, 2, 3).after(Speed(10, 20, 30)) == Speed(11, 22, 33)


def test_cost_is_by_gigabyte() -> None:
    assert Tier("nvme", 0.2, None).cost(PromptSize(10, 0, 1, 500_000_000)) == pytest.approx(1.0)


def test_a_plan_has_every_tier_and_both_choices() -> None:
    tiers = [Tier("fast", 2.0, loads_in(0.001)), Tier("slow", 0.1, loads_in(0.016)), Tier("unknown", 0.0, None)]
    plan = make_plan(prefills_in(0.02), SIZE, tiers, 0.15)
    assert [one.choice.ratio for one in plan.tiers] == [0.15, 0.8, 0.15]
    assert [one.load_s for one in plan.tiers] == [pytest.approx(0.001), pytest.approx(0.016), None]
    assert plan.tiers[2].ttft_s is None and plan.recompute_s == pytest.approx(0.003)
    assert plan.choice.tier is tiers[0] and plan.choice.is_hidden


# Degenerate input


def test_without_context_the_ratio_is_the_least_and_any_tier_will_do() -> None:
    nothing = PromptSize(0, 5, 0, 1000)
    choice = choose_ratio(prefills_in(1.0), nothing, loads_in(1.0))
    assert (choice.ratio, choice.equal, choice.load_s, choice.prefill_s) == (MIN_RATIO, None, 0, 0)
    tiers = [Tier("a", 2.0, loads_in(0.001)), Tier("b", 1.0, loads_in(9.0))]
    assert choose_tier(prefills_in(1.0), nothing, tiers, 0.15).tier is tiers[1]
    assert prefills_in(1.0).ttft_s(0.15, nothing, loads_in(1.0)) == pytest.approx(5 / CONTEXT)


def test_a_tier_of_unknown_speed_is_never_chosen() -> None:
    choice = choose_ratio(prefills_in(1.0), SIZE, None)
    assert (choice.ratio, choice.equal, choice.load_s) == (MIN_RATIO, None, None)
    unknown, slow = Tier("unknown", 0.0, None), Tier("slow", 5.0, loads_in(100.0))
    assert choose_tier(prefills_in(1.0), SIZE, [unknown, slow], 0.15).tier is slow
    assert choose_tier(prefills_in(1.0), SIZE, [unknown], 0.15).tier is None
    assert choose_tier(prefills_in(1.0), SIZE, [], 0.15).tier is None


def test_a_prefill_that_costs_nothing_leaves_the_least_ratio() -> None:
    assert choose_ratio(prefills_in(0.0), SIZE, loads_in(1.0)).ratio == MIN_RATIO


def test_a_least_ratio_of_one_s_own_is_kept() -> None:
    assert choose_ratio(prefills_in(1.0), SIZE, loads_in(0.1), minimum=0.123).ratio == 0.123


# Fits


def prefilled(*points: tuple[int, float]) -> list[ComputeMeasurement]:
    return [ComputeMeasurement(PromptSize(tokens - 2, 2, 1, 1000), 1, seconds) for tokens, seconds in points]


def test_a_fit_finds_the_coefficients() -> None:
    truth = Estimator(2e-5, 0.004, 3e-9, 1e-4, REUSE)
    prefills = prefilled(*((length, truth.prefill_s(length)) for length in (64, 256, 1024, 4096)))
    scattered = PromptSize(1022, 2, 1, 1000)
    seconds = replace(truth, run_s=0.0).recompute_s(128 / 1022, scattered) + 128 * 1e-4
    fitted = Estimator.fit([*prefills, ComputeMeasurement(scattered, 128, seconds)], layer_work(4, (1,)))
    coefficients = (fitted.token_s, fitted.constant_s, fitted.pair_s, fitted.run_s)
    assert coefficients == pytest.approx((2e-5, 0.004, 3e-9, 1e-4), rel=1e-6)
    assert fitted.work == layer_work(4, (1,))


def test_a_fit_finds_the_speed() -> None:
    speed = Speed(3e-10, 2e-4, 1e-3)
    sizes, objects = [1e6, 4e6, 8e6], [16, 4, 2]
    loads = [speed.byte_s * size + speed.object_s * count for size, count in zip(sizes, objects, strict=True)]
    assert vars(Speed.fit(sizes, objects, loads, [1e-3 * count for count in objects])) == pytest.approx(vars(speed))


def test_a_fit_of_few_points_is_a_rate() -> None:
    assert Estimator.fit(prefilled((100, 0.25)), REUSE) == Estimator(0.0025, 0, 0, 0, REUSE)
    assert Estimator.fit([], REUSE) == Estimator(0, 0, 0, 0, REUSE)
    assert fit_nonnegative([[1.0], [2.0]], [0.0]) == [0, 0]


def test_rows_that_stand_apart_and_cost_no_more_have_no_cost_of_their_own() -> None:
    scattered = ComputeMeasurement(PromptSize(100, 0, 1, 1000), 50, 0.01)
    assert Estimator.fit([*prefilled((100, 0.25)), scattered], REUSE).run_s == 0


def test_no_coefficient_is_below_zero() -> None:
    """Falling times would want a negative rate."""
    fitted = Estimator.fit(prefilled((64, 0.5), (256, 0.02), (1024, 0.17), (4096, 3.0)), REUSE)
    assert min(fitted.token_s, fitted.constant_s, fitted.pair_s) >= 0
    assert fitted.prefill_s(4096) > fitted.prefill_s(64)


# What holds for all numbers

seconds = st.floats(1e-6, 1e3)
ratios = st.floats(0, 1)
works = st.sampled_from([layer_work(4), layer_work(4, (1,), 0.3), layer_work(4, (1, 2, 3), 0.3), layer_work(1)])
rates = (st.floats(1e-7, 1e-2), st.floats(0, 1), st.floats(0, 1e-6))
smooth = st.builds(Estimator, *rates, st.just(0.0), works)
estimators = st.builds(Estimator, *rates, st.floats(0, 1e-3), works)
sizes = st.builds(PromptSize, st.integers(1, 10**6), st.integers(0, 1000), st.integers(1, 500), st.integers(1, 10**6))
speeds = st.builds(Speed, st.floats(0, 1e-6), st.floats(0, 0.1), st.floats(0, 0.1))


@given(smooth, sizes, speeds, ratios, ratios)
def test_more_work_takes_longer(estimator: Estimator, size: PromptSize, speed: Speed, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert estimator.recompute_s(low, size) <= estimator.recompute_s(high, size)
    assert estimator.ttft_s(low, size, speed) <= estimator.ttft_s(high, size, speed)
    longer = replace(size, context=size.context + 1, objects=size.objects + 1)
    assert estimator.recompute_s(a, size) <= estimator.recompute_s(a, longer) * (1 + 1e-9)
    assert estimator.load_s(size, speed) <= estimator.load_s(longer, speed)


@given(estimators, sizes, speeds, ratios)
def test_the_first_token_waits_for_both_sides_and_no_longer_than_for_one_after_the_other(
    estimator: Estimator, size: PromptSize, speed: Speed, ratio: float
) -> None:
    load, recompute = estimator.load_s(size, speed), estimator.recompute_s(ratio, size)
    ttft = estimator.ttft_s(ratio, size, replace(speed, open_s=0))
    assert max(load, recompute) <= ttft * (1 + 1e-9) and ttft <= (load + recompute) * (1 + 1e-9)


@given(estimators, sizes, speeds, speeds)
def test_a_slower_tier_gets_no_smaller_ratio(estimator: Estimator, size: PromptSize, speed: Speed, more: Speed) -> None:
    choice, slower = choose_ratio(estimator, size, speed), choose_ratio(estimator, size, speed.after(more))
    assert MIN_RATIO <= choice.ratio <= slower.ratio <= 1
    if choice.equal is not None and MIN_RATIO <= choice.equal <= 1:
        assert estimator.recompute_s(choice.equal, size) == pytest.approx(estimator.load_s(size, speed))
        assert choice.ratio == pytest.approx(choice.equal, abs=0.0051)


@given(smooth, sizes, st.lists(st.builds(Tier, st.just("tier"), st.floats(0, 10), speeds), min_size=1), ratios)
def test_a_larger_ratio_never_needs_a_dearer_tier(
    estimator: Estimator, size: PromptSize, tiers: list[Tier], ratio: float
) -> None:
    choice, more = choose_tier(estimator, size, tiers, ratio), choose_tier(estimator, size, tiers, 1.0)
    assert choice.tier is not None and choice.tier.speed is not None and more.tier is not None
    load, recompute = estimator.load_s(size, choice.tier.speed), estimator.recompute_s(ratio, size)
    if choice.is_hidden:
        assert load <= recompute and more.is_hidden and more.tier.price <= choice.tier.price
    else:
        assert load > recompute and load == min(estimator.load_s(size, one.speed) for one in tiers if one.speed)


@given(st.lists(st.tuples(st.integers(3, 10**5), seconds), max_size=6), st.lists(seconds, max_size=2))
def test_any_measurement_gives_a_usable_fit(points: list[tuple[int, float]], scattered: list[float]) -> None:
    apart = [ComputeMeasurement(PromptSize(100, 2, 1, 1000), 10, one) for one in scattered]
    fitted = Estimator.fit([*prefilled(*points), *apart], REUSE)
    assert all(0 <= value < 1e9 for value in (fitted.token_s, fitted.constant_s, fitted.pair_s, fitted.run_s))
    assert not points or fitted.prefill_s(max(length for length, _ in points)) > 0
