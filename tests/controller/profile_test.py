"""What is measured for the loading controller, and how it is kept. No time is ever asserted."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
from alone import compile, link

from pictool.controller import profile
from pictool.controller.cost import MIN_RATIO, Estimator, PromptSize
from pictool.controller.profile import (
    Measurements,
    auto_ratio,
    load_profile,
    make_estimator,
    measure_size,
)  # fmt: skip
from pictool.core import Chunk
from pictool.errors import InputError, StoreError
from pictool.linker.policies import make_policy
from pictool.linker.spec import Spec
from pictool.runtime.model import Model, wrap_model
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store

# A millisecond a token, scattered or not.
COMPUTE = [[62.0, 2.0, 1.0, 0.064], [510.0, 2.0, 1.0, 0.512], [510.0, 2.0, 0.125, 0.06575]]
LOADS = [[2e6, 1.0, 1e6, 0.3, 0.1], [2e6, 2.0, 1e6, 0.4, 0.1]]
TEXTS = [Chunk("", tuple(range(3, 103)), "a"), Chunk("", tuple(range(7, 57)), "b")]
TAIL, HEAD = "Who knows why?", "<s>"
NAIVE = make_policy("naive", {})


@cache
def model(name: str = "llama") -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS[name]()), tiny.tokenizer(), name)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, in order; the numbers are made up."""
    calls: list[str] = []

    def gives(what: str, rows: Measurements) -> Callable[..., Measurements]:
        def measure(*_: object) -> Measurements:
            calls.append(what)
            return rows

        return measure

    monkeypatch.setattr(profile, "measure_compute", gives("prefill", COMPUTE))
    monkeypatch.setattr(profile, "measure_loads", gives("loads", LOADS))
    return calls


def kept() -> list[Path]:
    return sorted(Path("cache/pictool/profiles").glob("*"))


def estimated() -> list[float]:
    """The coefficients of the model's estimator, which is measured if it is not kept."""
    found = make_estimator(model(), NAIVE)
    return [found.token_s, found.constant_s, found.pair_s, found.scattered]


# Keeping


def test_a_profile_is_measured_once(measured: list[str], store: Store) -> None:
    told: list[str] = []
    for _ in range(2):
        make_estimator(model(), NAIVE, on_measure=told.append)
        assert estimated() == pytest.approx([1e-3, 0, 0, 1], abs=1e-9)
        found = load_profile(model(), store, "none", on_measure=told.append)
        assert vars(found.device) == pytest.approx({"byte_s": 1e-7, "object_s": 0.1}) and found.stored == 0.5
        assert vars(found.cached) == pytest.approx({"byte_s": 5e-8, "object_s": 0.0})
        assert found.at(1e7).byte_s == pytest.approx(5e-8 + 0.5 / 1e7)
    assert measured == ["prefill", "loads"] and len(told) == 2 and len(kept()) == 2


def test_it_is_measured_again_if_asked(measured: list[str]) -> None:
    make_estimator(model(), NAIVE)
    make_estimator(model(), NAIVE, again=True)
    assert measured == ["prefill"] * 2 and len(kept()) == 1


def test_every_model_place_and_codec_has_its_own(measured: list[str], store: Store, tmp_path: Path) -> None:
    make_estimator(model(), NAIVE)
    make_estimator(model("qwen3"), NAIVE)
    for place, codec in ((store, "none"), (Store(tmp_path), "none"), (store, "int8")):
        load_profile(model(), place, codec)
    assert len(kept()) == len(measured) == 5


def test_a_store_that_is_made_later_is_the_same_place(measured: list[str], store: Store) -> None:
    load_profile(model(), store, "none")
    store.root.mkdir()
    load_profile(model(), store, "none")
    assert measured == ["loads"]


