"""The packages of the extra `eval`: without them evaluations are refused at once, with the remedy."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from eval.shared import run

from pictool import needs
from pictool.errors import InputError
from pictool.eval import metrics
from pictool.eval.metrics import f1, rouge_l
from pictool.eval.runner import Runner
from pictool.eval.statistics import Estimate, clustered_mean
from pictool.store.store import Store


@pytest.fixture(params=["scipy", "rouge_score"])
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(needs, "find_spec", lambda name: None if name == request.param else find_spec(name))
    metrics._rouge.cache_clear()
    return str(request.param)


def message(missing: str) -> str:
    return rf"{missing}.* pip install 'pictool\[eval\]'$"


def test_an_evaluation_is_refused_before_anything_runs(
    missing: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "run", lambda *_: pytest.fail("ran"))
    with pytest.raises(InputError, match=message(missing)):
        run(store, ["naive"])
    assert not (store.root / "eval").exists()


@pytest.mark.parametrize("missing", ["scipy"], indirect=True)
def test_only_intervals_need_scipy(missing: str) -> None:
    assert rouge_l("a b", ["a b"]) == 1 and clustered_mean([0.5], [0]) == Estimate(0.5, None, None)
    with pytest.raises(InputError, match=message(missing)):
        clustered_mean([0.0, 1.0], [0, 1])


@pytest.mark.parametrize("missing", ["rouge_score"], indirect=True)
def test_only_rouge_needs_rouge_score(missing: str) -> None:
    assert f1("a b", ["a b"]) == 1
    with pytest.raises(InputError, match=message(missing)):
        rouge_l("a b", ["a b"])
