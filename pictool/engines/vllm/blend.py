"""Policies that narrow on the way (CacheBlend): layer by layer, over all such prompts of a step at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pictool.engines.vllm.host import Host, Layer
from pictool.engines.vllm.kv import Loaded
from pictool.engines.vllm.passes import Hidden, Passes, Sequences
from pictool.engines.vllm.ranks import sum_over_heads
from pictool.engines.vllm.rows import Ints, RowSet
from pictool.linker.narrowing import Narrowing
from pictool.linker.policies.base import Prompt, Scores
from pictool.runtime.model import Model


class Blend:
    """The way of some prompts through the layers; their objects stand in the blocks already."""

    def __init__(self, host: Host, model: Model, loaded: Sequence[Loaded]) -> None:
        self._host, self._loaded = host, loaded
        plans = [one.job.plan for one in loaded]
        self._passes = Passes(
            host, Sequences([plan.layout.tokens for plan in plans], [one.job.blocks for one in loaded])
        )
        self._checked = [plan.policy.check_layers(len(host.layers)) for plan in plans]
        self._narrowings = []
        for plan in plans:
            prompt = Prompt(model, plan.layout, ())
            self._narrowings.append(Narrowing(prompt, plan.policy, plan.policy.select(prompt), plan.required))

    def run(self) -> list[float]:
        """Compute the rows; returns the mean number of them per layer, for each prompt."""
        rows, counts = self._rows(), []
        hidden = self._passes.embed(rows)
        for index, layer in enumerate(self._host.layers):
            counts.append([int(one.on.sum()) for one in self._narrowings])
            if any(index in checked for checked in self._checked):
                stay = self._narrow(index, layer, rows, hidden)
                hidden = hidden[0][stay], None if hidden[1] is None else hidden[1][stay]
                rows = self._rows()
            if not len(rows):
                counts += [[0] * len(self._loaded)] * (len(self._host.layers) - len(counts))
                break
            hidden = self._passes.layer(layer, rows, hidden)
        return [float(mean) for mean in np.mean(counts, axis=0)]

    def _rows(self) -> RowSet:
        return RowSet.of([one.on for one in self._narrowings])

    def _narrow(self, index: int, layer: Layer, rows: RowSet, hidden: Hidden) -> Tensor:
        """Compare, keep all fresh K and V, and say which of the rows stay on."""
        key, value = self._passes.project(layer, rows, hidden)
        stay = []
        for owner, one in enumerate(self._loaded):
            mine = np.flatnonzero(rows.owner == owner)
            at = torch.from_numpy(mine).to(key.device)
            slots = self._host.slots(one.job.blocks, torch.from_numpy(rows.position[mine]))
            self._host.write(layer, key[at], value[at], slots)
            if index in self._checked[owner]:
                apart = self._apart(index, layer, one, rows.position[mine], key[at], value[at])
                mine = mine[self._narrowings[owner].narrow(index, *apart)]
            stay.append(mine)
        return torch.from_numpy(np.concatenate(stay)).to(key.device)

    def _apart(
        self, index: int, layer: Layer, one: Loaded, positions: Ints, key: Tensor, value: Tensor
    ) -> tuple[Scores, Scores]:
        """Squared L2 between fresh and cached K and V over all heads, float32 [rows]; 0 where nothing is cached."""
        held_key, held_value = (part.to(self._host.device) for part in one.held[index])
        held_key = self._host.rotate(layer, held_key, torch.from_numpy(one.positions).to(self._host.device))
        place = np.full(one.job.plan.reach, -1)
        place[one.positions] = np.arange(len(one.positions))
        at = place[positions]
        has = torch.from_numpy(np.flatnonzero(at >= 0)).to(key.device)
        of = torch.from_numpy(at[at >= 0]).to(key.device)
        apart = torch.zeros(2, len(key), device=key.device)
        for i, (fresh, held) in enumerate(((key, held_key), (value, held_value))):
            apart[i, has] = (fresh[has].float() - held[of].float()).square().sum((1, 2))
        whole = sum_over_heads(apart, self._host.heads).cpu().numpy()
        return whole[0], whole[1]
