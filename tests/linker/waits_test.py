"""Between a link's first layer and its logits the host does not wait for the device, but for what the loader reads.

A CPU has no such waits: what would be one is an operation whose result the host needs, or a copy to the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest
import torch
from subjects import HEAD, LENGTHS, TAIL, make_chunks, subject
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pictool.linker.attended import _Pass
from pictool.linker.fusor import Fusor
from pictool.linker.link import link
from pictool.linker.policies import make_policy
from pictool.linker.spec import Spec
from pictool.runtime.rows import DeviceRows
from pictool.store.store import Store

WAITS = {
    "_local_scalar_dense", "item", "nonzero", "nonzero_numpy", "masked_select", "is_nonzero", "equal", "bincount",
    "unique_dim", "unique_consecutive", "_unique", "_unique2", "allclose", "argwhere", "one_hot", "tensor_split",
}  # fmt: skip


class Waits(TorchDispatchMode):
    """Counts what makes a host wait for its device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name.startswith("index") and any(
            isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
            for each in tree_leaves(args[1:2])
        )
        self.counts[name] += name in WAITS or by_mask
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What was waited for in the layers of links; `runs` of rows that only the device knows are counted as such."""
    mode, bounds = Waits(), DeviceRows.__dict__["bounds"].func
    is_within = [False]

    def counting(name: str) -> None:
        real: Callable[..., Any] = getattr(torch.Tensor, name)

        def run(*args: Any, **named: Any) -> Any:
            mode.counts[name] += is_within[0]
            return real(*args, **named)

        monkeypatch.setattr(torch.Tensor, name, run)

    def within(run: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any) -> Any:
            is_within[0] = True
            with mode:
                found = run(*args)
            is_within[0] = False
            return found

        return waiting

    def of_runs(rows: DeviceRows) -> Any:
        mode.counts["runs"] += 1
        before, is_within[0] = is_within[0], False
        found = bounds(rows)
        is_within[0] = before
        return found

    for name in ("cpu", "tolist"):  # a tensor of a device has no `numpy`
        counting(name)
    for owner, method in ((Fusor, "prefill_layer"), (_Pass, "compute")):
        monkeypatch.setattr(owner, method, within(getattr(owner, method)))
    runs = cached_property(of_runs)
    runs.__set_name__(DeviceRows, "bounds")
    monkeypatch.setattr(DeviceRows, "bounds", runs)
    return mode.counts


@pytest.mark.parametrize("separator", ["", "\n\n"])
@pytest.mark.parametrize("policy", ["full", "naive", "legolink", "cacheblend", "prophet"])
def test_the_host_waits_for_no_layer(policy: str, separator: str, store: Store, waits: Counter[str]) -> None:
    """Attention by runs asks once a checked layer where rows go on; an image in static tensors does not."""
    chosen, chunks = make_policy(policy), make_chunks(LENGTHS)
    spec = Spec(TAIL, chunks, chosen, HEAD, separator=separator, after="none")
    linked = link(subject("llama").model, store, spec)
    assert waits.pop("runs", 0) <= len(chosen.check_layers(linked.image.stack.num_layers))
    assert not +waits
    if policy == "cacheblend":
        assert 0 < linked.rows[2].sum() < linked.rows[1].sum()
