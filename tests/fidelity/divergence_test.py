"""How far linked answers are from those of full recompute, and what is too far."""

from __future__ import annotations

import math

import pytest

from pictool.engines.base import Comparison
from pictool.engines.torch import TorchEngine
from pictool.fidelity.divergence import MAX_SHARE, Divergence, check_prompts, measure_divergence
from pictool.linker.grid import named_policy
from pictool.runtime.memory.image import Image
from pictool.runtime.model import Model, load_model
from pictool.store.store import Store


@pytest.fixture(scope="module")
def embedded() -> Model:
    return load_model("embedded", "cpu")


def divergence(own: float, naive: float, first: float | None = None) -> Divergence:
    """Of one answer that leaves so many nats; with `first`, of an engine that knows its first token's alone."""
    compared = [
        Comparison("x", 1.0, 2.0, 0.01 if first is None else first, True, True, 1, None if first is not None else nats)
        for nats in (own, naive)
    ]
    return Divergence(named_policy("full"), (compared[0],), (compared[1],))


@pytest.mark.parametrize(
    ("own", "naive", "limit", "is_far"),
    [
        (0.0, 0.0, 0.5, False),
        (1.0, 4.0, 0.5, False),
        (3.0, 4.0, 0.5, True),
        (3.0, 4.0, 0.8, False),
        (0.4, 0.4, 0.5, False),  # few nats
        (math.nan, 4.0, 0.5, True),
        (3.0, math.nan, 0.5, True),
        (math.inf, 4.0, 0.5, True),
    ],
)
def test_far_is_more_than_a_share_and_more_than_a_few_nats(
    own: float, naive: float, limit: float, is_far: bool
) -> None:
    assert divergence(own, naive).is_far(limit) is is_far


def test_first_tokens_are_judged_where_an_engine_gives_no_more_and_it_says_so() -> None:
    whole, first = divergence(3.0, 4.0), divergence(3.0, 4.0, first=0.1)
    assert (whole.nats, whole.share) == (3.0, 0.75) and "first token" not in str(whole)
    assert (first.nats, first.share) == (0.1, 1.0) and "first token" in str(first) and not first.is_far(MAX_SHARE)


def test_blind_reuse_is_far(embedded: Model, store: Store) -> None:
    (found,) = measure_divergence(TorchEngine(embedded, store), [named_policy("naive")], "none")
    assert found.is_far(MAX_SHARE) and found.share == 1 and not all(each.same_answer for each in found.own)


@pytest.mark.parametrize("name", ["naive", "legolink-16", "auto"])
def test_what_is_compiled_after_what_precedes_it_is_not(embedded: Model, store: Store, name: str) -> None:
    (found,) = measure_divergence(TorchEngine(embedded, store), [named_policy(name)])
    assert not found.is_far(MAX_SHARE) and 0 < found.share < 0.1 and all(each.same_answer for each in found.own)


@pytest.mark.parametrize("name", ["legolink-16", "auto"])
def test_keys_that_stay_where_they_were_compiled_are_far(
    embedded: Model, store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "relocate", lambda *_: None)
    (found,) = measure_divergence(TorchEngine(embedded, store), [named_policy(name)])
    assert found.is_far(MAX_SHARE)


@pytest.mark.parametrize("name", ["legolink-16", "auto"])
def test_values_of_other_tokens_are_far(
    embedded: Model, store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    relocate = Image.relocate

    def mixed_up(image: Image, layer: int, start: int, end: int) -> None:
        relocate(image, layer, start, end)
        _, value = image.places(layer, start, end)
        value.copy_(value.roll(31, 1))

    monkeypatch.setattr(Image, "relocate", mixed_up)
    (found,) = measure_divergence(TorchEngine(embedded, store), [named_policy(name)])
    assert found.is_far(MAX_SHARE)


def test_pages_are_pieces_of_one_text_and_have_room(embedded: Model) -> None:
    for spec in check_prompts(embedded, named_policy("full"), 256):
        first, *others = spec.documents
        assert not first.continues and first.before == ()  # type: ignore[union-attr]
        assert all(page.continues and page.before for page in others)  # type: ignore[union-attr]
        assert sum(len(page) for page in spec.documents) < 256  # type: ignore[arg-type, misc]
