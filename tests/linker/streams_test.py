"""The loader's asynchronous path on an emulated accelerator: no race, the same bits, and every wait is needed."""

from __future__ import annotations

from collections.abc import Callable

import emulated
import pytest
import torch
from emulated import Race
from subjects import HEAD, LENGTHS, TAIL, make_chunks, subject

from pictool.compiler.compile import compile_chunks
from pictool.core import CompileOptions
from pictool.linker import loader
from pictool.linker.batch import link_batches
from pictool.linker.link import Linked, link
from pictool.linker.policies import make_policy
from pictool.linker.residency import ResidentObjects
from pictool.linker.spec import Spec
from pictool.runtime.memory import streams
from pictool.runtime.memory.image import GROWTH
from pictool.runtime.memory.pool import slot_bytes
from pictool.store.store import Store

POLICIES = ("naive", "legolink", "cacheblend")


def linked(store: Store, policy: str, codec: str = "none") -> Linked:
    spec = Spec.raw(make_chunks(LENGTHS), TAIL, make_policy(policy), HEAD)
    return link(subject("llama").model, store, Spec(**{**vars(spec), "codec": codec}))


@pytest.fixture(params=[(0, 2, 1 << 24), (0, 8, 0), (1 << 62, 2, 1 << 24)], ids=["thread", "threads", "caller"])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are loaded in a thread, in several, or in the caller's; several objects at once, or one."""
    least, cores, at_once = request.param
    monkeypatch.setattr(loader, "SMALL_LAYER_BYTES", least)
    monkeypatch.setattr(loader, "_COPIED_BYTES", at_once)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr(loader, "PATIENCE_S", float("inf"))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("memory", [0, 1 << 26], ids=["files", "memory"])
@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_race_and_the_same_bits(
    policy: str, codec: str, memory: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = linked(store, policy, codec)
    near = Store(store.root, memory_bytes=memory)
    for _ in range(2):  # from files, then from memory
        with monkeypatch.context() as patch, emulated.emulated(patch) as device:
            ours = linked(near, policy, codec)
            assert 1 <= device.num_streams <= 4
        assert torch.equal(ours.image.logits, plain.image.logits)  # type: ignore[arg-type]
        for layer in range(3):
            assert torch.equal(ours.image.key(layer), plain.image.key(layer))


@pytest.mark.usefixtures("_threads")
def test_objects_of_several_codecs_are_staged_together(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of parts that are of different widths, as latents are."""
    for kind in ("llama", "deepseek_v3"):
        model, chunks = subject(kind).model, make_chunks((3, 29, 17, 40, 11))
        codecs = ("none", "none", "int8", "none", "zstd")
        keys = [
            compile_chunks(model, store, [chunk], CompileOptions(codec=codec))[0].key
            for chunk, codec in zip(chunks, codecs, strict=True)
        ]
        spec = Spec(TAIL, keys, make_policy("naive"), is_raw=True)
        plain = link(model, store, spec)
        for at_once in (4096, 1 << 24):
            monkeypatch.setattr(loader, "_COPIED_BYTES", at_once)
            with monkeypatch.context() as patch, emulated.emulated(patch):
                ours = link(model, store, spec)
            for layer in range(model.stack.num_layers):
                assert torch.equal(ours.image.key(layer), plain.image.key(layer))
                assert torch.equal(ours.image.value(layer), plain.image.value(layer))


@pytest.mark.usefixtures("_threads")
def test_a_batch_has_no_race_and_the_same_bits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one link loads for the others is in their images before these are computed."""
    model, chunks = subject("llama").model, make_chunks((3, 29, 17, 40))
    orders = (chunks, chunks[::-1], [*chunks[2:], *chunks[:2]])
    specs = [Spec.raw(order, TAIL, make_policy("legolink", {"k": 2}), HEAD) for order in orders]
    plain = [link(model, store, spec) for spec in specs]
    with monkeypatch.context() as patch, emulated.emulated(patch):
        pool = ResidentObjects(model, 3 * (200 + GROWTH) * slot_bytes(model))
        for batch in (specs, specs[1:] + specs[:1]):  # all is loaded, then all is moved
            for index, ours in link_batches(model, store, batch, pool):
                assert isinstance(ours, Linked) and ours.pool is not None and ours.pool.requests == 3
                expected = plain[specs.index(batch[index])].image
                assert torch.equal(ours.image.logits, expected.logits)  # type: ignore[arg-type]
                for layer in range(3):
                    assert torch.equal(ours.image.key(layer), expected.key(layer))
                del ours


Break = Callable[[pytest.MonkeyPatch], None]


def without_waiting_for_the_buffer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(emulated.Event, "synchronize", lambda self: None)


def without_waiting_for_the_layer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(streams, "order_after", lambda event, device: None)


def without_waiting_for_the_image(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(streams, "side_stream", lambda device, after: torch.Stream(device))


def recorded_too_early(patch: pytest.MonkeyPatch) -> None:
    """The event of a layer is that of the moment at which its stream was opened."""
    record, first = emulated.Stream.record_event, dict[str, emulated.Event]()
    patch.setattr(
        emulated.Stream, "record_event", lambda self: first.setdefault(self.name, record(self))
    )  # fmt: skip


BROKEN: list[tuple[Break, str]] = [
    (without_waiting_for_the_buffer, r"writing a host buffer by thread .* after an access by side stream \d"),
    (without_waiting_for_the_layer, r"by main stream is not ordered after an access by side stream \d"),
    (without_waiting_for_the_image, r"by side stream \d is not ordered after an access by main stream"),
    (recorded_too_early, r"is not ordered after an access by side stream \d"),
]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("break_it", "race"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_every_wait_is_needed(break_it: Break, race: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    linked(store, "legolink")
    with pytest.raises(Race, match=race), monkeypatch.context() as patch:
        break_it(patch)
        with emulated.emulated(patch):
            linked(store, "legolink")


def test_a_loader_that_ends_early_leaves_no_copy_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was copying from and to may be freed afterwards: the host waits for the whole stream."""
    linked(store, "naive")
    monkeypatch.setattr(loader, "SMALL_LAYER_BYTES", 0)
    monkeypatch.setattr("pictool.linker.fusor.Fusor.prefill_layer", lambda *_: 1 / 0)
    with monkeypatch.context() as patch, emulated.emulated(patch) as device:
        with pytest.raises(ZeroDivisionError):
            linked(store, "naive")
        done = device.clock("side stream 1").get("side stream 1", 0)
        assert done > 0 and device.clock(device.host()).get("side stream 1") == done
