"""Hybrids: states of linear layers, composed where a chunk is linked, against `transformers`' own modules.

The rules that hold for every family are in families_test.py and exactness_test.py. Here is what only states have.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import reference
import tiny
import torch
from alone import compile
from subjects import HEAD, LENGTHS, STATES, TAIL, Subject, make_chunks, max_difference, parts_of, run, subject
from torch import Tensor
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.cache_utils import LinearAttentionLayer

from pictool.compiler.compile import compile_chunks
from pictool.core import CompileOptions, Layout
from pictool.doctor.reference import forward_over, naive_cache
from pictool.errors import InputError, ModelError, ObjectError
from pictool.linker.link import Linked
from pictool.linker.policies import make_policy
from pictool.linker.residency import ResidentObjects
from pictool.runtime.architectures import cache_name, decoder_of, geometry_of, mixer_of
from pictool.runtime.decode import generate
from pictool.runtime.memory import image as image_module
from pictool.runtime.memory.states import ImageStates, LinearState, StateMap
from pictool.runtime.model import Model, wrap_model
from pictool.runtime.prefill import prefill_stateful
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store

HYBRIDS = [name for name in tiny.HYBRIDS if not name.startswith("in ")]
RECURRENT = [name for name in HYBRIDS if not name.startswith("lfm")]
EXACT = 1e-4


# A dense reference of linking: `transformers`' own forward over the whole prompt, in which each linear layer runs its
# own rule over the inputs as linked, one stretch after the other. It knows no operators and no maps.


class _Layer:
    """The cache of one mixer: given inputs of its convolution and a state, which it moves on."""

    def __init__(self, index: int, tail: Tensor, state: Tensor | None) -> None:
        layer = LinearAttentionLayer()
        layer.conv_states[0] = torch.nn.functional.pad(tail, (1, 0)).clone()
        layer.conv_kernel_size[0] = tail.shape[-1] + 1
        layer.is_conv_states_initialized[0] = layer.has_previous_state[0] = True
        if state is not None:
            layer.recurrent_states[0], layer.is_recurrent_states_initialized[0] = state.clone(), True
        self.layers, self._layer = {index: layer}, layer

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return True

    def get_conv_state(self, index: int, state_idx: int = 0) -> Any:
        return self.layers[index].conv_states[state_idx]

    def get_recurrent_state(self, index: int, state_idx: int = 0) -> Any:
        return self.layers[index].recurrent_states[state_idx]

    def is_recording_past(self, index: int) -> bool:
        return False

    def update_conv_state(self, inputs: Tensor, index: int, **more: Any) -> Any:
        return self.layers[index].update_conv_state(inputs, **more)

    def update_recurrent_state(self, state: Tensor, layer_idx: int) -> Any:
        return self.layers[layer_idx].update_recurrent_state(state)

    @property
    def tail(self) -> Any:
        return self._layer.conv_states[0][..., 1:]

    @property
    def state(self) -> Any:
        return self._layer.recurrent_states[0]


def _call(mixer: Any, inputs: Tensor, cache: _Layer) -> Tensor:
    out: Tensor = mixer(inputs, **{cache_name(mixer): cache})
    return out


def mixers_of(module: Any) -> dict[int, Any]:
    return {i: mixer for i, layer in enumerate(decoder_of(module).layers) if (mixer := mixer_of(layer)) is not None}


@contextmanager
def replaced(module: Any, forward: Callable[[int, Any, Tensor], Tensor]) -> Iterator[None]:
    """Within, each mixer's output is what `forward` returns of its layer, itself and its input."""
    mixers = mixers_of(module)

    def of(index: int, mixer: Any) -> Callable[..., Tensor]:
        own = mixer.forward

        def call(*args: Any, **more: Any) -> Tensor:
            if isinstance(more.get(cache_name(mixer)), _Layer):
                out: Tensor = own(*args, **more)
                return out
            return forward(index, mixer, args[0] if args else more["hidden_states"])

        return call

    for index, mixer in mixers.items():
        mixer.forward = of(index, mixer)
    try:
        yield
    finally:
        for mixer in mixers.values():
            del mixer.forward


