"""What is measured for the loading controller, and how it is kept. No time is ever asserted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from subjects import subject
from torch.utils.flop_counter import FlopCounterMode

from pictool.api import compile, link
from pictool.controller import calibration as profile
from pictool.controller import measuring as measure
from pictool.controller.calibration import compute_facts, compute_profile, forget_compute, load_profile
from pictool.controller.choice import auto_ratio, make_estimator, projection_share
from pictool.controller.cost import ComputeMeasurement, Decoding, Estimator, PromptSize, layer_work
from pictool.controller.decision import MIN_RATIO
from pictool.controller.measuring import Measured
from pictool.controller.prompt_size import measure_size
from pictool.core import Chunk
from pictool.errors import InputError, StoreError
from pictool.linker.policies import make_policy
from pictool.linker.spec import Spec
from pictool.runtime.architectures import decoder_of
from pictool.runtime.model import Model, wrap_model
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store

COMPUTE = [[62.0, 2.0, 1.0, 0.064], [510.0, 2.0, 1.0, 0.512], [510.0, 2.0, 64.0, 0.066]]  # a millisecond a token
POINTS = [
    ComputeMeasurement(PromptSize(int(context), int(tail), 1, 384), int(runs), s) for context, tail, runs, s in COMPUTE
]
LOADS = [[2e6, 1.0, 0.3, 0.03, 0.1, 0.01], [2e6, 2.0, 0.4, 0.06, 0.1, 0.02]]
TEXTS = [Chunk("", tuple(range(3, 103)), "a"), Chunk("", tuple(range(7, 57)), "b")]
TAIL, HEAD = "Who knows why?", "<s>"


@cache
def model(name: str = "llama") -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS[name]()), tiny.tokenizer(), name)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, in order; the numbers are made up."""
    calls: list[str] = []

    def gives(what: str, rows: list[list[float]]) -> Callable[..., Measured]:
        def measure(*_: object) -> Measured:
            calls.append(what)
            return Measured(rows)

        return measure

    monkeypatch.setattr(profile, "measure_compute", gives("prefill", COMPUTE))
    monkeypatch.setattr(profile, "measure_loads", gives("loads", LOADS))
    return calls


def kept() -> list[Path]:
    return sorted(Path("cache/pictool/profiles").glob("*"))


# Keeping


def test_a_profile_is_measured_once(measured: list[str], store: Store) -> None:
    told: list[str] = []
    for _ in range(2):
        assert compute_profile(model(), on_measure=told.append) == POINTS
        found = load_profile(model(), "store", store.root, on_measure=told.append)
        assert vars(found.cold) == pytest.approx({"byte_s": 1e-7, "object_s": 0.1, "open_s": 0.03})
        assert vars(found.warm) == pytest.approx({"byte_s": 5e-8, "object_s": 0.0, "open_s": 0.01})
    assert measured == ["prefill", "loads"] and len(told) == 2 and len(kept()) == 2


def test_it_is_measured_again_if_asked(measured: list[str]) -> None:
    compute_profile(model())
    compute_profile(model(), again=True)
    assert measured == ["prefill"] * 2 and len(kept()) == 1


def test_every_model_and_place_has_its_own(measured: list[str], store: Store, tmp_path: Path) -> None:
    compute_profile(model())
    compute_profile(model("qwen3"))
    for tier, directory in (("store", store.root), ("store", tmp_path), ("nvme", store.root)):
        load_profile(model(), tier, directory)
    assert len(kept()) == len(measured) == 5


def test_a_store_that_is_made_later_is_the_same_place(measured: list[str], store: Store) -> None:
    load_profile(model(), "store", store.root)
    store.root.mkdir()
    load_profile(model(), "store", store.root)
    assert measured == ["loads"]


