"""Dequantize layers with torch, on the image's device: codes are transferred there, which are small.

The numbers equal those of the codec's own decoder, bit for bit.
"""

from __future__ import annotations

import math

import torch

from pictool.runtime.tensors import to_device
from pictool.store.codecs import codecs
from pictool.store.codecs.base import CodingError, LayerShape
from pictool.store.codecs.float8 import Float8E4M3Head
from pictool.store.codecs.quantized import Piece, Quantizing
from pictool.store.objects.format import ObjectFile


def is_quantized(file: ObjectFile) -> bool:
    return isinstance(codecs()[file.meta.codec], Quantizing)


def is_widened(file: ObjectFile) -> bool:
    """Whether an accelerator gets the codes, and widens them as it puts them to their places."""
    return isinstance(codecs()[file.meta.codec], Float8E4M3Head)


def unpacked_bytes(file: ObjectFile) -> int:
    """Bytes of a layer's codes and scales."""
    return _float8(file).unpacked_bytes(file.meta.shape)


def unpack(file: ObjectFile, layer: int, into: memoryview) -> None:
    """Write a layer's codes and scales (`Float8E4M3Head.unpack`). Raises ObjectError: damaged."""
    try:
        _float8(file).unpack(file.stored_layer(layer), file.meta.shape, into[: unpacked_bytes(file)])
    except CodingError as error:
        raise file.undecodable(layer, error) from error


def widened(
    file: ObjectFile, unpacked: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """The parts of an unpacked layer on a device, as keys and values [kv_heads, n, head_dim]."""
    shape = file.meta.shape
    count, end = shape.count, unpacked_bytes(file)
    there = unpacked[:end].to(device, non_blocking=True)
    numbers, scales = _from_fp8(there[:count]), there[count:].clone().view(torch.float32)
    heads = [dims[0] for dims in shape.part_dims]
    parts = zip(
        torch.split(numbers, [*map(math.prod, shape.part_dims)]),
        torch.split(scales, heads),
        shape.part_dims,
        strict=True,
    )
    return tuple((own.view(dims).float() * scale[:, None, None]).to(dtype) for own, scale, dims in parts)


def _float8(file: ObjectFile) -> Float8E4M3Head:
    codec = codecs()[file.meta.codec]
    assert isinstance(codec, Float8E4M3Head)
    return codec


def read_quantized(
    file: ObjectFile, layer: int, dtype: torch.dtype, device: torch.device, coded: memoryview | None = None
) -> tuple[torch.Tensor, ...]:
    """The parts of one layer, as keys and values [kv_heads, n, head_dim]. `coded` are its checked bytes, if known.

    Raises:
        ObjectError: damaged.
    """
    codec = codecs()[file.meta.codec]
    assert isinstance(codec, Quantizing)
    try:
        return dequantized(codec, file.stored_layer(layer) if coded is None else coded, file.meta.shape, dtype, device)
    except CodingError as error:
        raise file.undecodable(layer, error) from error


def dequantized(
    codec: Quantizing, coded: memoryview, shape: LayerShape, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """The parts of a coded layer, as keys and values [kv_heads, n, head_dim]. Raises CodingError as `decode` does."""
    out = tuple(torch.empty(dims, dtype=dtype, device=device) for dims in shape.part_dims)
    for part, piece in codec.pieces(coded, shape):
        target = out[part][:, piece.start : piece.end]
        _fill(target.view(piece.codes.shape), piece, codec.is_float8)
    return out


def _fill(target: torch.Tensor, piece: Piece, is_fp8: bool) -> None:
    codes = to_device(piece.codes if piece.codes.flags.writeable else piece.codes.copy(), target.device)
    scale = to_device(piece.scale, target.device)
    numbers = _from_fp8(codes) if is_fp8 else codes
    if target.dtype == torch.bfloat16 and piece.offset is None:  # codes and scales are bfloat16: rounded once
        target.copy_(numbers).mul_(scale.bfloat16())
        return
    values = numbers.float().mul_(scale)
    if piece.offset is not None:
        values.add_(to_device(piece.offset, target.device))
    target.copy_(values)


def _from_fp8(codes: torch.Tensor) -> torch.Tensor:
    """bfloat16 of float8 e4m3fn codes: sign, exponent and mantissa moved to their places, and the bias made good."""
    wide = codes.to(torch.int16)
    placed = (wide & 0x7F).mul_(16).sub_((wide & 0x80).mul_(256))  # the sign bit of int16 is -2¹⁵
    return placed.view(torch.bfloat16) * 2.0**120
