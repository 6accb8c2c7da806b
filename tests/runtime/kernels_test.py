"""The Triton kernels against float64 and the models' own rotations: on a GPU, or in Triton's interpreter.

`make test-kernels` installs Triton beside the others and runs all of them. How a rotation is read needs no Triton.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from subjects import families
from torch import Tensor
from torch.nn.functional import pad
from triton_interpreter import allow_numpy_2_4

from pictool.runtime import kernels
from pictool.runtime.attention import Scoring
from pictool.runtime.kernels.pairing import pairing, pairings
from pictool.runtime.model import Model, wrap_model
from pictool.runtime.rope import RotaryTables, tables_at
from pictool.store.codecs.base import LayerShape
from pictool.store.codecs.float8 import Float8E4M3Head

NEEDS_TRITON = pytest.mark.skipif(
    not kernels.available(), reason="needs Triton, and a GPU or TRITON_INTERPRET=1: make test-kernels"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = (torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float16,)  # the interpreter cuts bfloat16 off
BY_COMPLEX = {"llama4", "llama4-tuned", "in llama4", "deepseek_v2"}
# Of rotations: halves, a part, pairs of neighbours, half a table, a sum that is rounded once, latents, none
ROTATIONS = ("llama", "phi3-partial", "glm4", "gpt_oss", "cohere2", "olmo2", "deepseek_v3", "olmo_hybrid-unrotated")


@pytest.fixture(autouse=True, scope="module")
def _with_numpy_2_4() -> None:
    if kernels.available():
        allow_numpy_2_4()


# Attention of rows


def draw(*dims: int, seed: int = 0) -> Tensor:
    return torch.randn(*dims, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def dense(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scoring: Scoring) -> Tensor:
    """Attention in float64, by a mask over all keys."""
    group, at, last = query.shape[1] // key.shape[1], positions[:, None], torch.arange(key.shape[2], device=DEVICE)
    key, value = (part.double().repeat_interleave(group, 1) for part in (key, value))
    scores = query.double() @ key.mT * (scoring.scaling or query.shape[3] ** -0.5)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    is_hidden = last > at
    if scoring.window is not None:
        is_hidden = is_hidden | (last <= at - scoring.window)
    if scoring.chunk is not None:
        is_hidden = is_hidden | (last < at - at % scoring.chunk)
    scores = scores.masked_fill(is_hidden, -math.inf)
    if scoring.sinks is not None:
        scores = torch.cat([scores, scoring.sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


SCORINGS = {
    "plain": Scoring(), "scaled": Scoring(0.3), "window": Scoring(window=50), "softcap": Scoring(softcap=5.0),
    "sinks": Scoring(sinks=2 * draw(8, seed=1)), "window and sinks": Scoring(window=30, sinks=2 * draw(8, seed=1)),
    "chunk": Scoring(chunk=64),
}  # fmt: skip
SHAPES = {"groups": (8, 2, 32, 32), "unequal widths": (4, 4, 24, 16), "one KV head": (6, 1, 48, 32)}


CASES = [
    *itertools.product(["groups"], SCORINGS, [1, 4]),
    *itertools.product(["unequal widths", "one KV head"], ["plain", "window and sinks"], [1, 4]),
    ("one KV head", "plain", None),
]


@NEEDS_TRITON
@pytest.mark.parametrize(("shape", "scoring", "splits"), CASES)
def test_scattered_rows_attend_as_in_float64(shape: str, scoring: str, splits: int | None) -> None:
    from pictool.runtime.kernels.rows_attention import rows_attention

    heads, kv_heads, dim, value_dim = SHAPES[shape]
    given = SCORINGS[scoring]
    if given.sinks is not None:
        given = replace(given, sinks=given.sinks[:heads])
    for rows, num_keys, base in ((1, 70, 0), (21, 200, 5)):
        positions = torch.randperm(num_keys - 1, generator=torch.Generator().manual_seed(rows))[: rows - 1]
        positions = torch.cat([positions.sort().values, torch.tensor([num_keys - 1])]).to(DEVICE)
        query = draw(1, rows, heads, dim).transpose(1, 2)  # as projections give it
        key, value = draw(1, kv_heads, num_keys, dim, seed=2), draw(1, kv_heads, num_keys, value_dim, seed=3)
        # What is beside the prompt's slots is not read.
        slots = [pad(part, (0, 0, base, 90), value=math.nan) for part in (key, value)]
        at = torch.tensor([base], device=DEVICE) if base else None
        found = rows_attention(query, slots[0], slots[1], positions, given, at, splits)
        assert found.shape == (1, rows, heads, value_dim)
        assert float((found.double() - dense(query, key, value, positions, given)).abs().max()) <= 2e-5


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("splits", [1, 4])
def test_half_precision_is_that_of_its_numbers(dtype: torch.dtype, splits: int) -> None:
    from pictool.runtime.kernels.rows_attention import rows_attention

    query, key, value = (draw(1, heads, n, 64, seed=heads).to(dtype) for heads, n in ((4, 3), (2, 150), (2, 150)))
    positions = torch.tensor([2, 77, 149], device=DEVICE)
    found = rows_attention(query, key, value, positions, Scoring(), splits=splits)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), dense(query, key, value, positions, Scoring()), rtol=0, atol=4 * torch.finfo(dtype).eps
    )


@NEEDS_TRITON
def test_the_grid_depends_on_the_number_of_rows_alone() -> None:
    from pictool.runtime.kernels.rows_attention import largest_power, num_splits, padded

    assert [num_splits(tiles) for tiles in (1, 8, 32, 132, 133, 5000)] == [16, 16, 8, 2, 1, 1]
    assert [padded(width) for width in (1, 16, 17, 128, 192)] == [16, 16, 32, 128, 256]
    assert [largest_power(64, room) for room in (3, 40, 64, 900)] == [16, 32, 64, 64]


# Rotations


def model_of(architecture: str, dtype: torch.dtype = torch.float32) -> Model:
    """The tiny model of an architecture, which makes its tables in a dtype."""
    model = wrap_model(tiny.random_module(tiny.CONFIGS[architecture]()).to(DEVICE), tiny.tokenizer())
    model.stack.dtype = dtype
    return model


def tables_of(model: Model) -> RotaryTables:
    return model.stack.rotary_tables(torch.arange(120, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", families())
def test_every_rotation_by_angles_is_read(architecture: str, dtype: torch.dtype) -> None:
    model = model_of(architecture, dtype)
    tables = tables_of(model)
    found = pairings(model.stack, tables)
    if architecture in BY_COMPLEX:
        assert found is None
        return
    assert found is not None and found.keys() == tables.of_kind.keys()
    for kind, table in tables.of_kind.items():
        x = draw(1, 2, 120, len(found[kind].sign)).to(dtype)
        assert torch.equal(found[kind].rotate(x, table), model.stack._rope.rotate(x, table))


def halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


OTHER_ROTATIONS = {
    "three numbers": lambda x, table: x * table[0] + (halves(x) + x.roll(1, -1)) * table[1],
    "another order": lambda x, table: (x * table[0] + halves(x) * table[1]).flip(-1),
    "a square": lambda x, table: x * table[0] ** 2 + halves(x) * table[1] ** 2,
    "a factor": lambda x, table: x * table[0] + halves(x) * table[1] * 1.5,
    "two columns": lambda x, table: x * (table[0] + table[0].roll(1, -1)) / 2 + halves(x) * table[1],
    "a bias": lambda x, table: x * table[0] + halves(x) * table[1] + 1,
    "another rounding": lambda x, table: (x * table[0]).float().add(halves(x).float() * table[1].float()).to(x.dtype),
}


@pytest.mark.parametrize("kind", OTHER_ROTATIONS)
def test_other_rotations_are_refused(kind: str) -> None:
    table = torch.rand(1, 3, 8).bfloat16(), torch.rand(1, 3, 8).bfloat16()
    assert pairing(lambda x, table: x * table[0] + halves(x) * table[1], 8, table, torch.bfloat16) is not None
    assert pairing(OTHER_ROTATIONS[kind], 8, table, torch.bfloat16) is None


# Placing


class Staged:
    """Objects of some lengths in one buffer, of which some tokens are linked; and a token of padding.

    After the numbers of each object there are `after` others.
    """

    def __init__(self, model: Model, dtype: torch.dtype, base: int = 0, after: int = 0) -> None:
        from pictool.runtime.kernels.place import Places

        self.model, self.dtype, self.base, self.dims = model, dtype, base, []
        linked = ((20, 0, 20, 40), (33, 5, 33, 0), (7, 1, 4, 90))  # tokens of the object, [start, end), where they go
        parts, first, columns = model.geometry.parts, 0, list[list[int]]()
        unit = math.gcd(*(part.width for part in parts), after)
        for length, start, end, position in linked:
            self.dims.append([(part.heads, length, part.width) for part in parts])
            columns += [[first // unit, token, length, position + token - start] for token in range(start, end)]
            first += sum(map(math.prod, self.dims[-1])) + after
        starts, tokens, lengths, positions = torch.tensor([*columns, [0, 0, 0, 119]], device=DEVICE).T.contiguous()
        at = torch.tensor([base], device=DEVICE) if base else None
        self.places, self.count = Places(starts, tokens, lengths, positions, unit, at), first
        self.linked, self.rotated = linked, int(not parts[0].rotated)

    def slots(self) -> list[Tensor]:
        dims = [(1, part.heads, self.base + 120, part.width) for part in self.model.geometry.parts]
        return [torch.zeros(each, dtype=self.dtype, device=DEVICE) for each in dims]

    def wanted(self, layer: int, numbers: Tensor) -> list[Tensor]:
        """The slots as the model's own function gives them."""
        slots, stack, first = self.slots(), self.model.stack, 0
        tables = tables_of(self.model)
        for (_, start, end, position), dims in zip(self.linked, self.dims, strict=True):
            for part, each in enumerate(dims):
                own = numbers[first : first + math.prod(each)].view(1, *each)[:, :, start:end]
                first += math.prod(each)
                there = slice(position, position + end - start)
                if part == self.rotated:
                    own = stack.rotate(own, tables_at(tables, there), layer)
                slots[part][:, :, self.base : self.base + 119][:, :, there] = own
        return slots