@pytest.mark.parametrize("threads", [2, 3])
def test_another_number_of_threads_is_another_machine(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    compute_profile(model())
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    compute_profile(model())
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
        spoil(rows=[[62.0, 2.0, 1.0]]),
        spoil(rows=[[62.0, 2.0, 1.0, -1.0]]),
        spoil(rows=[[62.0, 2.0, 1.0, float("nan")]]),
        spoil(rows=[[10**400, 2.0, 1.0, 1.0]]),
        spoil(rows=[[1e300, 2.0, 1.0, 1.0]]),
        spoil(rows=[[0.5, 2.0, 1.0, 1.0]]),
        lambda data: b"[" * 100_000,
        lambda data: b" " * (2 << 20),
        spoil(rows=[[62.0, 2.0, 1.0, "fast"]]),
        spoil(of={}),
        spoil(measured_at="today"),
        spoil(scatter=None),
        spoil(scatter=float("nan")),
        lambda data: spoil(of=data["of"] | {"version": 0})(data),
    ],
)
def test_a_damaged_or_old_file_is_measured_again(
    measured: list[str], damage: Callable[[dict[str, Any]], bytes]
) -> None:
    compute_profile(model())
    (path,) = kept()
    whole = json.loads(path.read_bytes())
    path.write_bytes(damage(whole))
    assert compute_profile(model()) == POINTS
    again = json.loads(path.read_bytes())
    assert measured == ["prefill"] * 2 and kept() == [path]
    assert again == whole | {"measured_at": again["measured_at"]}


def test_a_profile_says_when_and_how_evenly_it_was_measured(measured: list[str]) -> None:
    assert compute_facts(model()) is None
    before = time.time()
    compute_profile(model())
    facts = compute_facts(model())
    assert facts is not None and before <= facts.measured_at <= time.time() and facts.scatter == 0


def test_what_scatters_is_measured_again_soon(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def busy(*_: object) -> Measured:
        measured.append("prefill")
        return Measured(COMPUTE, 0.8)

    monkeypatch.setattr(profile, "measure_compute", busy)
    compute_profile(model(), on_measure=told.append)
    compute_profile(model())
    assert measured == ["prefill"] and told[0] == "prefill"
    assert told[1] == "prefill on a busy machine: repeats were 80% apart; it is measured again soon"
    (path,) = kept()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"measured_at": time.time() - 3600}))
    compute_profile(model())
    assert measured == ["prefill"] * 2


def test_what_disagrees_with_links_is_forgotten(measured: list[str]) -> None:
    compute_profile(model())
    forget_compute(model())
    compute_profile(model())
    assert measured == ["prefill"] * 2


def test_the_scatter_is_the_range_of_repeats_over_their_median() -> None:
    seconds = iter([1.0, 10.0, 2.0, 10.0, 1.5, 10.0])
    medians, scatter = measure._medians([lambda: next(seconds), lambda: next(seconds)])
    assert medians == [1.5, 10.0] and scatter == pytest.approx((1 / 1.5 + 0) / 2)


