"""One Triton launch that puts a layer of all objects to its places: gather from a staging buffer, RoPE, write.

Keys are bit for bit those of the model's own rotation (`pairing`), in every dtype. Layers that are coded as float8 are
widened as they are read, to the numbers that their codec decodes (`Float8E4M3Head.unpack`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pictool.runtime.kernels.pairing import Pairing
from pictool.runtime.kernels.rows_attention import padded
from pictool.runtime.rope import RotaryTable

_TOKENS = 16  # of a program, which then has registers enough for several on a multiprocessor


@dataclass(frozen=True, eq=False)
class Places:
    """Where the parts (keys and values, or others) of tokens are, and where they go; int64 [tokens], on the device.

    Fields:
        start: the piece of `unit` numbers of the staging buffer at which the token's object begins.
        token: its index in the object, which has `length` tokens.
        positions: the rows of the tables, and the slots after that of position 0: `base`, int64 [1]; None: the first.
    """

    start: Tensor
    token: Tensor
    length: Tensor
    positions: Tensor
    unit: int = 1
    base: Tensor | None = None


@triton.jit
def _numbers(
    STAGED: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    scale: tl.tensor,
    IS_FLOAT8: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Numbers of the staging buffer in the dtype of the places."""
    numbers = tl.load(STAGED + at, mask=mask, other=0)
    if IS_FLOAT8:  # its exponent and fraction are those of a float16 that is 2⁸ times smaller
        bits = numbers.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        numbers = (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0 * scale[:, None]).to(DTYPE)
    return numbers


