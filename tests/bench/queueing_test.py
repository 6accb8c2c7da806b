"""The queue on a virtual clock: by hand, and against the theory of queues."""

from __future__ import annotations

import numpy as np
import pytest

from pictool.bench.queueing import Load, serve_in_order
from pictool.errors import InputError


def test_five_requests_by_hand() -> None:
    #            arrives  starts  first token  ends
    # 1 idle       1.0      1.0      1.5        3.0
    # 2 waits      2.0      3.0      3.1        3.2
    # 3 waits      3.1      3.2      3.7        5.2
    # 4 on time    5.2      5.2      5.3        6.2
    # 5 idle      10.0     10.0     10.5       11.0
    served = serve_in_order(
        np.array([1.0, 2.0, 3.1, 5.2, 10.0]), ttft=[0.5, 0.1, 0.5, 0.1, 0.5], service=[2.0, 0.2, 2.0, 1.0, 1.0]
    )
    assert served.start == pytest.approx([1.0, 3.0, 3.2, 5.2, 10.0])
    assert served.waiting == pytest.approx([0.0, 1.0, 0.1, 0.0, 0.0])
    assert served.ttft == pytest.approx([0.5, 1.1, 0.6, 0.1, 0.5])
    assert served.latency == pytest.approx([2.0, 1.2, 2.1, 1.0, 1.0])
    assert served.duration == 11.0
    assert served.throughput == pytest.approx(5 / 11)
    assert served.utilisation == pytest.approx(6.2 / 11)


def test_requests_that_come_at_once_are_served_in_order() -> None:
    served = serve_in_order(np.zeros(3), ttft=[1.0, 1.0, 1.0], service=[3.0, 2.0, 1.0])
    assert served.start.tolist() == [0.0, 3.0, 5.0] and served.duration == 6.0
    assert served.utilisation == 1.0


@pytest.mark.parametrize("utilisation", [0.2, 0.5, 0.8])
def test_constant_service_waits_as_long_as_an_m_d_1_queue(utilisation: float) -> None:
    # Pollaczek and Khinchine: mean wait = utilisation · service / (2 · (1 - utilisation)).
    service, count = 0.25, 400_000
    arrivals = Load(utilisation / service, requests=count).draw_arrivals(np.random.default_rng(1))
    served = serve_in_order(arrivals, np.full(count, 0.1), np.full(count, service))
    want = utilisation * service / (2 * (1 - utilisation))
    assert served.waiting.mean() == pytest.approx(want, rel=0.05)
    assert served.ttft.mean() == pytest.approx(want + 0.1, rel=0.05)
    assert served.utilisation == pytest.approx(utilisation, rel=0.02)
    assert served.throughput == pytest.approx(utilisation / service, rel=0.02)


def test_exponential_service_waits_as_long_as_an_m_m_1_queue() -> None:
    draw, rate, service, count = np.random.default_rng(2), 2.0, 0.3, 400_000
    arrivals = Load(rate, requests=count).draw_arrivals(draw)
    served = serve_in_order(arrivals, np.zeros(count), draw.exponential(service, count))
    assert served.waiting.mean() == pytest.approx(0.6 * service / 0.4, rel=0.05)


def test_arrivals_are_a_poisson_process() -> None:
    # Its counts have mean and variance rate · duration, its gaps mean and deviation 1 / rate.
    draw = np.random.default_rng(3)
    runs = [Load(4.0, 40.0).draw_arrivals(draw) for _ in range(2000)]
    counts, gaps = [len(run) for run in runs], np.concatenate([np.diff(run) for run in runs])
    assert np.mean(counts) == pytest.approx(160, rel=0.01) and np.var(counts) == pytest.approx(160, rel=0.1)
    assert gaps.mean() == pytest.approx(0.25, rel=0.02) and gaps.std() == pytest.approx(0.25, rel=0.03)
    assert all((np.diff(run) >= 0).all() and run[-1] < 40 for run in runs)


def test_a_number_of_requests_is_kept_whatever_the_rate() -> None:
    runs = [Load(rate, requests=50).draw_arrivals(np.random.default_rng(4)) for rate in (1.0, 2.0)]
    assert [len(run) for run in runs] == [50, 50]
    assert runs[0] == pytest.approx(2 * runs[1])


@pytest.mark.parametrize(
    ("load", "message"),
    [((0,), "--rate 0"), ((-1,), "--rate -1"), ((1, float("nan")), "--duration nan"), ((1, 1, 0), "--requests 0")],
)
def test_loads_that_make_no_sense(load: tuple[float, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Load(*load)  # type: ignore[arg-type]