def placed(staged: Staged, layer: int, staging: Tensor) -> list[Tensor]:
    """The slots as the kernel gives them, but the one of the padding."""
    from pictool.runtime.kernels.place import place

    slots, stack = staged.slots(), staged.model.stack
    tables, kind = tables_of(staged.model), stack._rope.kinds[layer]
    found = pairings(stack, tables)
    assert found is not None
    place(staging, staged.places, found[kind], tables.of_kind[kind], slots[0], slots[1], staged.rotated)
    for places in slots:
        places[:, :, staged.base + 119] = 0
    return slots


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("architecture", ROTATIONS)
def test_objects_are_placed_bit_for_bit(architecture: str, dtype: torch.dtype) -> None:
    model = model_of(architecture, dtype)
    for base, layer in zip((0, 11), model.stack.kv_layers, strict=False):
        staged = Staged(model, dtype, base)
        numbers = draw(staged.count).to(dtype)
        own, wanted = placed(staged, layer, numbers), staged.wanted(layer, numbers)
        assert all(map(torch.equal, own, wanted)) and all(part.any() for part in own)


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("architecture", ["llama", "phi3-partial", "cohere2"])
def test_float8_is_widened_to_the_numbers_of_its_codec(architecture: str, dtype: torch.dtype) -> None:
    model, codec = model_of(architecture, dtype), Float8E4M3Head()
    staged, coded, decoded = Staged(model, dtype, after=4 * 4), list[Tensor](), list[Tensor]()  # scales of 4 heads
    for length, *_ in staged.linked:
        shape = LayerShape.of(model.geometry, length, str(dtype).removeprefix("torch."))
        numbers = (draw(shape.count, seed=length) * 3).to(dtype).cpu()
        key, value = shape.split(numbers.view(torch.uint8).numpy().data)
        data = memoryview(codec.encode(key, value, shape))
        unpacked, out = bytearray(codec.unpacked_bytes(shape)), bytearray(shape.num_bytes)
        codec.unpack(data, shape, memoryview(unpacked))
        codec.decode(data, shape, memoryview(out))
        coded.append(torch.frombuffer(unpacked, dtype=torch.uint8))
        decoded.append(torch.frombuffer(out, dtype=dtype))
    own = placed(staged, 0, torch.cat(coded).to(DEVICE))
    assert all(map(torch.equal, own, staged.wanted(0, torch.cat(decoded).to(DEVICE))))


