"""What `pic doctor` says of relocated keys of a GGUF file: an engine's own noise is no fault, a wrong rotation is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from pictool.doctor.gguf import _DISTANCE, _LIMITS, judge_moved
from pictool.doctor.verdict import VerdictStatus

LAYERS, HEADS, TOKENS, DIM = 6, 2, 24, 16
Rows = NDArray[np.float32]
Rotate = Callable[[Rows, int], Rows]


def rotation(base: float = 1e4, forgets_dims: int = 0, offset: int = 0) -> Rotate:
    """Half-split RoPE of keys [heads, n, dim] whose chunk begins at a position, perhaps with a fault."""
    speeds = base ** -(np.arange(DIM // 2) / (DIM // 2))
    speeds[:forgets_dims] = 0

    def rotate(key: Rows, start: int) -> Rows:
        angles = np.outer(np.arange(TOKENS) + start + offset, speeds)
        (first, second), cos, sin = np.split(key, 2, axis=-1), np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(np.float32)

    return rotate


def layers(start: int, noise: float, rotate: Rotate, computed_at: int | None = None) -> list[tuple[Rows, Rows]]:
    """K and V of a chunk, whose activations are noisier after each layer, by where the chunk was computed."""
    made, rounded = np.random.default_rng(1), np.random.default_rng(start if computed_at is None else computed_at)
    found = []
    for layer in range(LAYERS):
        key, value = (made.normal(size=(HEADS, TOKENS, DIM)).astype(np.float32) for _ in range(2))
        off = [noise * layer / (LAYERS - 1) * rounded.normal(size=key.shape) for _ in range(2)]
        found.append((rotate((key + off[0]).astype(np.float32), start), (value + off[1]).astype(np.float32)))
    return found


def judged(noise: float, moves: Rotate) -> VerdictStatus:
    right = rotation()
    at_0, there = layers(0, noise, right), layers(_DISTANCE, noise, right)
    return judge_moved(layers(_DISTANCE, noise, moves, computed_at=0), at_0, there, _LIMITS["float16"]).status


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
def test_noise_is_no_fault_and_a_wrong_rotation_is_one(noise: float) -> None:
    assert judged(noise, rotation()) is VerdictStatus.OK
    for wrong in (rotation(1e6), rotation(offset=1), rotation(offset=-_DISTANCE), rotation(forgets_dims=1)):
        assert judged(noise, wrong) is VerdictStatus.FAILED


def test_a_rotation_that_is_wrong_in_one_noisy_layer_is_a_fault() -> None:
    """As that of the global layers of Gemma 3, whose base is another."""
    right, wrong = rotation(), rotation(1e6)
    at_0, there = layers(0, 0.1, right), layers(_DISTANCE, 0.1, right)
    moved = layers(_DISTANCE, 0.1, right, computed_at=0)
    moved[-1] = layers(_DISTANCE, 0.1, wrong, computed_at=0)[-1]
    assert judge_moved(moved, at_0, there, _LIMITS["float16"]).status is VerdictStatus.FAILED


@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_numbers_that_are_wrong_are_no_noise(value: float) -> None:
    right = rotation()
    at_0, there = layers(0, 0.1, right), layers(_DISTANCE, 0.1, right)
    for broken in (at_0, there):
        broken[-1] = (broken[-1][0], np.full_like(broken[-1][1], value))
    moved = layers(_DISTANCE, 0.1, right, computed_at=0)
    assert judge_moved(moved, at_0, there, _LIMITS["float16"]).status is VerdictStatus.FAILED
