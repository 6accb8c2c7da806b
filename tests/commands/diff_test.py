"""`pic inspect --diff`: two policies on one prompt, against counts from their traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from traces import make_trace

from commands.conftest import Traces
from commands.run import pic, section
from pictool.trace.format import read_trace, write_trace


def test_diff_of_two_policies(traces: Traces) -> None:
    a, b = traces("lego"), traces("blend")
    found = pic("inspect", "--diff", a, b, "--json").json
    rows = [read_trace(path).rows[:, : found_context(path)] for path in (a, b)]
    wanted = [(x & y).sum() / (x | y).sum() for x, y in zip(*rows, strict=True)]
    assert found["jaccard_layers"] == pytest.approx(wanted)
    only_a = np.flatnonzero(rows[0].any(0) & ~rows[1].any(0))
    assert found["tokens"]["only_a"] == only_a.tolist()
    shown = pic("inspect", "--diff", a, b)
    assert [line.split()[-1] for line in section(shown, "selections")[:4]] == [
        f"{x:.3f}" for x in (*wanted, found["jaccard"])
    ]  # fmt: skip
    assert f"largest difference of a logit {found['max_logit']:.3g}" in " ".join(shown.out.split())


def found_context(path: Path) -> int:
    return read_trace(path).layout.num_context


def test_diff_names_the_tokens_that_one_alone_computed(by_hand: Path) -> None:
    write_trace(Path("other.trace"), make_trace([(2, 3, 7), (2,), ()]))
    shown = pic("inspect", "--diff", by_hand, "other.trace").out.splitlines()
    assert "tokens computed at some layer: 1 by both, 2 by A alone, 2 by B alone" in shown
    assert 'A alone: "a" 1+0, "e" 2+1' in shown and 'B alone: "c" 1+2, " g" 2+3' in shown


def test_diff_says_where_answers_part(by_hand: Path) -> None:
    trace = make_trace()
    other = replace(trace, generated=(replace(trace.generated[0], id=2, text=" no"), trace.generated[1]))
    write_trace(Path("other.trace"), other)
    assert '0 tokens in common, then A says " yes" (-0.5 nats) and B says " no"' in " ".join(
        pic("inspect", "--diff", by_hand, "other.trace").out.split()
    )
    assert "the same 2 tokens" in pic("inspect", "--diff", by_hand, by_hand).out
