"""Links in static tensors: a tape of one link serves every other, of any family; what the host does, counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import emulated
import pytest
import tiny
import torch
from emulated import Race
from subjects import (
    HEAD,
    LENGTHS,
    TAIL,
    default_policy,
    each_kind,
    families,
    make_chunks,
    run,
    subject,
)
from tape import NotCapturable, Tape, graphed
from torch import Tensor

from benchmarks import launches
from pictool.core import Layout
from pictool.errors import InputError
from pictool.linker import loader
from pictool.linker.link import Linked, link
from pictool.linker.policies import make_policy
from pictool.linker.residency import ResidentObjects
from pictool.linker.spec import Spec
from pictool.runtime import turns
from pictool.runtime.graphs import stack as graphs_stack
from pictool.runtime.graphs.buffers import Staging
from pictool.runtime.graphs.image import StaticImage, StaticPooledImage, new_image
from pictool.runtime.graphs.recorder import is_on
from pictool.runtime.graphs.rows import bucket_rows
from pictool.runtime.memory import streams
from pictool.runtime.memory.image import GROWTH, Image
from pictool.runtime.memory.pool import slot_bytes
from pictool.runtime.model import Model
from pictool.store.store import Store

CLOSE = 1e-5
LAYERS = 32  # of the model whose operations are counted
# (policy, lengths of documents): other documents, rows and lengths in the same buckets, and in others
LINKS = [
    ("legolink", (1, 3, 29, 17, 29)), ("legolink", (17, 3, 1, 29)), ("naive", (29, 17)), ("cacheblend", (29, 17, 29)),
    ("prophet", (17, 29, 3)),
]  # fmt: skip
ANSWER = (5, 9, 11, 5)  # tokens that are appended


@pytest.fixture
def near(store: Store) -> Store:
    """The same objects, with layers in host memory once they were read."""
    return Store(store.root, memory_bytes=1 << 26)


def link_of(architecture: str, store: Store, policy: str, lengths: tuple[int, ...]) -> Linked:
    return run(subject(architecture), store, default_policy(policy), make_chunks(lengths))


def pool_of(model: Model, slots: int = 2048) -> ResidentObjects:
    return ResidentObjects(model, slots * slot_bytes(model), keeps_prefixes=True)


def pooled_link_of(
    architecture: str, store: Store, pool: ResidentObjects | None, policy: str, lengths: tuple[int, ...]
) -> Linked:
    spec = Spec.raw(make_chunks(lengths), TAIL, default_policy(policy), HEAD)
    return link(subject(architecture).model, store, replace(spec, is_fresh=True), residents=pool)


def numbers_of(image: Image, answer: tuple[int, ...] = ANSWER) -> list[Tensor]:
    """The logits, KV of all layers, and the logits after each token of an answer."""
    assert image.logits is not None
    kv = [part(layer).clone() for layer in range(image.stack.geometry.layers) for part in (image.key, image.value)]
    return [image.logits.clone(), *kv, *(image.append(token) for token in answer)]


def difference(ours: list[Tensor], other: list[Tensor]) -> float:
    return max(float((one - two).abs().max()) for one, two in zip(ours, other, strict=True))


@pytest.mark.parametrize("records", [True, False], ids=["tapes", "lean"])
@pytest.mark.parametrize("architecture", each_kind())
def test_a_step_of_one_link_serves_every_other(
    architecture: str, records: bool, store: Store, near: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first objects are read, then they are in memory; no stream reads what another one has yet to write."""
    plain = [numbers_of(link_of(architecture, store, *each).image) for each in LINKS]
    with graphed(subject(architecture).model, records) as (graphs, _):
        with monkeypatch.context() as patch, emulated.emulated(patch):
            for index in (*range(len(LINKS)), *reversed(range(len(LINKS))), 0):
                ours = link_of(architecture, near, *LINKS[index]).image
                assert isinstance(ours, StaticImage)
                assert difference(numbers_of(ours), plain[index]) <= CLOSE
        assert graphs.problem is None
        assert (graphs.num_recorded > 20) == records