def test_another_number_of_threads_is_another_machine(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make_estimator(model(), NAIVE)
    monkeypatch.setattr("torch.get_num_threads", lambda: 99)
    make_estimator(model(), NAIVE)
    assert len(kept()) == 2


def spoil(**changes: Any) -> Callable[[dict[str, Any]], bytes]:
    return lambda data: json.dumps(data | changes).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda data: json.dumps(data).encode()[:-9],
        lambda _: b"[]",
        lambda _: b"\xff\xfe",
        lambda _: b"[" * 100_000,
        spoil(rows=[]),
        spoil(rows=None),
        spoil(rows=COMPUTE[:1]),
        spoil(rows=[[62.0, 2.0, 1.0]] * 2),
        spoil(rows=[[62.0, 2.0, 1.0, -1.0]] * 2),
        spoil(rows=[[62.0, 2.0, 1.0, float("nan")]] * 2),
        spoil(rows=[[10**400, 2.0, 1.0, 1.0]] * 2),
        spoil(rows=[[1e300, 2.0, 1.0, 1.0]] * 2),
        lambda data: b" " * (2 << 20),
        spoil(rows=[[62.0, 2.0, 1.0, "fast"]] * 2),
        spoil(of={}),
        lambda data: spoil(of=data["of"] | {"version": 0})(data),
    ],
)
def test_a_damaged_or_old_file_is_measured_again(
    measured: list[str], damage: Callable[[dict[str, Any]], bytes]
) -> None:
    before = estimated()
    (path,) = kept()
    whole = path.read_bytes()
    path.write_bytes(damage(json.loads(whole)))
    assert estimated() == before
    assert measured == ["prefill"] * 2 and kept() == [path] and path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_only_costs_time(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert estimated() == estimated()
    assert measured == ["prefill"] * 2


# Measuring


def test_computing_is_measured_up_to_the_model_s_positions_and_of_scattered_rows() -> None:
    *prefills, scattered = profile.measure_compute(model())
    tail = len(model().encode("Answer:"))
    assert [row[:3] for row in prefills] == [[tokens - tail, tail, 1] for tokens in (64, 256, 512)]
    assert scattered[:3] == [512 - tail, tail, 0.125]
    assert min(row[3] for row in (*prefills, scattered)) > 0


def test_prefill_stops_at_the_first_length_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_LONG_S", 0.0)
    assert [context + tail for context, tail, *_ in profile.measure_compute(model())] == [64, 64]


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_loading_is_measured_by_bytes_and_objects_and_leaves_nothing(tmp_path: Path, codec: str) -> None:
    (place := tmp_path / "tier").mkdir()
    rows = profile.measure_loads(model(), place, codec)
    assert [row[:2] for row in rows] == [[2 * 240 * 384, 2], [4 * 120 * 384, 4], [16 * 16 * 384, 16]]
    assert all(len(row) == 5 and min(row) > 0 and (row[2] < row[0]) == (codec == "int8") for row in rows)
    assert list(place.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(StoreError, match=r"^/proc/none: "):
        profile.measure_loads(model(), Path("/proc/none"), "none")


def test_a_random_object_is_one_like_any_other(store: Store) -> None:
    paths = [store.put(profile.random_object(model(), 40, seed)) for seed in (1, 2)]
    with ObjectFile(paths[0]) as file:
        file.verify()
        assert file.meta.key == paths[0].stem == model().target.key(file.tokens(), "none")
        assert file.meta.num_tokens == 40 and model().token_bytes == 384
    linked = link(model(), store, paths, TAIL, NAIVE)
    assert linked.recomputed == 0 and linked.image.layout.num_context == 80


# The ratio of a prompt


def test_layers_before_the_first_check_are_computed_whole(measured: list[str]) -> None:
    assert make_estimator(model(), make_policy("cacheblend", {})).whole == pytest.approx(1 / 3)
    assert make_estimator(model(), make_policy("cacheblend", {"layers": "2"})).whole == pytest.approx(2 / 3)
    assert make_estimator(model(), NAIVE) == Estimator(*estimated())


def test_the_size_of_a_prompt_is_that_of_its_layout(store: Store) -> None:
    layout = link(model(), store, TEXTS, TAIL, NAIVE, head=HEAD).image.layout
    size = measure_size(model(), store, Spec.raw(TEXTS, TAIL, NAIVE, HEAD))
    assert size == PromptSize(layout.num_context, layout.num_tokens - layout.num_context, 3, 384)
    assert measure_size(model(), store, Spec.raw([], TAIL, NAIVE)) == PromptSize(0, size.tail, 0, 384)


@pytest.mark.parametrize(
    ("seconds_per_byte", "wanted"),
    [(1e-9, MIN_RATIO), (0.5 * 1e-3 / 384, pytest.approx(0.5, abs=0.1)), (1e-3, 1.0)],
)
def test_the_ratio_follows_the_speed_of_the_store(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, store: Store, seconds_per_byte: float, wanted: float
) -> None:
    rows = [[size, 1.0, size, size * seconds_per_byte, size * seconds_per_byte] for size in (1e5, 1e6)]
    monkeypatch.setattr(profile, "measure_loads", lambda *_: rows)
    choice = auto_ratio(model(), store, Spec.raw(TEXTS, TAIL, make_policy("speccache", {})))
    assert choice.ratio == wanted
    assert choice.prefill_s == pytest.approx(0.150)
    assert choice.load_s == pytest.approx(150 * 384 * seconds_per_byte)


def test_the_ratio_of_compiled_and_of_new_documents_is_the_same(measured: list[str], store: Store) -> None:
    policy = make_policy("cacheblend", {})
    before = auto_ratio(model(), store, Spec.raw(TEXTS, TAIL, policy, HEAD))
    assert store.keys() == []
    compile(model(), store, TEXTS)
    assert auto_ratio(model(), store, Spec.raw(TEXTS, TAIL, policy, HEAD)) == before
    assert measured == ["prefill", "loads"]


def test_a_document_that_is_not_there_is_refused_before_anything_is_measured(measured: list[str], store: Store) -> None:
    with pytest.raises(InputError, match=r"nosuch\.txt"):
        auto_ratio(model(), store, Spec.raw(["nosuch.txt"], TAIL, make_policy("cacheblend", {})))
    assert measured == []
