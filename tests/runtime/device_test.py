"""Devices by name: what is there, what is not, and that each kind is asked through the right part of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pictool.errors import InputError
from pictool.runtime import device as devices
from pictool.runtime.device import device_problem, has_streams, resolve_device, resolve_dtype


@pytest.fixture(params=["cuda", "xpu", "mps"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with two accelerators of one kind."""
    name: str = request.param
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device(name))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    return name


def test_auto_is_the_accelerator_that_is_there(kind: str) -> None:
    assert resolve_device("auto") == kind == resolve_device(kind)
    assert resolve_device("cpu") == "cpu"
    other = "xpu" if kind != "xpu" else "cuda"
    with pytest.raises(InputError, match=f"^device '{other}': .* {kind}"):
        resolve_device(other)


def test_auto_is_the_cpu_where_there_is_none_or_an_unknown_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (None, torch.device("hpu")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda found=found, **_: found)
        assert resolve_device("auto") == "cpu"
        with pytest.raises(InputError, match="--device cpu"):
            resolve_device("cuda")


def test_an_index_must_exist(kind: str) -> None:
    if kind == "mps":
        assert device_problem("mps:0")
        return
    assert resolve_device(f"{kind}:1") == f"{kind}:1"
    with pytest.raises(InputError, match=f" 2 {kind} "):
        resolve_device(f"{kind}:2")


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:x", "cpu:0", "xpu:-1", ""])
def test_what_is_no_device(name: str) -> None:
    assert device_problem(name) == "must be one of auto, cpu, cuda, xpu, mps"


def test_apples_memory_is_the_hosts() -> None:
    assert has_streams("cuda:1") and has_streams(torch.device("xpu"))
    assert not has_streams("mps") and not has_streams("cpu")
    assert devices.device_memory("mps") is None


def test_a_device_is_waited_for_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    for name in ("cpu", "cuda:1", "mps", "xpu"):
        devices.synchronize(name)
    assert waited == [torch.device("cuda:1"), "mps", torch.device("xpu")]


def test_auto_dtype_is_the_checkpoints_on_any_accelerator() -> None:
    class Config:
        dtype = torch.bfloat16

    assert resolve_dtype("auto", "cpu", Config()) == "float32"  # type: ignore[arg-type]
    for name in ("cuda:0", "xpu", "mps"):
        assert resolve_dtype("auto", name, Config()) == "bfloat16"  # type: ignore[arg-type]
