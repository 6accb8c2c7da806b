"""A KV cache of fp8: objects are coded as they are written to blocks, and attention reads what was coded.

The reference is the torch engine whose image is read as vLLM's kernels for a CPU code KV: towards 0. A number that two
engines compute a little apart may fall on either side of a border of the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import vllm_rig as rig
from torch import Tensor
from vllm_matrix import CELLS, Answered

from pictool.runtime.memory.image import Image

CODES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
TOLERANCE = CELLS["--kv-cache-dtype fp8"].tolerance


def coded(numbers: Tensor, code: torch.dtype) -> Tensor:
    """The next numbers of the code towards 0."""
    nearest = numbers.to(code)
    bits = nearest.view(torch.uint8) - (nearest.float().abs() > numbers.abs()).to(torch.uint8)
    return bits.view(code).to(numbers.dtype)


@pytest.fixture(scope="module", params=list(CODES))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any]
) -> tuple[rig.World, rig.Engine, torch.dtype]:
    world = rig.make_world(tmp_path_factory.mktemp(request.param), "llama")
    return world, start(world, enable_prefix_caching=True, kv_cache_dtype=request.param), CODES[request.param]


@pytest.fixture
def over_fp8(pair: tuple[rig.World, rig.Engine, torch.dtype]) -> Iterator[None]:
    """Attention of the torch engine reads coded KV."""
    key, value = Image.key, Image.value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image, "key", lambda image, layer: coded(key(image, layer), pair[2]))
        patch.setattr(Image, "value", lambda image, layer: coded(value(image, layer), pair[2]))
        yield


def test_the_cell(
    pair: tuple[rig.World, rig.Engine, torch.dtype], over_fp8: None, answered: Answered, request: pytest.FixtureRequest
) -> None:
    world, engine, _ = pair
    cases = [world.case(spec, seed=80 + seed) for seed, spec in enumerate(("full", "legolink-16", "legolink-1000"))]
    cases += rig.mixed(world, max(5, answered.per_cell - len(cases)))
    answered.check(f"--kv-cache-dtype {request.node.callspec.params['pair']}", cases, engine.ask(*cases))


def test_a_link_without_coding_is_another(pair: tuple[rig.World, rig.Engine, torch.dtype]) -> None:
    """Else the tolerance would hide KV that was not coded."""
    world, engine, _ = pair
    for seed in range(3):
        case = world.case("naive", seed=seed)
        (answer,) = engine.ask(case)
        assert rig.difference(case, answer) > 10 * TOLERANCE