@NEEDS_TRITON
def test_every_code_of_float8_is_widened() -> None:
    from pictool.runtime.kernels.place import Places, place
    from pictool.store.codecs.fp8 import from_fp8

    codes, table = torch.arange(256, device=DEVICE).byte(), (torch.empty(1, 4, 0, device=DEVICE),) * 2
    found = pairing(lambda x, _: x.clone(), 32, table, torch.float32)
    assert found is not None
    index, zeros = torch.arange(4, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    slots = [torch.zeros(1, 1, 4, 32, device=DEVICE) for _ in range(2)]
    scales = torch.tensor([0.5, 0.25], device=DEVICE).view(torch.uint8)
    place(torch.cat([codes, scales]), Places(zeros, index, 4 + zeros, index), found, table, slots[0], slots[1])
    numbers = from_fp8(np.arange(256, dtype=np.uint8)).reshape(2, -1) * np.array([[0.5], [0.25]], np.float32)
    assert np.array_equal(torch.cat(slots).view(2, -1).cpu().numpy(), numbers)


# Without a GPU


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: make test-kernels")
def test_both_compile_for_an_h100() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    tests = Path(__file__).parents[1]
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    run = partial(subprocess.run, capture_output=True, text=True, check=True, env=environment)
    found = json.loads(run([sys.executable, "-m", "kernel_ptx"]).stdout)
    attend, split, *places = found.values()
    assert attend["wgmma"] and split["wgmma"] and len(places) == 2
    assert not any(place["fma"] for place in places)  # a product that is fused with a sum is not rounded
    assert all(kernel["shared"] <= 99 << 10 for kernel in found.values())  # what smaller GPUs have, too


def test_without_triton_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not kernels.available.__wrapped__()