@triton.jit
def _place_part(
    STAGED: tl.tensor, PLACES: tl.tensor, COS: tl.tensor, SIN: tl.tensor, OTHER: tl.tensor, SIGN: tl.tensor,
    COS_COLUMN: tl.tensor, SIN_COLUMN: tl.tensor, first: tl.tensor, length: tl.tensor, position: tl.tensor,
    scale: tl.tensor, exists: tl.tensor, head: tl.tensor, head_stride: tl.tensor, slot_stride: tl.tensor,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, IS_ROTATED: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr, IS_FLOAT8: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one part of some tokens."""
    dtype = PLACES.dtype.element_ty
    dim = tl.arange(0, WIDTH_2)
    inside = dim < WIDTH
    mask = exists[:, None] & inside[None, :]
    start = (first + head * length * WIDTH)[:, None]
    numbers = _numbers(STAGED, start + dim[None, :], mask, scale, IS_FLOAT8, dtype)
    if IS_ROTATED:
        other = tl.load(OTHER + dim, mask=inside, other=0)
        sign = tl.load(SIGN + dim, mask=inside, other=0.0)
        is_turned = mask & (sign != 0.0)[None, :]
        cos_column = tl.load(COS_COLUMN + dim, mask=inside, other=0)
        sin_column = tl.load(SIN_COLUMN + dim, mask=inside, other=0)
        row = position[:, None] * COLUMNS
        cos = tl.load(COS + row + cos_column[None, :], mask=is_turned, other=0.0).to(tl.float32)
        sin = tl.load(SIN + row + sin_column[None, :], mask=is_turned, other=0.0).to(tl.float32)
        partner = _numbers(STAGED, start + other[None, :], mask, scale, IS_FLOAT8, dtype)
        straight = numbers.to(tl.float32) * cos
        crossed = partner.to(tl.float32) * sign[None, :] * sin
        if not ROUNDS_ONCE:
            straight, crossed = straight.to(dtype).to(tl.float32), crossed.to(dtype).to(tl.float32)
        numbers = tl.where(is_turned, (straight + crossed).to(dtype), numbers)
    place = PLACES + head.to(tl.int64) * head_stride + position[:, None] * slot_stride + dim[None, :]
    tl.store(place, numbers, mask=mask)


@triton.jit
def _place(
    STAGED: tl.tensor, KEYS: tl.tensor, VALUES: tl.tensor, COS: tl.tensor, SIN: tl.tensor, OTHER: tl.tensor,
    SIGN: tl.tensor, COS_COLUMN: tl.tensor, SIN_COLUMN: tl.tensor, START: tl.tensor, TOKEN: tl.tensor,
    LENGTH: tl.tensor, POSITIONS: tl.tensor, BASE: tl.tensor, SCALES: tl.tensor, tokens: tl.tensor,
    k_head: tl.tensor, k_slot: tl.tensor, v_head: tl.tensor, v_slot: tl.tensor,
    HEADS: tl.constexpr, OTHER_HEADS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    OTHER_WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, OTHER_WIDTH_2: tl.constexpr, ROTATED: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr, IS_FLOAT8: tl.constexpr, HAS_BASE: tl.constexpr, UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one of both parts: those of the first are before those of the second."""
    index, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    exists = index < tokens
    first = tl.load(START + index, mask=exists, other=0) * UNIT
    token = tl.load(TOKEN + index, mask=exists, other=0)
    length = tl.load(LENGTH + index, mask=exists, other=0)
    position = tl.load(POSITIONS + index, mask=exists, other=0)
    scale = tl.zeros([TOKENS], tl.float32)
    if IS_FLOAT8:  # the scales of an object are after its codes
        codes = length * (HEADS * WIDTH + OTHER_HEADS * OTHER_WIDTH)
        scale = tl.load(SCALES + (first + codes) // 4 + head, mask=exists, other=0.0)
    if HAS_BASE:
        base = tl.load(BASE)
        KEYS += base * k_slot
        VALUES += base * v_slot
    if head < HEADS:
        first += token * WIDTH
        _place_part(
            STAGED, KEYS, COS, SIN, OTHER, SIGN, COS_COLUMN, SIN_COLUMN, first, length, position, scale, exists,
            head, k_head, k_slot, COLUMNS, WIDTH, WIDTH_2, ROTATED == 0, ROUNDS_ONCE, IS_FLOAT8,
        )  # fmt: skip
    else:
        first += length * (HEADS * WIDTH) + token * OTHER_WIDTH
        _place_part(
            STAGED, VALUES, COS, SIN, OTHER, SIGN, COS_COLUMN, SIN_COLUMN, first, length, position, scale, exists,
            head - HEADS, v_head, v_slot, COLUMNS, OTHER_WIDTH, OTHER_WIDTH_2, ROTATED == 1, ROUNDS_ONCE, IS_FLOAT8,
        )  # fmt: skip


def place(
    staging: Tensor, places: Places, pairing: Pairing, table: RotaryTable, key: Tensor, value: Tensor,
    rotated: int = 0,
) -> None:  # fmt: skip
    """Put both parts of tokens from a staging buffer to their slots, one of them rotated to its positions.

    Args:
        staging: the layers of objects, 1-dimensional, in the dtype of key and value: [heads, tokens, width] of the
            first part, then of the second. Or uint8: codes of float8 e4m3fn in the same order, and after those of an
            object, at a multiple of 4, the scales of all heads as float32.
        pairing: how the rotated part is (`pairing.pairing`).
        table: cos and sin of all positions, [1, positions, columns].
        key, value: [1, heads, slots, width], the places of the first part and of the second; their last dimension is
            contiguous.
        rotated: which part is, 0 or 1.
    """
    (_, heads, _, width), (_, other_heads, _, other_width) = key.shape, value.shape
    (cos, sin), tokens, is_float8 = table, len(places.positions), staging.dtype == torch.uint8
    given = (staging, cos, sin, places.start, places.token, places.length, places.positions)
    assert all(tensor.is_contiguous() for tensor in given) and key.stride(3) == value.stride(3) == 1
    assert is_float8 or staging.dtype == key.dtype
    _place[(triton.cdiv(tokens, _TOKENS), heads + other_heads)](
        staging, key, value, cos, sin, pairing.other, pairing.sign, pairing.cos_column,
        pairing.sin_column, places.start, places.token, places.length, places.positions,
        places.positions if places.base is None else places.base,
        staging[: len(staging) // 4 * 4].view(torch.float32) if is_float8 else staging, tokens, *key.stride()[1:3],
        *value.stride()[1:3], HEADS=heads, OTHER_HEADS=other_heads, COLUMNS=cos.shape[-1], WIDTH=width,
        OTHER_WIDTH=other_width, WIDTH_2=padded(width), OTHER_WIDTH_2=padded(other_width), ROTATED=rotated,
        ROUNDS_ONCE=pairing.rounds_once, IS_FLOAT8=is_float8, HAS_BASE=places.base is not None, UNIT=places.unit,
        TOKENS=_TOKENS, num_warps=4, enable_fp_fusion=False,  # a product that is fused with the sum is not rounded
    )  # fmt: skip
