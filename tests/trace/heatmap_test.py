"""Many columns in few: nothing that is large gets lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pictool.trace.heatmap import bin_columns, tick_labels


@given(st.lists(st.integers(-5, 5) | st.none(), min_size=1, max_size=60), st.integers(1, 30))
def test_every_bin_shows_its_largest(row: list[int | None], width: int) -> None:
    values = np.array([[np.nan if value is None else value for value in row]], dtype=np.float64)
    bins = bin_columns(values, width)
    assert bins.edges[0] == 0 and bins.edges[-1] == len(row) and len(bins.edges) == min(width, len(row)) + 1
    assert np.ptp(np.diff(bins.edges)) <= 1
    for i, (start, end) in enumerate(zip(bins.edges, bins.edges[1:], strict=False)):
        known = [value for value in row[start:end] if value is not None]
        shown = bins.values[0, i]
        assert shown == max(known) if known else np.isnan(shown)
        assert all(bins.bin_of(column) == i for column in range(start, end))


def test_what_fits_stays_as_it_is() -> None:
    values = np.arange(6).reshape(2, 3)
    assert np.array_equal(bin_columns(values, 3).values, values) and np.array_equal(
        bin_columns(values, 80).values, values
    )


def test_labels_do_not_run_into_each_other() -> None:
    assert tick_labels([0, 1, 5, 7, 20], ["0", "10", "123", "200", "9000"], 24) == "0    123            9000"
    assert tick_labels([0, 20], ["0", "9000"], 23) == "0"