@pytest.mark.parametrize("architecture", families(*each_kind(), *tiny.HYBRIDS))
def test_a_layer_of_any_family_is_a_step(architecture: str, store: Store) -> None:
    """Its operations can be recorded, and are another link's as well; all else about steps is no family's own."""
    plain = [numbers_of(link_of(architecture, store, *each).image) for each in LINKS[:2]]
    with graphed(subject(architecture).model) as (graphs, _):
        for index in (0, 1, 0, 1):
            assert difference(numbers_of(link_of(architecture, store, *LINKS[index]).image), plain[index]) <= CLOSE
        assert graphs.problem is None and graphs.num_recorded > 10


def test_an_image_outlives_the_slab(store: Store) -> None:
    first, second = ("legolink", LENGTHS), ("naive", (17, 29))
    plain = numbers_of(link_of("llama", store, *first).image)
    with graphed(subject("llama").model):
        for _ in range(3):
            kept = link_of("llama", store, *first).image
            kept.append(ANSWER[0])
            other = link_of("llama", store, *second).image
            kept.rewind()
            assert isinstance(other, StaticImage) and difference(numbers_of(kept), plain) <= CLOSE
            assert difference(numbers_of(other, ()), numbers_of(link_of("llama", store, *second).image, ())) == 0


def test_a_link_that_begins_during_another_has_tensors_of_its_own(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where requests take turns in one thread, which loads without another one."""
    monkeypatch.setattr("pictool.linker.loader.PATIENCE_S", math.inf)
    plain = numbers_of(link_of("llama", store, "cacheblend", LENGTHS).image)
    inner: list[Linked] = []

    def link_once(pause: turns.Pause) -> None:
        if not inner:
            inner.append(None)  # type: ignore[arg-type]
            inner[0] = link_of("llama", store, "naive", (29, 17))

    with graphed(subject("llama").model):
        turns.set_checkpoint(link_once)
        try:
            outer = link_of("llama", store, "cacheblend", LENGTHS)
        finally:
            turns.set_checkpoint(lambda pause: None)
        assert isinstance(outer.image, StaticImage) and not isinstance(inner[0].image, StaticImage)
        assert difference(numbers_of(outer.image), plain) <= CLOSE


@pytest.mark.parametrize("records", [True, False], ids=["tapes", "lean"])
@pytest.mark.parametrize("architecture", each_kind())
def test_images_of_a_pool_are_computed_by_steps(architecture: str, records: bool, store: Store) -> None:
    """The rows of documents that links wrote over are restored in the pool, where answers are, too."""
    model = subject(architecture).model
    plain = [numbers_of(pooled_link_of(architecture, store, None, *each).image) for each in LINKS]
    pool = pool_of(model)
    with graphed(model, records) as (graphs, _):
        for index in (*range(len(LINKS)), *reversed(range(len(LINKS))), 0):
            linked = pooled_link_of(architecture, store, pool, *LINKS[index])
            assert isinstance(linked.image, StaticPooledImage) and linked.image._slab is not None
            assert difference(numbers_of(linked.image), plain[index]) <= CLOSE
            assert linked.image._num_copied == linked.image.num_tokens
            kept = numbers_of(linked.image, ())[1:]
            linked.image.leave()
            assert difference(numbers_of(linked.image, ())[1:], kept) == 0
            del linked
        assert graphs.problem is None
        assert (graphs.num_recorded > 10) == records


def test_answers_from_a_pool_take_turns_in_the_slab(store: Store) -> None:
    """One that another link displaced goes on in the pool, and comes back once nobody is there; so does one that began
    again, or whose scores were read.
    """
    first, second = ("legolink", LENGTHS), ("naive", (29, 17))
    plain = [pooled_link_of("llama", store, None, *each).image for each in (first, second)]
    with graphed(subject("llama").model):
        pool = pool_of(subject("llama").model)
        ours = [pooled_link_of("llama", store, pool, *each).image for each in (first, second)]
        assert [image._slab is None for image in ours if isinstance(image, StaticPooledImage)] == [True, False]

        def answer(index: int, *tokens: int, scores: bool = False) -> None:
            images = ours[index], plain[index]
            for token in tokens:
                one, two = (image.append(token, (lambda _: None) if scores else None) for image in images)
                assert float((one - two).abs().max()) <= CLOSE

        for _ in range(3):
            answer(0, 5, 9)
            answer(1, 7, 9, 11)
            answer(1, 4, scores=True)
            answer(1, 8)
            ours[1].rewind()
            plain[1].rewind()
        ours[1] = plain[1]  # nobody is in the slab
        answer(0, 5, 9, 11)
        assert isinstance(ours[0], StaticPooledImage) and ours[0]._slab is not None


@pytest.mark.parametrize("slots", [2, 1], ids=["in the pool", "elsewhere"])
def test_an_answer_longer_than_its_room_is_computed_by_steps(slots: int, store: Store) -> None:
    model, kind = subject("llama").model, ("naive", (29, 17))
    plain = pooled_link_of("llama", store, None, *kind).image
    with graphed(model):
        ours = pooled_link_of("llama", store, pool_of(model, slots * GROWTH + 128), *kind).image
        for token in range(5, GROWTH + 9):
            assert float((ours.append(token) - plain.append(token)).abs().max()) <= CLOSE
        assert isinstance(ours, StaticPooledImage) and ours._num_copied == ours.num_tokens
        for layer in range(model.stack.num_layers):
            assert torch.allclose(ours.key(layer), plain.key(layer), atol=CLOSE)


def test_decoding_goes_on_where_the_slab_ends(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = link_of("llama", store, "naive", (29,)).image
    with graphed(subject("llama").model):
        monkeypatch.setattr(graphs_stack, "GROWTH", 1)
        ours = link_of("llama", store, "naive", (29,)).image
        assert isinstance(ours, StaticImage) and ours._slab is not None
        for token in range(3, ours._slab.capacity - ours.num_tokens + 8):
            assert float((ours.append(token) - plain.append(token)).abs().max()) <= CLOSE
        assert ours._slab is None


def test_other_passes_are_those_of_any_image(store: Store) -> None:
    """Scores, keys that are kept, rows of other links, full recompute: over the same tensors, without steps."""
    model, plain = subject("llama").model, link_of("llama", store, "naive", (29, 17)).image
    with graphed(model) as (graphs, _):
        ours = link_of("llama", store, "naive", (29, 17)).image
        scores: list[list[Tensor]] = [[], []]
        for image, found in zip((ours, plain), scores, strict=True):
            image.append(7, found.append)
            image.keep_keys()
            found += [image.append(9), *image.fresh_keys]  # type: ignore[misc]
        assert difference(*scores) <= CLOSE
        full = link_of("llama", store, "full", (29, 17)).image
        assert isinstance(full, StaticImage)
        assert torch.equal(numbers_of(full)[0], numbers_of(link_of("llama", store, "full", (29, 17)).image)[0])
        assert graphs.problem is None


def test_a_slab_grows_and_buckets_are_dropped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_stack, "MOST_BUCKETS", 2)
    monkeypatch.setattr(graphs_stack, "GROWTH", 8)
    one, sizes = subject("llama"), set[int]()
    links = [((29,), 8), ((29, 17, 30, 31, 32), 16), ((29,), 8), (tuple(range(40, 50)), 24), ((29,), 3)]
    plain = [run(one, store, make_policy("legolink", {"k": k}), make_chunks(lengths)) for lengths, k in links]
    expected = [numbers_of(linked.image) for linked in plain]
    with graphed(one.model) as (graphs, _):
        for _ in range(2):
            for (lengths, k), numbers in zip(links, expected, strict=True):
                ours = run(one, store, make_policy("legolink", {"k": k}), make_chunks(lengths)).image
                assert isinstance(ours, StaticImage) and ours._slab is not None
                sizes.add(ours._slab.capacity)
                assert difference(numbers_of(ours), numbers) <= CLOSE
                assert len(graphs._rows) <= 2 and len(graphs._placings) <= 2
    assert len(sizes) > 1


@pytest.fixture(params=[0, 1 << 62], ids=["threads", "caller"])
def _from_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are read by threads, or by the caller's, to buffers that are used again at every second layer."""
    monkeypatch.setattr(loader, "SMALL_LAYER_BYTES", request.param)
    monkeypatch.setattr(loader, "PREFETCHED_LAYERS", 1)
    monkeypatch.setattr(loader, "PATIENCE_S", math.inf)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    monkeypatch.setattr(loader, "StagedLayer", lambda *_: pytest.fail("one by one"))


@pytest.mark.usefixtures("_from_files")
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_objects_from_files_arrive_at_once(codec: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model = subject("llama").model
    specs = [Spec(TAIL, make_chunks(lengths), default_policy(policy), codec=codec) for policy, lengths in LINKS]
    plain = [numbers_of(link(model, store, spec).image) for spec in specs]
    with graphed(model) as (graphs, _), monkeypatch.context() as patch, emulated.emulated(patch):
        for index in (*range(len(LINKS)), 0):
            assert difference(numbers_of(link(model, store, specs[index]).image), plain[index]) <= CLOSE
        assert graphs.problem is None and graphs._placings


@pytest.mark.usefixtures("_from_files")
def test_a_buffer_is_read_to_once_it_was_copied(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        graphed(subject("llama").model), pytest.raises(Race, match="by thread"),
        monkeypatch.context() as patch, emulated.emulated(patch),
    ):  # fmt: skip
        patch.setattr(emulated.Event, "synchronize", lambda _: None)
        link_of("llama", store, "legolink", LENGTHS)


def without_waiting_for_the_layer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(streams, "order_after", lambda event, device: None)


def without_waiting_for_the_staging(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Staging, "placed", property(lambda self: [None, None], lambda self, value: None), raising=False)


def without_waiting_for_the_link_before(patch: pytest.MonkeyPatch) -> None:
    """Its layers read the slab."""
    now = streams.event_now

    def too_early(device: torch.device) -> Any:
        event: Any = now(device)
        event.clock = {}
        return event

    patch.setattr(streams, "event_now", too_early)


@pytest.mark.parametrize(
    ("break_it", "race"),
    [
        (without_waiting_for_the_layer, r"by main stream is not ordered after an access by side stream \d"),
        (
            without_waiting_for_the_staging,
            r"copy_.* by side stream \d is not ordered after .* side stream",
        ),
        (without_waiting_for_the_link_before, r"by side stream \d is not ordered after an access by main stream"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_every_wait_is_needed(
    break_it: Callable[[pytest.MonkeyPatch], None], race: str, near: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        graphed(subject("llama").model), pytest.raises(Race, match=race),
        monkeypatch.context() as patch, emulated.emulated(patch),
    ):  # fmt: skip
        for index in range(4):
            if index == 2:
                break_it(patch)
            link_of("llama", near, "legolink", LENGTHS)


class Broken:
    """Records what replays nothing, or nothing at all."""

    def __init__(self, fails: bool) -> None:
        self._fails, self.num_calls = fails, 0

    def record(self, run: Callable[[], None], pool: str) -> Broken:
        self.num_calls += 1
        if self._fails:
            raise RuntimeError("cannot be captured")
        return self

    def replay(self) -> None: ...


@pytest.mark.parametrize("fails", [True, False], ids=["cannot be recorded", "replays something else"])
def test_what_does_not_repeat_is_not_replayed(fails: bool, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    plain = numbers_of(link_of("llama", store, "legolink", LENGTHS).image)
    with graphed(subject("llama").model) as (graphs, _):
        graphs.recorder = broken = Broken(fails)
        for _ in range(3):
            assert difference(numbers_of(link_of("llama", store, "legolink", LENGTHS).image), plain) <= CLOSE
        assert broken.num_calls == 1 and graphs.num_recorded == 0
        assert graphs.problem is not None and len(caplog.records) == 1


def test_without_memory_for_a_comparison_nothing_is_recorded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = numbers_of(link_of("llama", store, "legolink", LENGTHS).image)

    def full(tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    with graphed(subject("llama").model) as (graphs, _):
        link_of("llama", store, "legolink", LENGTHS)
        with monkeypatch.context() as patch:
            patch.setattr("pictool.runtime.graphs.recorder.torch.empty_like", full)
            ours = link_of("llama", store, "legolink", LENGTHS).image
        assert difference(numbers_of(ours), plain) <= CLOSE and graphs.num_recorded == 0


def test_few_buckets_pad_few_rows() -> None:
    buckets = [bucket_rows(count) for count in range(1, 4097)]
    assert buckets[0] == 1 and all(a <= b for a, b in pairwise(buckets)) and len(set(buckets)) < 48
    for count, bucket in enumerate(buckets, 1):
        assert 0 <= bucket - count < (16 if count <= 128 else 64 if count <= 512 else 128)


def test_a_cpu_has_no_static_tensors(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, layout = subject("llama").model.stack, Layout.of([], [(5, 6)], [7])
    assert type(new_image(stack, layout)) is Image
    assert not is_on(torch.device("cuda"))
    monkeypatch.setenv("PIC_GRAPHS", "on")
    assert not is_on(torch.device("cpu")) and is_on(torch.device("cuda"))
    monkeypatch.setenv("PIC_GRAPHS", "auto")
    with pytest.raises(InputError, match=r"^PIC_GRAPHS=auto: "):
        is_on(torch.device("cuda"))


# What the host does


@pytest.fixture(scope="module")
def counted() -> dict[int, dict[str, Any]]:
    """Links of a model of some layers, by the number of chunks."""
    found = launches.measure_links(launches.make_model(LAYERS), [8, 64], 4, ["legolink-1"], 1)
    return {each["chunks"]: each for each in found}


def test_operations_outside_of_steps_are_those_of_the_layers_whatever_the_chunks(counted: dict[int, Any]) -> None:
    assert [counted[chunks]["graphs"]["operations_outside"] <= LAYERS + 8 for chunks in (8, 64)] == [True, True]
    assert counted[8]["graphs"]["launches_of_steps"] == counted[64]["graphs"]["launches_of_steps"]


def test_a_step_launches_as_much_as_the_layer_of_transformers(counted: dict[int, Any]) -> None:
    """And one copy: the layers of a bucket share what they run on."""
    own = launches.of_transformers(launches.make_model(LAYERS), 64, 16)
    of_steps = counted[8]["graphs"]["launches_of_steps"]
    assert of_steps["_run_layer"] <= own + 1 and of_steps["_run"] <= 11


def test_without_graphs_launches_do_not_grow_with_the_chunks(counted: dict[int, Any]) -> None:
    assert counted[8]["lean"]["launches_a_layer"] == counted[64]["lean"]["launches_a_layer"] <= 54
    assert max(counted[chunks][how]["apart"] for chunks in (8, 64) for how in ("lean", "graphs")) <= CLOSE


# Tapes


def test_a_tape_refuses_what_a_capture_does() -> None:
    static, other = torch.arange(4.0), torch.ones(4)
    refused: list[Callable[[], Any]] = [
        lambda: float(static.sum()), lambda: static[static > 1], static.nonzero, lambda: static + other,
        lambda: static + torch.tensor([1.0, 2.0, 3.0, 4.0]), lambda: torch.where(static > 1),
        lambda: static.repeat_interleave(static.long()),
    ]  # fmt: skip
    for refuse in refused:
        with pytest.raises(NotCapturable), Tape([static]):
            refuse()


def test_a_tape_replays_at_the_same_addresses() -> None:
    given, out = torch.arange(4.0), torch.zeros(4)
    with Tape([given, out]) as recorded:
        out.copy_((given * 2).cumsum(0))
    given.fill_(1)
    recorded.replay()
    assert out.tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize("records", [True, False], ids=["tapes", "lean"])
@pytest.mark.parametrize("policy", ["cacheblend", "prophet"])
def test_where_rows_go_on_is_not_asked(
    policy: str, records: bool, store: Store, near: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers in static tensors need no runs, so the host waits for none where the device ranks rows."""
    from pictool.runtime.rows import DeviceRows

    plain = link_of("llama", store, policy, (29, 17, 29))
    with graphed(subject("llama").model, records), monkeypatch.context() as patch, emulated.emulated(patch):
        link_of("llama", near, policy, (29, 17, 29))
        patch.setattr(DeviceRows, "bounds", property(lambda _: pytest.fail("asked")))
        patch.setattr("pictool.linker.policies.prophet.highest", lambda *_: pytest.fail("ranked on the host"))
        ours = link_of("llama", near, policy, (29, 17, 29))
        assert isinstance(ours.image, StaticImage) and (ours.rows == plain.rows).all()
        assert ours.scores is not None and plain.scores is not None
        assert float(abs(ours.scores - plain.scores).max()) <= CLOSE
