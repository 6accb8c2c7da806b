"""What the ranks of tensor parallelism tell each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from pictool.engines.vllm.kv import Heads


def rank_and_size() -> tuple[int, int]:
    """This rank of tensor parallelism, and how many there are."""
    group = get_tp_group()
    return group.rank_in_group, group.world_size


def agree(problems: Sequence[str | None]) -> list[str | None]:
    """The problems of all ranks: what failed on one has failed, so that all compute the same rows."""
    group = get_tp_group()
    if group.world_size == 1 or not problems:
        return list(problems)
    told: list[list[str | None]] = [[] for _ in range(group.world_size)]
    torch.distributed.all_gather_object(told, list(problems), group=group.cpu_group)
    return [next((one for one in each if one is not None), None) for each in zip(*told, strict=True)]


def sum_over_heads(of_rank: Tensor, heads: Heads) -> Tensor:
    """A sum over this rank's KV heads becomes one over all of them, each counted once."""
    group = get_tp_group()
    if group.world_size == 1:
        return of_rank
    total: Tensor = group.all_reduce(of_rank.contiguous())
    return total / heads.copies


def all_heads(of_rank: Tensor, heads: Heads) -> Tensor:
    """[tokens, kv_heads, head_dim] of all ranks, every head once."""
    group = get_tp_group()
    if group.world_size == 1:
        return of_rank
    joined: Tensor = group.all_gather(of_rank.contiguous(), dim=1)
    width = heads.last - heads.first
    each = joined.view(len(joined), group.world_size, width, -1)[:, :: heads.copies]
    return each.flatten(1, 2)
