"""A CUDA graph's semantics on the CPU: record the ATen operations of a function, replay them at the same addresses.

What a capture forbids is an error here, too: an operation whose result the host must know, one whose shape depends on
data, and one that reads memory which neither stays nor was made in the recording (a number of this link, baked in). So
that a tape of one link gives another link's logits is the proof, on a CPU, that a function can be captured. A tape sees
no synchronisation within an operation, and no kernels of CUDA's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from emulated import tensors_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pictool.runtime.graphs.kernels import Kernels
from pictool.runtime.graphs.stack import GraphedStack
from pictool.runtime.model import Model

_SYNCS = {
    "_local_scalar_dense", "item", "nonzero", "nonzero_numpy", "masked_select", "is_nonzero", "equal", "bincount",
    "unique_dim", "unique_consecutive", "_unique", "_unique2", "allclose", "argwhere", "pin_memory", "_pin_memory",
    "one_hot", "tensor_split", "is_pinned",
}  # fmt: skip
_SYNC_OVERLOADS = {"aten.where.default", "aten.repeat_interleave.Tensor", "aten.repeat_interleave.self_Tensor"}


class NotCapturable(AssertionError):
    """What cannot be in a CUDA graph."""


def storages(values: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(values)}


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records; `replay` runs all again, into the tensors that the recording made.

    Attributes:
        launches: by name, of what launches a kernel. is_mute: of all tapes, that replays do nothing: what is left is
            what the host does.
    """

    is_mute = False

    def __init__(self, static: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known, self._kept = storages(list(static)), list[Any]()
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self.launches = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        self._require_capturable(func, name.removeprefix("aten::"), args, kwargs)
        out = func(*args, **kwargs)
        given = storages((args, kwargs))
        is_fresh = any(tensor.untyped_storage().data_ptr() not in given for tensor in tensors_of(out))
        writes = any(own.alias_info is not None and own.alias_info.is_write for own in func._schema.arguments)
        self._known |= storages(out)
        self._kept.append(out)  # no address is used twice
        if is_fresh or writes:
            self._operations.append((func, args, kwargs, out))
            self.launches[name] += writes or "empty" not in name
        return out

    def _require_capturable(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        by_mask = name.startswith("index") and any(t.dtype in (torch.bool, torch.uint8) for t in tensors_of(args[1:2]))
        is_sized = name == "repeat_interleave" and kwargs.get("output_size") is not None
        if name in _SYNCS or by_mask or (str(func) in _SYNC_OVERLOADS and not is_sized):
            raise NotCapturable(f"{func}: the host would wait for the device")
        for tensor in tensors_of((args, kwargs)):
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in self._known:
                raise NotCapturable(f"{func} reads {tuple(tensor.shape)} {tensor.dtype}: it does not stay")

    def replay(self) -> None:
        if Tape.is_mute:
            return
        with torch.inference_mode():
            for func, args, kwargs, out in self._operations:
                if "empty" in func._schema.name:
                    continue
                again = func(*args, **kwargs)
                for new, old in zip(tensors_of(again), tensors_of(out), strict=True):
                    if new.data_ptr() != old.data_ptr():
                        old.copy_(new)


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is called meanwhile: all operations of ATen, and those that launch a kernel or a copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.launches = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.operations[name] += 1
        is_view = func.is_view or name in ("aten::detach", "aten::alias", "aten::_unsafe_view", "aten::_reshape_alias")
        self.launches[name] += not (is_view or "empty" in name or name == "aten::lift_fresh")
        return func(*args, **(kwargs or {}))


class Tapes:
    """Records tapes of a model's layers.

    Attributes:
        launches: of the functions that were recorded, by the names of their methods. names: of the last one.
    """

    def __init__(self, model: Model) -> None:
        self._module = model.module
        self.graphs: GraphedStack | None = None
        self.launches: dict[str, list[int]] = {}
        self.names: dict[str, Counter[str]] = {}

    def record(self, run: Callable[[], None], pool: str) -> Tape:
        assert self.graphs is not None
        tape = Tape([*tensors_in(self.graphs), *self._weights()])
        with tape:
            run()
        name = getattr(run, "func", run).__name__
        self.launches.setdefault(name, []).append(sum(tape.launches.values()))
        self.names[name] = tape.launches
        return tape

    def _weights(self) -> Iterator[Tensor]:
        yield from self._module.parameters()
        yield from self._module.buffers()
        for module in self._module.modules():  # frequencies of RoPE
            yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors that objects of `pictool.runtime.graphs` hold, and what they hold of tables."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner, seen)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner, seen)
    elif type(value).__name__ in (
        "GraphedStack", "Slab", "Staging", "Numbers", "StaticTables", "RotaryTables", "RowBucket", "Placing",
        "StaticRows",
    ):  # fmt: skip
        yield from tensors_in(vars(value), seen)


@contextmanager
def graphed(model: Model, records: bool = True, kernels: Kernels = Kernels()) -> Iterator[tuple[GraphedStack, Tapes]]:
    """Have the links of a model on the CPU be those of an accelerator: with tapes, or without (lean)."""
    tapes = Tapes(model)
    graphs = GraphedStack(model.stack, tapes if records else None, kernels)
    tapes.graphs = model.stack.graphs = graphs
    try:
        yield graphs, tapes
    finally:
        model.stack.graphs = None
