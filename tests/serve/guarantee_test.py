"""A server under a guarantee: exact answers until it is shown, verification in spare time, what is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pictool.engines.base import answer_kl
from pictool.errors import StoreError
from pictool.fidelity.guarantee import Guarantee
from pictool.linker.grid import parse_policy
from pictool.runtime.model import Model
from pictool.serve.backends.torch import verification as module
from pictool.serve.backends.torch.backend import BackendSettings
from pictool.store.store import Store
from serve.live import DOCS, QUESTION, Live, serving, text_of, until

DECLARED = Guarantee(kl=0.5, level=0.9, share=1.0)


@pytest.fixture
def guaranteed(model: Model, store: Store) -> Iterator[Live]:
    settings = BackendSettings(parse_policy("legolink-2"), min_tokens=4, guarantee=DECLARED)
    with serving(model, store, settings=settings) as live:
        yield live


def ask(live: Live, parts: list[Any], **more: Any) -> Any:
    """An answer, after which its verification is waited for."""
    done = live.chat([*parts, {"type": "text", "text": QUESTION}], max_tokens=3, **more)
    until(lambda: live.backend.status().unverified == 0)
    return done


def parts_of(live: Live) -> list[Any]:
    return [{"type": "cache", "cache_id": live.cache(doc)} for doc in DOCS]


def test_answers_are_exact_until_it_is_shown_and_linked_from_then_on(guaranteed: Live) -> None:
    parts = parts_of(guaranteed)
    first = ask(guaranteed, parts)
    exact = guaranteed.chat([*parts, {"type": "text", "text": QUESTION}], max_tokens=3, pic={"policy": "full"})
    assert text_of(first) == text_of(exact) and "guarantee" not in exact["pic"]
    report = first["pic"]["guarantee"]
    assert (report["state"], report["bound"], report["verified"], report["policy"]) == ("exact", 1.0, 0, "legolink-2")
    while (last := ask(guaranteed, parts)["pic"])["guarantee"]["state"] == "exact":
        assert last["guarantee"]["verified"] < 40
    assert last["policy"] == "legolink-2" and last["chunks"] == 3 and last["guarantee"]["bound"] <= DECLARED.kl
    text = guaranteed.client.get("/metrics").text
    labels = '{documents="2",policy="legolink-2",tenant="default"}'
    assert f"pic_guarantee_linked{labels} 1.0" in text and f"pic_guarantee_breaches_total{labels} 0.0" in text
    assert "guarantee" not in guaranteed.chat(QUESTION)["pic"]  # nothing is linked


def test_the_kl_of_a_verified_answer_is_that_of_its_comparison(
    guaranteed: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[float]()

    def measured(*given: Any) -> float:
        found.append(answer_kl(*given))
        return found[-1]

    monkeypatch.setattr(module, "answer_kl", measured)
    ask(guaranteed, parts := parts_of(guaranteed))
    while "linked" not in (report := ask(guaranteed, parts, verify=True)["pic"])["guarantee"]["state"]:
        pass
    assert found[-1] == pytest.approx(report["verify"]["answer_kl"], rel=1e-4) and found[-1] > 0


def test_what_cannot_be_verified_counts_as_the_worst(guaranteed: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> float:
        raise StoreError("an object is lost")

    monkeypatch.setattr(module, "answer_kl", lost)
    parts = parts_of(guaranteed)
    for _ in range(4):
        ask(guaranteed, parts)
    (row,) = guaranteed.backend.status().guarantees
    assert (row["verified"], row["linked"], row["bound"]) == (4, 0, 1.0)
