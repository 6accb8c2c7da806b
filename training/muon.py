"""Muon: momentum orthogonalised by Newton–Schulz, in fp32 (torch.optim.Muon works in bf16, which CPUs emulate)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def orthogonalise(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Nearest semi-orthogonal matrices to a stack [n, rows, cols], by the quintic iteration of Jordan et al. 2024."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.shape[1] > g.shape[2]
    x: torch.Tensor = g.mT if tall else g
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, for 2-D hidden weights. Matrices of one shape are handled as one stack."""

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            stacks: dict[torch.Size, list[torch.Tensor]] = {}
            for p in group["params"]:
                stacks.setdefault(p.shape, []).append(p)
            for shape, params in stacks.items():
                self._step_stack(group, shape, params)

    def _step_stack(self, group: dict[str, Any], shape: torch.Size, params: list[torch.Tensor]) -> None:
        updates = []
        for p in params:
            assert p.grad is not None
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buffer.lerp_(p.grad, 1 - group["momentum"])
            updates.append(p.grad.lerp(buffer, group["momentum"]))
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        for p, u in zip(params, orthogonalise(torch.stack(updates)), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(u, alpha=-group["lr"] * scale)