def _zero(model: Model) -> tuple[Tensor, Tensor | None]:
    shape = model.geometry.states
    assert shape is not None
    zero = LinearState.zero(shape, torch.zeros(0))
    return zero.tail, zero.recurrent


def linked_reference(one: Subject, linked: Linked) -> reference.Dense:
    """A link of whole chunks: computed rows follow the states of stored tokens, which have their chunk's own inputs."""
    module, parts, layout = one.reference, parts_of(linked), linked.image.layout
    rows = torch.from_numpy(linked.rows[0])
    own: dict[int, list[Tensor]] = {}
    for part in filter(None, parts):
        with torch.no_grad(), replaced(module, _noting(one.model, own)):
            module(input_ids=torch.tensor([part]), use_cache=False)
    starts = [start for start, end in (layout.head, *layout.chunks, layout.tail) if start < end]
    isolated = {layer: torch.cat(inputs, 1) for layer, inputs in own.items()}

    def forward(layer: int, mixer: Any, hidden: Tensor) -> Tensor:
        tail, state = _zero(one.model)
        out = torch.zeros_like(hidden)
        for start, end in _stretches(rows, starts):
            if rows[start]:
                cache = _Layer(layer, tail, state)
                out[:, start:end] = _call(mixer, hidden[:, start:end], cache)
                tail, state = cache.tail, cache.state
                continue
            first = max(begin for begin in starts if begin <= start)  # of the chunk: its own inputs before the cut
            before = _Layer(layer, *_zero(one.model))
            if first < start:
                _call(mixer, isolated[layer][:, first:start], before)
            cache = _Layer(layer, before.tail, state)
            _call(mixer, isolated[layer][:, start:end], cache)
            state = cache.state
            tail = torch.cat([tail, cache.tail[..., max(0, cache.tail.shape[-1] - (end - start)) :]], -1)
            tail = tail[..., -cache.tail.shape[-1] :]
        return out

    cached = naive_cache(module, parts)
    with replaced(module, forward):
        return forward_over(module, sum(parts, []), 0, reference.Splice(cached, ~rows))


def _noting(model: Model, own: dict[int, list[Tensor]]) -> Callable[[int, Any, Tensor], Tensor]:
    def forward(layer: int, mixer: Any, hidden: Tensor) -> Tensor:
        own.setdefault(layer, []).append(hidden)
        return _call(mixer, hidden, _Layer(layer, *_zero(model)))

    return forward


def _stretches(rows: Tensor, starts: list[int]) -> Iterator[tuple[int, int]]:
    """Rows that are all computed, or all stored tokens of one chunk."""
    begin = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[begin] or (at in starts and not rows[begin]):
            yield begin, at
            begin = at


