from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pictool.runtime import attention
from pictool.runtime.products import has_onednn
from pictool.runtime.rows import Pack, Rows, Run

NEEDS_ONEDNN = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


class NoRope:
    def rotate_query(self, x: torch.Tensor, table: object) -> torch.Tensor:
        return x


class Module:
    pass


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    window: int | None,
    cap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(QKᵀ/√d) V over all keys in float64, row i seeing the keys (position_i - window, position_i].

    `sinks` [heads] are keys whose score is given and whose value is 0.
    """
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if cap:
        scores = cap * torch.tanh(scores / cap)
    index = torch.arange(key.shape[2])
    seen = index <= positions[:, None]
    if window:
        seen &= index > positions[:, None] - window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores, value = torch.cat([sink, scores], -1), torch.cat([torch.zeros_like(value[:, :, :1]), value], 2)
    out: torch.Tensor = scores.softmax(-1) @ value
    return out.transpose(1, 2).float()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_scattered_rows_equal_dense_attention(data: st.DataObject) -> None:
    check_scattered_rows(data)


@NEEDS_ONEDNN
def test_scattered_rows_by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MIN_PRODUCT", 0)
    monkeypatch.setattr(attention, "products_win", lambda: True)
    settings(max_examples=60, deadline=None)(given(st.data())(check_scattered_rows))()


def check_scattered_rows(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    rows = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1)))
    window = data.draw(st.sampled_from([None, 1, 3, 7, 100]))
    cap = data.draw(st.sampled_from([None, 5.0]))
    generator = torch.Generator().manual_seed(n)
    query = torch.randn(2, 4, len(rows), 8, generator=generator)
    key = torch.randn(2, 2, n, 8, generator=generator)
    value = torch.randn(2, 2, n, data.draw(st.sampled_from([8, 6])), generator=generator)
    sinks = data.draw(st.sampled_from([None, torch.tensor([-1.0, 0.0, 2.0, 4.0])]))
    positions = torch.tensor(rows)
    taken = Rows.of(positions)
    got, _ = attention.attend(
        Module(), query, key, value, None, pic=attention.Pass(NoRope(), (query, query), taken.runs),  # type: ignore[arg-type]
        scaling=8**-0.5, sliding_window=window, softcap=cap, s_aux=sinks,
    )  # fmt: skip
    torch.testing.assert_close(got, dense(query, key, value, positions, window, cap, sinks), atol=1e-5, rtol=1e-4)


def test_runs_are_the_consecutive_positions() -> None:
    assert Rows.of(torch.tensor([0, 1, 5, 7, 8, 9])).runs == (Run(0, 0, 2), Run(2, 5, 6), Run(3, 7, 10))
    assert Rows.of(torch.tensor([], dtype=torch.int64)).runs == ()


@pytest.mark.parametrize("window", [None, 50])
def test_long_runs_are_cut_into_small_masks(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask of a run over n keys has n × n cells, and the result does not depend on where it is cut."""
    sizes: list[int] = []
    make = attention._mask

    def spy(spans: list[tuple[int, int]], num_keys: int, *more: object) -> torch.Tensor | None:
        sizes.append(sum(end - start for start, end in spans) * num_keys)
        return make(spans, num_keys, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "products_win", lambda: False)
    monkeypatch.setattr(attention, "_mask", spy)
    query = torch.randn(1, 4, 700, 8)
    key, value = torch.randn(2, 1, 2, 1000, 8)
    got, _ = attention.attend(
        Module(), query, key, value, None, pic=attention.Pass(NoRope(), (query, query), (Run(0, 300, 1000),)),  # type: ignore[arg-type]
        scaling=8**-0.5, sliding_window=window,
    )  # fmt: skip
    assert not sizes if window is None else max(sizes) <= 256 * 306  # without a window a run needs no mask
    want = dense(query, key, value, torch.arange(300, 1000), window, None)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 50])
def test_short_runs_share_a_mask(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are scattered one by one are few calls, not one each; the masks are small all the same."""
    sizes: list[int] = []
    make = attention._mask

    def spy(spans: list[tuple[int, int]], num_keys: int, *more: object) -> torch.Tensor | None:
        sizes.append(sum(end - start for start, end in spans) * num_keys)
        return make(spans, num_keys, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "_mask", spy)
    positions = torch.cat([torch.arange(0, 1500, 3), torch.arange(1900, 2000)])
    query = torch.randn(1, 4, len(positions), 8)
    key, value = torch.randn(2, 1, 2, 2000, 8)
    runs = Rows.of(positions).runs
    got, _ = attention.attend(
        Module(), query, key, value, None, pic=attention.Pass(NoRope(), (query, query), runs),  # type: ignore[arg-type]
        scaling=8**-0.5, sliding_window=window,
    )  # fmt: skip
    assert len(sizes) < len(runs) / 10 and max(sizes) <= 256 * 2000
    torch.testing.assert_close(got, dense(query, key, value, positions, window, None), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("num_before", [0, 5])
@pytest.mark.parametrize("window, cap", [(None, None), (7, None), (None, 5.0)])
@pytest.mark.parametrize("by_products", [False, pytest.param(True, marks=NEEDS_ONEDNN)])
def test_sequences_of_a_pack_attend_each_to_itself_and_to_what_is_before_all(
    num_before: int, window: int | None, cap: float | None, by_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_products:
        monkeypatch.setattr(attention, "_MIN_PRODUCT", 0)
        monkeypatch.setattr(attention, "products_win", lambda: True)
    lengths = (20, 9, 9, 9, 1, 1, 9)
    query = torch.randn(2, 4, sum(lengths), 8)
    key, value = torch.randn(2, 2, 2, num_before + sum(lengths), 8)
    got, _ = attention.attend(
        Module(), query, key, value, None, pic=attention.Pass(NoRope(), (query, query), Pack(lengths)),  # type: ignore[arg-type]
        scaling=8**-0.5, sliding_window=window, softcap=cap,
    )  # fmt: skip
    start = 0
    for length in lengths:
        rows, columns = (
            slice(start, start + length),
            [*range(num_before), *range(num_before + start, num_before + start + length)],
        )
        at = torch.arange(num_before, num_before + length)
        want = dense(query[:, :, rows], key[:, :, columns], value[:, :, columns], at, window, cap)
        torch.testing.assert_close(got[:, rows], want, atol=1e-5, rtol=1e-4)
        start += length
