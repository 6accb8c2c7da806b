"""Links in static tensors whose steps are the Triton kernels: they are the links without (`make test-kernels`)."""

from __future__ import annotations

from contextlib import suppress

import emulated
import pytest
import torch
from subjects import TAIL, default_policy, make_chunks, run, subject
from tape import graphed
from triton_interpreter import allow_numpy_2_4

from pictool.compiler.compile import compile_chunks
from pictool.core import CompileOptions
from pictool.linker import loader
from pictool.linker.link import Linked, link
from pictool.linker.spec import Spec
from pictool.runtime import kernels
from pictool.runtime.graphs.kernels import Kernels, kernels_of
from pictool.store.store import Store

CLOSE = 1e-5
# Soft caps and windows; sinks and half a table; latents; chunks, and a table that the kernel refuses
ARCHITECTURES = ("gemma2", "gpt_oss", "deepseek_v3", "llama4")
LINKS = (("legolink", (1, 29, 17)),) * 2  # read, then from memory

pytestmark = pytest.mark.skipif(
    not kernels.available() or torch.cuda.is_available(),
    reason="needs Triton and TRITON_INTERPRET=1: make test-kernels",
)


def link_of(architecture: str, store: Store, policy: str, lengths: tuple[int, ...]) -> Linked:
    return run(subject(architecture), store, default_policy(policy), make_chunks(lengths))


def test_a_triton_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from pictool.runtime.kernels import rows_attention

    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(rows_attention, "rows_attention", fail)
    assert kernels_of(subject("llama").model.stack) == Kernels() and "C compiler" in caplog.text


def test_float8_stays_coded_until_it_is_placed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links from memory, of which the last is at once."""
    allow_numpy_2_4()
    near, model = Store(store.root, memory_bytes=1 << 26), subject("llama").model
    spec = Spec("Answer:", make_chunks((29, 17)), default_policy("legolink"), codec="float8_e4m3_head", is_raw=True)
    plain = link(model, store, spec).image.logits
    with graphed(model, False, kernels_of(model.stack)) as (graphs, _):
        with monkeypatch.context() as patch, suppress(emulated.Race), emulated.emulated(patch):
            for _ in range(2):
                logits = link(model, near, spec).image.logits
                assert logits is not None and plain is not None and float((logits - plain).abs().max()) <= CLOSE
        assert [is_coded for _, is_coded in graphs._placings] == [True]


@pytest.mark.parametrize("memory", [0, 1 << 26], ids=["files", "memory"])
def test_codes_and_numbers_are_placed_in_one_link(memory: int, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    allow_numpy_2_4()
    near, model = Store(store.root, memory_bytes=memory), subject("llama").model
    monkeypatch.setattr(loader, "StagedLayer", lambda *_: pytest.fail("one by one"))
    codecs = ("none", "float8_e4m3_head", "zstd", "float8_e4m3_head")
    keys = [
        compile_chunks(model, store, [chunk], CompileOptions(codec=codec))[0].key
        for chunk, codec in zip(make_chunks((3, 29, 17, 40)), codecs, strict=True)
    ]
    spec = Spec(TAIL, keys, default_policy("naive"), is_raw=True)
    plain = link(model, store, spec).image
    with graphed(model, False, kernels_of(model.stack)) as (graphs, _):
        with monkeypatch.context() as patch, suppress(emulated.Race), emulated.emulated(patch):
            for _ in range(2):
                ours = link(model, near, spec).image
                for layer in range(model.stack.num_layers):
                    assert torch.allclose(ours.key(layer), plain.key(layer), atol=CLOSE, rtol=0)
                    assert torch.allclose(ours.value(layer), plain.value(layer), atol=CLOSE, rtol=0)
        assert {is_coded for _, is_coded in graphs._placings} == {False, True}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_links_by_kernels_are_those_without(architecture: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    allow_numpy_2_4()
    near, model = Store(store.root, memory_bytes=1 << 26), subject(architecture).model
    plain = [link_of(architecture, near, *each).image for each in LINKS]
    found = kernels_of(model.stack)
    assert (found.place is None) == (architecture == "llama4")
    with graphed(model, False, found) as (graphs, _), monkeypatch.context() as patch:
        # The interpreter copies what it is given, for which streams would have to wait.
        with suppress(emulated.Race), emulated.emulated(patch):
            for each, other in zip(LINKS, plain, strict=True):
                ours = link_of(architecture, near, *each).image
                assert ours.logits is not None and other.logits is not None
                assert float((ours.logits - other.logits).abs().max()) <= CLOSE
                assert float((ours.append(7) - other.append(7)).abs().max()) <= CLOSE
        assert graphs.problem is None and len(graphs._placings)
        assert not any(bucket._runs.masks for bucket in graphs._rows.values())