@pytest.mark.parametrize(
    ("name", "head", "policy", "fields"),
    [
        *((name, HEAD, "legolink", {"k": 5}) for name in HYBRIDS),
        *((name, HEAD, *kind) for name in STATES for kind in (("naive", {}), ("legolink", {"k": 1}))),
        *((name, "", *kind) for name in STATES for kind in (("naive", {}), ("legolink", {"k": 1}))),
    ],
)
def test_a_link_equals_the_rule_run_over_the_inputs_as_linked(
    name: str, head: str, policy: str, fields: dict[str, Any], store: Store
) -> None:
    """Chunks of 1, 2 and 3 tokens too, which are shorter than the convolution reads back."""
    one = subject(name)
    linked = run(one, store, make_policy(policy, fields), make_chunks((2, 1, 3, 19, 17)), head=head)
    assert max_difference(linked, linked_reference(one, linked)) <= EXACT


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_chunk_alone_is_the_model(name: str, store: Store) -> None:
    """With nothing before it, naive reuse of a chunk is exact: KV, state and all that is generated after it."""
    one = subject(name)
    for length in (1, 2, 3, 29):
        linked = run(one, store, make_policy("naive", {}), make_chunks((length,)), head="")
        assert linked.recomputed == 0
        tokens = sum(parts_of(linked), [])
        assert max_difference(linked, reference.full(one.reference, tokens)) <= EXACT
        wanted = one.reference.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False)[0, len(tokens) :]
        assert list(generate(one.model, linked.image, 8).tokens) == wanted.tolist()


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_state_matters(name: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gates of these models remember: a link sees when any one layer's stored state, or tail, is zero."""
    one, chunks = subject(name), make_chunks((29, 17))
    right = run(one, store, make_policy("naive", {}), chunks, head="").image.logits
    assert right is not None
    place = ImageStates.place
    layers = list(mixers_of(one.pristine))
    for layer in layers:
        for part in ["tail"] + (["state"] if name in RECURRENT else []):

            def spoilt(states: ImageStates, at: int, start: int, stored: StateMap) -> None:
                zero: Any = {part: torch.zeros_like(getattr(stored, part))} if at == layer else {}  # noqa: B023
                place(states, at, start, replace(stored, **zero))

            monkeypatch.setattr(ImageStates, "place", spoilt)
            wrong = run(one, store, make_policy("naive", {}), chunks, head="").image.logits
            assert wrong is not None
            assert float((wrong - right).abs().max()) > 10 * EXACT, f"layer {layer}: a zero {part} is not seen"
    if name in RECURRENT:

        def forgetful(states: ImageStates, at: int, start: int, stored: StateMap) -> None:
            assert stored.operator is not None
            place(states, at, start, replace(stored, operator=torch.zeros_like(stored.operator)))

        monkeypatch.setattr(ImageStates, "place", forgetful)
        wrong = run(one, store, make_policy("naive", {}), chunks, head="").image.logits
        assert wrong is not None and float((wrong - right).abs().max()) > 10 * EXACT


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_of_the_first_layer_are_exact_after_the_cut(name: str, store: Store) -> None:
    """Its inputs depend on no context: with a cut of at least the convolution's columns the state is that of full."""
    one, chunks = subject(name), make_chunks(LENGTHS)
    full = run(one, store, make_policy("full", {}), chunks)
    linked = run(one, store, make_policy("legolink", {"k": 3}), chunks)
    states = [image.states.before(0, image.layout.num_tokens) for image in (full.image, linked.image) if image.states]
    torch.testing.assert_close(states[1].tail, states[0].tail, atol=1e-5, rtol=0)
    if states[0].recurrent is not None:
        torch.testing.assert_close(states[1].recurrent, states[0].recurrent, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", HYBRIDS)
def test_order_and_number_of_chunks_are_free_and_nothing_is_written_to(
    name: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, policy = subject(name), make_policy("legolink", {"k": 4})
    first = run(one, store, policy, make_chunks((29, 17, 29))).image
    logits = first.logits
    other = run(one, store, policy, make_chunks((17, 29)))
    assert max_difference(other, linked_reference(one, other)) <= EXACT
    monkeypatch.setattr(image_module, "_AT_ONCE", 5)
    again = run(one, store, policy, make_chunks((29, 17, 29))).image
    assert logits is not None and again.logits is not None
    torch.testing.assert_close(again.logits, logits, atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", HYBRIDS)
def test_an_image_is_rewound_with_its_states(name: str, store: Store) -> None:
    one = subject(name)
    image = run(one, store, make_policy("naive", {}), make_chunks((17,))).image
    answer = generate(one.model, image, 6)
    image.rewind()
    assert generate(one.model, image, 6) == answer


# The maps themselves, against sequential recurrences in float64 that are written here.


@contextmanager
def rule_inputs(model: Model) -> Iterator[list[dict[str, Tensor]]]:
    """Collect what the rules of linear layers are called with, by the names of their parameters."""
    modeling = sys.modules[type(decoder_of(model.module)).__module__]
    names = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
    rules = {name: getattr(modeling, name) for name in names if hasattr(modeling, name)}
    assert rules
    seen: list[dict[str, Tensor]] = []

    def noting(rule: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Tensor, **more: Any) -> Any:
            order = ("x", "dt", "A", "B") if "mamba" in str(rule) or "dt_softplus" in more else ("q", "k", "v")
            seen.append({**dict(zip(order, args, strict=False)), **more})
            return rule(*args, **more)

        return call

    for rule_name, rule in rules.items():
        setattr(modeling, rule_name, noting(rule))
    try:
        yield seen
    finally:
        for rule_name, rule in rules.items():
            setattr(modeling, rule_name, rule)


def sequential(given: dict[str, Any], state: Tensor) -> tuple[Tensor, Tensor]:
    """The state after given inputs, step by step in float64, and the product of all operators [heads, …, …]."""
    return _mamba(given, state) if "dt" in given else _delta(given, state)


def _delta(given: dict[str, Any], state: Tensor) -> tuple[Tensor, Tensor]:
    k, v, g, beta = (given[name][0].double() for name in ("k", "v", "g", "beta"))
    k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    k = k.repeat_interleave(v.shape[1] // k.shape[1], 1)
    identity = torch.eye(k.shape[-1], dtype=torch.float64).expand(k.shape[1], -1, -1)
    total = identity
    for at in range(len(k)):
        decay = g[at].exp() if g.dim() == 3 else g[at].exp()[:, None].expand(-1, k.shape[-1])
        column, rate = k[at][:, :, None], beta[at][:, None, None]
        step = (identity - rate * column @ column.mT) * decay[:, None, :]
        state, total = step @ state + rate * column @ v[at][:, None], step @ total
    return state, total


def _mamba(given: dict[str, Any], state: Tensor) -> tuple[Tensor, Tensor]:
    x, dt, b = (given[name][0].double() for name in ("x", "dt", "B"))
    dt = torch.nn.functional.softplus(dt + given["dt_bias"].double())
    b = b.repeat_interleave(x.shape[1] // b.shape[1], 1)
    total = torch.ones(x.shape[1], 1, 1, dtype=torch.float64)
    for at in range(len(x)):
        decay = (dt[at] * given["A"].double()).exp()[:, None, None]
        state, total = decay * state + (dt[at][:, None] * x[at])[:, :, None] * b[at][:, None], decay * total
    return state, total


def in_float64(stored: StateMap) -> StateMap:
    assert stored.operator is not None and stored.state is not None
    return replace(stored, operator=stored.operator.double(), state=stored.state.double())


@pytest.mark.parametrize("name", RECURRENT)
def test_a_map_is_that_of_the_recurrence(name: str) -> None:
    """What is read off the model's own rule equals the recurrence in float64, and composition is exact."""
    one, (chunk,) = subject(name), make_chunks((61,))
    with rule_inputs(one.model) as seen:
        _, maps = prefill_stateful(one.model.stack, chunk.tokens, 5)
    # Each layer ran twice over its inputs before and after the cut, and once in a batch that its map was read off.
    batched = [given for given in seen if len(next(iter(given.values()))) > 1]
    assert len(maps) == len(batched) == len(mixers_of(one.pristine))
    shape = one.model.geometry.states
    assert shape is not None
    for stored, given in zip(maps, batched, strict=True):
        start = torch.randn(shape.heads, shape.rows, shape.width, dtype=torch.float64)
        state, operator = sequential(given, start)
        zero, _ = sequential(given, torch.zeros_like(start))
        exact = StateMap(56, stored.tail, operator, zero)
        composed = exact.apply(LinearState(stored.tail[None], start[None])).recurrent
        assert composed is not None
        torch.testing.assert_close(composed[0], state, atol=1e-10, rtol=1e-10)
        assert relative(in_float64(stored).state, zero) <= 1e-5  # type: ignore[arg-type]
        assert relative(in_float64(stored).operator, operator) <= 1e-5  # type: ignore[arg-type]
        assert float(operator.abs().max()) > 1e-3  # it remembers


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("remembers", [0.05, 0.9999])
@pytest.mark.parametrize("is_number", [False, True], ids=["delta", "mamba"])
def test_composition_over_many_segments_is_the_sequential_recurrence(is_number: bool, remembers: float) -> None:
    """64 segments of 128 tokens, maps in float32, gates near 0 and near 1."""
    draw = torch.Generator().manual_seed(0)
    size, width, length, segments = 8, 6, 128, 64
    gate = math.log(remembers)
    state64, state32 = (torch.zeros(2, size, width, dtype=kind) for kind in (torch.float64, torch.float32))
    now = LinearState(torch.zeros(1, 1, 3), state32[None])
    for _ in range(segments):
        if is_number:
            given: dict[str, Any] = {
                "x": torch.randn(1, length, 2, size, generator=draw), "dt": torch.rand(1, length, 2, generator=draw),
                "B": torch.randn(1, length, 1, width, generator=draw), "A": torch.full((2,), gate),
                "dt_bias": torch.zeros(2),
            }  # fmt: skip
        else:
            given = {
                "k": torch.randn(1, length, 2, size, generator=draw), "beta": torch.rand(1, length, 2, generator=draw),
                "v": torch.randn(1, length, 2, width, generator=draw), "g": torch.full((1, length, 2), gate),
            }  # fmt: skip
        own, operator = sequential(given, torch.zeros_like(state64))
        state64, _ = sequential(given, state64)
        now = StateMap(length, torch.zeros(1, 3), operator.float(), own.float()).apply(now)
    assert now.recurrent is not None
    assert relative(now.recurrent[0].double(), state64) <= 1e-5


# Objects


def test_an_object_holds_states_only_beyond_its_cut_and_its_key_names_it(store: Store) -> None:
    one, (chunk,) = subject("bamba"), make_chunks((17,))
    kinds = [CompileOptions(cut=cut) for cut in (None, 0, 1, 17)]
    done = [compile_chunks(one.model, store, [chunk], kind)[0] for kind in kinds]
    assert len({each.key for each in done}) == 4
    files = [ObjectFile(each.path) for each in done]
    assert [file.meta.cut for file in files] == [16, 0, 3, 17]
    assert [file.state_bytes > 0 for file in files] == [True, True, True, False]
    assert files[0].num_bytes - files[3].num_bytes >= files[0].state_bytes
    for file in files:
        file.verify()
        file.close()


@pytest.mark.parametrize("name", RECURRENT)
def test_states_can_be_kept_in_bfloat16(name: str, store: Store) -> None:
    """Half of the bytes, each number the nearest one; the prompt is linked of them, a little off."""
    one, chunks, policy = subject(name), make_chunks((29, 33, 24)), make_policy("legolink", {"k": 5})
    states = one.model.geometry.states
    assert states is not None
    kinds = [CompileOptions(codec=codec, cut=5) for codec in ("none", "states_bfloat16")]
    plain, rounded = ([ObjectFile(of.path) for of in compile_chunks(one.model, store, chunks, kind)] for kind in kinds)
    for exact, near in zip(plain, rounded, strict=True):
        near.verify()
        for index in range(states.layers):
            wide, narrow = exact.states(index), near.states(index)
            assert bytes(wide["tail"]) == bytes(narrow["tail"])
            for part in ("operator", "state"):
                numbers = np.frombuffer(wide[part], np.float32).astype(ml_dtypes.bfloat16)
                assert bytes(narrow[part]) == numbers.tobytes()
        assert all(exact.layer(0)[part] == near.layer(0)[part] for part in range(2))
    linked = run(one, store, policy, [file.path for file in rounded])
    assert EXACT < max_difference(linked, linked_reference(one, linked)) < 0.2
    for file in (*plain, *rounded):
        file.close()


@pytest.mark.parametrize("codec", ["none", "zstd", "int8"])
def test_states_are_kept_beside_any_codec_and_a_damaged_one_is_refused(
    codec: str, store: Store, tmp_path: Path
) -> None:
    one, (chunk,) = subject("qwen3_next"), make_chunks((29,))
    (mine,) = compile(one.model, store, [chunk], codec=codec)
    policy = make_policy("legolink", {"k": 16})
    run(one, store, policy, [mine.path])
    whole = bytearray(mine.path.read_bytes())
    with ObjectFile(mine.path) as file:
        at = whole.find(bytes(file.states(1)["state"]))
    assert at > 0
    whole[at + 5] ^= 16
    damaged = tmp_path / "damaged.kvo"
    damaged.write_bytes(whole)
    with pytest.raises(ObjectError, match=f"^{damaged}: state 1 "):
        run(one, store, policy, [damaged])


def test_what_has_no_state_where_the_rows_end_is_computed_whole_and_it_is_said(store: Store) -> None:
    one, (chunk,) = subject("bamba"), make_chunks((29,))
    said: list[str] = []
    store.on_warning = said.append
    (early,) = compile_chunks(one.model, store, [chunk], CompileOptions(cut=4))
    (late,) = compile_chunks(one.model, store, [chunk], CompileOptions(cut=20))
    rounded = run(one, store, make_policy("legolink", {"k": 8}), [late.path])
    assert int(rounded.rows[0][rounded.image.layout.head[1] : rounded.image.layout.num_context].sum()) == 20
    assert not said and max_difference(rounded, linked_reference(one, rounded)) <= EXACT
    for policy, path in (("legolink-8", early.path), ("naive", late.path)):
        whole = run(one, store, make_policy(*_named(policy)), [path])
        assert whole.rows[0][whole.image.layout.head[1] :].all()
        assert "all of it is computed" in said.pop() and not said


def _named(policy: str) -> tuple[str, dict[str, Any]]:
    name, _, number = policy.partition("-")
    return name, {"k": int(number)} if number else {}


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_chunk_that_is_computed_in_several_parts_is_compiled_as_in_one(
    name: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU one of more than 512 tokens is."""
    stack, (chunk,) = subject(name).model.stack, make_chunks((29,))
    whole, maps = prefill_stateful(stack, chunk.tokens, 16)
    monkeypatch.setattr(image_module, "_AT_ONCE", 5)
    parts, other = prefill_stateful(stack, chunk.tokens, 16)
    assert len(parts) == len(whole) and len(maps) == len(other)
    torch.testing.assert_close(parts, whole, atol=EXACT, rtol=0)
    for mine, theirs in zip(other, maps, strict=True):
        assert torch.allclose(mine.tail, theirs.tail, atol=EXACT)
        assert mine.state is None or torch.allclose(mine.state, theirs.state, atol=EXACT)  # type: ignore[arg-type]


# Prefix chains


@pytest.mark.parametrize(
    ("name", "block"), [*((name, 4) for name in HYBRIDS), *((name, block) for name in STATES for block in (1, 16))]
)
def test_a_stored_beginning_and_its_states_give_what_the_model_gives(
    name: str, block: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it ends within a chunk, and all that is generated after it."""
    one, policy, chunks = subject(name), make_policy("prefix", {"block": block}), make_chunks(LENGTHS)
    first, again = (run(one, store, policy, chunks) for _ in range(2))
    ids = sum(parts_of(again), [])
    context, dense = again.image.layout.num_context, reference.full(one.reference, ids)
    assert (first.recomputed, again.recomputed) == (context, context % block)
    assert max(max_difference(first, dense), max_difference(again, dense)) <= EXACT
    wanted = one.reference.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
    assert list(generate(one.model, again.image, 8).tokens) == wanted.tolist()
    monkeypatch.setattr(image_module, "_AT_ONCE", 5)
    fork = run(one, store, policy, make_chunks((1, 3, 29, 7)))
    assert 0 < fork.recomputed < 7 + block
    assert max_difference(fork, reference.full(one.reference, sum(parts_of(fork), []))) <= EXACT


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_state_of_a_stored_beginning_matters(name: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    one, policy, chunks = subject(name), make_policy("prefix", {"block": 8}), make_chunks((29, 17))
    right = [run(one, store, policy, chunks) for _ in range(2)][1].image.logits
    assert right is not None
    place, kept = ImageStates.place, range(one.model.stack.num_layers)
    for layer in [layer for layer in kept if one.model.stack.state_index[layer] is not None]:
        for part in ["tail"] + (["state"] if name in RECURRENT else []):

            def spoilt(states: ImageStates, at: int, start: int, stored: StateMap) -> None:
                zero: Any = {part: torch.zeros_like(getattr(stored, part))} if at == layer else {}  # noqa: B023
                place(states, at, start, replace(stored, **zero))

            monkeypatch.setattr(ImageStates, "place", spoilt)
            wrong = run(one, store, policy, chunks)
            assert wrong.image.logits is not None and wrong.recomputed < 8
            assert float((wrong.image.logits - right).abs().max()) > 10 * EXACT, f"layer {layer}: a zero {part}"


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "falcon_h1", "lfm2"])
def test_a_block_holds_the_state_at_its_end_and_a_damaged_or_foreign_one_is_computed_again(
    name: str, store: Store
) -> None:
    one, policy, chunks = subject(name), make_policy("prefix", {"block": 8}), make_chunks((29,))
    right, said = run(one, store, policy, chunks).image.logits, list[str]()
    store.on_warning = said.append
    last = run(one, store, policy, chunks).image.layout.num_context // 8 - 1
    identities = one.model.target.identify_blocks(run(one, store, policy, chunks).image.layout.tokens, 8)
    path, other = (store.path(identities[depth].key) for depth in (last, last - 1))
    shape, whole = one.model.geometry.states, path.read_bytes()
    assert shape is not None
    with ObjectFile(path) as file:
        file.verify()
        names, data = list(file.states(0)), bytes(file.states(shape.layers - 1)["tail"])
        assert names == [part for part in shape.dims if part != "operator"] and file.meta.cut is None
        assert file.state_bytes == sum(len(part) for part in file.states(0).values()) * shape.layers
    damaged = bytearray(whole)
    damaged[whole.find(data) + 3] ^= 64
    for wrong in (bytes(damaged), other.read_bytes()):
        path.write_bytes(wrong)
        linked = run(one, store, policy, chunks)
        assert linked.image.logits is not None and right is not None
        torch.testing.assert_close(linked.image.logits, right, atol=EXACT, rtol=0)
        assert linked.recomputed >= linked.image.layout.num_context - last * 8
        with ObjectFile(path) as file:
            file.verify()
            file.require_key(identities[last].key)
    assert "does not match its checksum" in said[0]


# Refusals


@pytest.mark.parametrize("policy", ["cacheblend", "prophet", "speccache"])
def test_policies_that_need_more_than_a_cut_are_refused_by_name(policy: str, store: Store) -> None:
    with pytest.raises(InputError, match=f"^{policy}: bamba .* legolink"):
        run(subject("bamba"), store, make_policy(policy, {}), make_chunks((17,)))


def test_what_reads_attention_of_every_layer_is_refused_and_nothing_is_in_a_pool(store: Store) -> None:
    from pictool.runtime.activations import hidden_norms, image_of_tokens

    model = subject("falcon_h1").model
    with pytest.raises(InputError, match="after text"):
        compile_chunks(model, store, make_chunks((17,)), CompileOptions(after="text"))
    tokens = torch.arange(3, 9).numpy()
    with pytest.raises(ModelError, match="falcon_h1"):
        hidden_norms(model, tokens)
    with pytest.raises(ModelError, match=r"attention .*falcon_h1"):
        image_of_tokens(model, tokens.tolist()).append(5, lambda scores: None)
    with pytest.raises(ModelError, match="pool: falcon_h1"):
        ResidentObjects(model, 1 << 24)


def test_a_time_step_limit_that_steps_of_one_token_ignore_is_refused() -> None:
    config = tiny.CONFIGS["bamba"]()
    config.time_step_limit = (0.1, 0.6)
    with pytest.raises(ModelError, match=r"time_step_limit .*\(0.1, 0.6\)"):
        wrap_model(tiny.random_module(config), tiny.tokenizer(), "limited")


def test_an_empty_prompt_has_the_states_of_zero() -> None:
    stack = subject("kimi_linear").model.stack
    image = image_module.Image(stack, Layout.of((), (), (5, 6)))
    assert image.states is not None
    assert not any(part.any() for part in (image.states.before(0, 0).tail, image.states.before(0, 0).recurrent))  # type: ignore[union-attr]


def test_the_tail_of_the_tables_is_longer_than_one_token() -> None:
    """A tail of one token is the case of decoding; here the rules run over several."""
    assert len(subject("bamba").model.encode(TAIL)) > 1


@pytest.mark.parametrize(
    ("config", "megabytes", "tokens"), [(Qwen3NextConfig(), 153, 6216), (Qwen3_5TextConfig(), 102, 3108)]
)
def test_sizes_of_states_are_those_of_the_docs(config: Any, megabytes: int, tokens: int) -> None:
    """In bfloat16, for the default configurations (docs/reference/models.md)."""
    geometry = geometry_of(config)
    assert geometry.states is not None
    size = geometry.states.num_bytes(2)
    per_token = 2 * geometry.layers * sum(part.heads * part.width for part in geometry.parts)
    assert (round(size / 1e6), math.ceil(size / per_token)) == (megabytes, tokens)
    text = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    assert f"{megabytes} MB, {tokens:,}" in text