def test_a_cache_that_cannot_be_written_only_costs_time(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert compute_profile(model()) == compute_profile(model())
    assert measured == ["prefill"] * 2


# Measuring


def test_computing_is_measured_up_to_the_model_s_positions_and_of_scattered_rows() -> None:
    *prefills, scattered = measure.measure_compute(model()).rows
    tail = len(model().encode("Answer:"))
    assert [row[:3] for row in prefills] == [[tokens - tail, tail, 1] for tokens in (64, 256, 512)]
    assert scattered[:3] == [512 - tail, tail, -((512 - tail) // -8)]
    times = [row[3] for row in prefills]
    assert min(*times, scattered[3]) > 0 and times == sorted(times)


def test_prefill_stops_at_the_first_length_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_LONG_S", 0.0)
    rows = measure.measure_compute(model()).rows
    assert [context + tail for context, tail, *_ in rows] == [64, 64]


def test_loading_is_measured_by_bytes_and_objects_and_leaves_nothing(tmp_path: Path) -> None:
    (place := tmp_path / "tier").mkdir()
    rows = measure.measure_loads(model(), place).rows
    assert [row[:2] for row in rows] == [[2 * 240 * 384, 2], [4 * 120 * 384, 4], [16 * 16 * 384, 16]]
    assert all(len(row) == 6 and min(row) > 0 for row in rows)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("codec", ["zstd", "int8"])
def test_decoding_is_measured_beside_plain_loading(codec: str) -> None:
    rows = measure.measure_decoding(model(), codec).rows
    assert [row[:2] for row in rows] == [[2 * 240 * 384, 2], [4 * 120 * 384, 4], [16 * 16 * 384, 16]]
    assert all(len(row) == 5 and min(row) > 0 and row[2] < row[0] for row in rows)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"^.*/none: its speed cannot be measured \(No such file .*$"):
        measure.measure_loads(model(), tmp_path / "none")


def test_a_random_object_is_one_like_any_other(store: Store) -> None:
    path = store.put(measure.random_object(model(), 40, seed=1))
    with ObjectFile(path) as file:
        file.verify()
        assert file.meta.key == path.stem == model().target.key(file.tokens(), 0, "none")
        assert file.meta.num_tokens == 40 and measure.token_bytes(model()) == 384
    linked = link(model(), store, [path, measure_other(store)], TAIL, make_policy("naive", {}))
    assert linked.recomputed == 0 and linked.image.layout.num_context == 80


def measure_other(store: Store) -> Path:
    return store.put(measure.random_object(model(), 40, seed=2))


def test_a_measured_link_compiles_what_is_missing(store: Store) -> None:
    timing = measure.measure_link(model(), store, Spec.raw(TEXTS, TAIL, make_policy("cacheblend", {}), HEAD))
    assert len(store.keys()) == 3
    assert timing.ttft_s >= timing.recompute_s > 0 and timing.fetch_s > 0


# Estimating


class _Cached(Exception):
    """A layer has its keys and values."""


class _EndingCache:
    """Ends a layer where it updates its cache; Llama 4 asks for its length before."""

    def update(self, *_: Any) -> None:
        raise _Cached

    def get_seq_length(self, *_: Any) -> int:
        return 0


def _flops(layer: Any, hidden: torch.Tensor, table: Any, cache: Any) -> int:
    """FLOPs of a layer's products with weights, counted by torch: all but the products of batches in its attention."""
    positions = torch.arange(hidden.shape[1])[None]
    with FlopCounterMode(display=False) as counter, suppress(_Cached), torch.no_grad():
        layer(
            hidden, attention_mask=None, position_ids=positions, position_embeddings=table, past_key_values=cache,
            use_cache=cache is not None,
        )  # fmt: skip
    counts = counter.get_flop_counts()
    scores = [count for name, count in counts.items() if name.endswith(".self_attn")]
    products = sum(flops for count in scores for operation, flops in count.items() if "bmm" in str(operation))
    return int(sum(counts["Global"].values()) - products)


@pytest.mark.parametrize("name", [name for name in tiny.CONFIGS if name not in tiny.HYBRIDS])
def test_the_share_of_the_projections_is_that_of_the_flops(name: str) -> None:
    """Against torch's own counter, over every layer of `transformers`: until the cache is updated, and in all."""
    own = subject(name)
    module = own.reference
    module.set_experts_implementation("eager")
    decoder, hidden = decoder_of(module), torch.randn(1, 6, 32)
    tables = own.model.stack.rotary_tables(torch.arange(6))
    projections = computed = 0
    for index, layer in enumerate(decoder.layers):
        parts = own.model.stack._table(tables, index)
        table: Any = parts if len(parts) > 1 else parts[0]
        projections += _flops(layer, hidden, table, _EndingCache())
        computed += _flops(layer, hidden, table, None)
    assert projection_share(own.model) == pytest.approx(projections / computed, rel=1e-6)


def test_the_work_is_that_of_the_policy() -> None:
    share = projection_share(model())
    blend = make_estimator(model(), make_policy("cacheblend", {}), POINTS)
    assert blend.work == layer_work(3, (1, 2), share) and blend.prefill_s(100) == pytest.approx(0.1)
    assert make_estimator(model(), make_policy("naive", {}), POINTS).work == layer_work(3)


def test_work_is_full_where_a_link_computes_every_row(store: Store) -> None:
    policy = make_policy("cacheblend", {"layers": "2"})
    rows = link(model(), store, TEXTS, TAIL, policy, head=HEAD).rows
    work = make_estimator(model(), policy, POINTS).work
    assert [bool(row.all()) for row in rows] == [True, True, True]  # the last one is projected in full
    assert [layer.fixed for layer in work] == [1, 1, projection_share(model())]


def test_the_size_of_a_prompt_is_that_of_its_layout(store: Store) -> None:
    policy = make_policy("naive", {})
    layout = link(model(), store, TEXTS, TAIL, policy, head=HEAD).image.layout
    size = measure_size(model(), store, Spec.raw(TEXTS, TAIL, policy, HEAD))
    assert size == PromptSize(layout.num_context, layout.num_tokens - layout.num_context, 3, 384)
    assert measure_size(model(), store, Spec.raw([], TAIL, policy)) == PromptSize(0, size.tail, 0, 384)


def test_coded_objects_are_counted_as_they_are_stored(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "measure_decoding", lambda *_: Measured([[1000.0, 1.0, 500.0, 0.1, 0.25]]))
    policy = make_policy("naive", {})
    new = measure_size(model(), store, replace(Spec.raw(TEXTS, TAIL, policy), codec="int8"))
    assert (new.num_bytes, new.stored_bytes) == (150 * 384, 150 * 384 // 2)
    assert new.decode_s == pytest.approx(150 * 384 * 0.2e-3)  # what 0.25 s are longer than 500 bytes at 0.1 ms
    linked = link(model(), store, TEXTS, TAIL, policy, codec="int8")
    known = measure_size(model(), store, replace(Spec.raw(TEXTS, TAIL, policy), codec="int8"))
    assert known.stored_bytes == linked.bytes_read and known.decode_s == new.decode_s
    first = compile(model(), store, TEXTS[:1], codec="int8")[0].path
    mixed = measure_size(model(), store, Spec.raw([first, TEXTS[1]], TAIL, policy))
    assert mixed.stored_bytes == measure.stored_bytes(first) + 50 * 384


def test_what_a_codec_costs_is_what_it_takes_longer_than_plain_bytes() -> None:
    # Plain: 1 µs a byte and 1 ms an object. Coded: half of the bytes, then 2 µs a byte and 3 ms an object more.
    sizes = [(1000.0, 1.0), (4000.0, 2.0), (9000.0, 9.0)]
    plain = [1e-6 * kv + 1e-3 * count for kv, count in sizes]
    coded = [1e-6 * kv / 2 + 1e-3 * count + 2e-6 * kv + 3e-3 * count for kv, count in sizes]
    kv, objects = zip(*sizes, strict=True)
    found = Decoding.fit(kv, objects, [size / 2 for size in kv], plain, coded)
    assert (found.stored, found.byte_s, found.object_s) == pytest.approx((0.5, 2e-6, 3e-3))
    assert found.seconds(500, 2) == pytest.approx(7e-3)
    faster = [seconds / 2 for seconds in plain]
    assert Decoding.fit(kv, objects, kv, plain, faster) == Decoding()  # no slower: decoding costs nothing


# The ratio of a prompt


@pytest.mark.parametrize(
    ("seconds_per_byte", "wanted"),
    [(1e-9, MIN_RATIO), (0.5 * 1e-3 / 384, pytest.approx(0.5, abs=0.1)), (1e-3, 1.0)],
)
def test_the_ratio_follows_the_speed_of_the_store(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, store: Store, seconds_per_byte: float, wanted: float
) -> None:
    rows = [[size, 1.0, size * seconds_per_byte, 1e-9, size * seconds_per_byte, 1e-9] for size in (1e5, 1e6)]
    monkeypatch.setattr(profile, "measure_loads", lambda *_: Measured(rows))
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


def test_an_estimator_of_no_points_estimates_nothing() -> None:
    assert make_estimator(model(), make_policy("naive", {}), []) == Estimator(0, 0, 0, 0, layer_work(3))
