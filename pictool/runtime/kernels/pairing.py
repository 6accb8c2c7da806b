"""How a model's own function rotates: which dimension with which, by what sign, by which column of its tables.

It is asked with basis vectors, and what is read from its answers is compared with it on random numbers, bit for bit.
So a kernel can do in one launch what the function does in several, and nothing is guessed from a model's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pictool.runtime.rope import RotaryTable, RotaryTables

if TYPE_CHECKING:
    from pictool.runtime.stack import LayerStack

Read = tuple[Tensor, Tensor, Tensor, Tensor]
Rotate = Callable[[Tensor, RotaryTable], Tensor]  # of x [1, heads, n, width] by a table of n positions


@dataclass(frozen=True, eq=False)
class Pairing:
    """y[d] = x[d] · cos[cos_column[d]] + sign[d] · x[other[d]] · sin[sin_column[d]]; where sign is 0, y[d] = x[d].

    All but `rounds_once` [width], on the device; `sign` is float32, the others int64. `rounds_once`: the sum alone is
    rounded to the dtype of x; otherwise both products are, too.
    """

    other: Tensor
    sign: Tensor
    cos_column: Tensor
    sin_column: Tensor
    rounds_once: bool

    def rotate(self, x: Tensor, table: RotaryTable) -> Tensor:
        """What `Rotate` is; how a kernel computes it."""
        cos, sin = (part[:, None].float() for part in table)
        if not cos.shape[-1]:
            return x
        straight = x.float() * cos[..., self.cos_column]
        crossed = x[..., self.other].float() * self.sign * sin[..., self.sin_column]
        if not self.rounds_once:
            straight, crossed = straight.to(x.dtype).float(), crossed.to(x.dtype).float()
        return torch.where(self.sign == 0, x, (straight + crossed).to(x.dtype))


def pairing(rotate: Rotate, width: int, table: RotaryTable, dtype: torch.dtype) -> Pairing | None:
    """The pairing of a function for vectors of `width` numbers, or None: it rotates in another way.

    Args:
        table: one of the model's own, for its columns, dtype and device.
        dtype: of the vectors.
    """
    if len(table) != 2 or table[0].is_complex() or table[0].shape[-1] != table[1].shape[-1]:
        return None
    found = _read(rotate, width, table[0].shape[-1], table[0].device)
    if found is None:
        return None
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 64, width, generator=draw).to(table[0].device, dtype)
    cos, sin = (torch.randn(1, 64, part.shape[-1], generator=draw).to(part) for part in table)
    rotated = rotate(x, (cos, sin))
    candidates = (Pairing(*found, rounds_once) for rounds_once in (False, True))
    return next((each for each in candidates if torch.equal(each.rotate(x, (cos, sin)), rotated)), None)


def pairings(stack: LayerStack, tables: RotaryTables) -> dict[str | None, Pairing] | None:
    """How layers of each kind are rotated (`RotaryTables`); None: some in another way."""
    parts = stack.geometry.parts
    width = next((part for part in parts if part.rotated), parts[0]).width

    def rotate(x: Tensor, table: RotaryTable) -> Tensor:
        return stack.rotate(x, RotaryTables(tables.positions, dict.fromkeys(tables.of_kind, table)), 0)

    found = {kind: pairing(rotate, width, table, stack.dtype) for kind, table in tables.of_kind.items()}
    known = {kind: each for kind, each in found.items() if each is not None}
    return known if len(known) == len(found) else None


def _read(rotate: Rotate, width: int, columns: int, device: torch.device) -> Read | None:
    """The tensors of a `Pairing`; None if a number of y is not that of x, or of it and one other."""
    basis = torch.eye(width, device=device)[None, None]  # a position for each vector
    zero, one = basis.new_zeros(1, width, columns), basis.new_ones(1, width, columns)
    passed, straight, crossed = (rotate(basis, table)[0, 0] for table in ((zero, zero), (one, zero), (zero, one)))
    crossed = crossed - passed  # [from, to]
    other, sign = crossed.abs().argmax(0), crossed.sum(0)
    is_paired = torch.equal(straight, basis[0, 0]) and torch.equal(crossed, one_hot(other, width).T * sign)
    if not is_paired or not torch.equal(passed, torch.diag(1 - sign.abs())):
        return None
    ones, numbers, none = basis.new_ones(1, 1, 1, width), torch.arange(1.0, columns + 1, device=device), zero[:, :1]
    tables = (numbers[None, None], none), (none, numbers[None, None])
    answers = (rotate(ones, each)[0, 0, 0].abs().long() - 1 for each in tables)
    cos_column, sin_column = (answer.clamp(0, max(0, columns - 1)) for answer in answers)
    return other, sign, cos_column, sin_column
