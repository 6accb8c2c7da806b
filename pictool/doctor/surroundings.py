"""What is installed and found: versions, devices, memory, disk, store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec

import torch

from pictool.doctor.verdict import Verdict, VerdictStatus, guarded
from pictool.needs import missing
from pictool.runtime import device as devices
from pictool.runtime.machine import installed, machine
from pictool.runtime.support import NEEDS
from pictool.store.scratch import nearest_directory
from pictool.store.store import Store

SECTION = "machine"
_LIMIT_S = 300.0  # of an import of vLLM


def examine_surroundings(store: Store, device: str) -> Iterator[Verdict]:
    """Look at the machine; `device` is as `load_model` takes it."""
    yield from guarded(SECTION, "versions", _versions)
    yield from guarded(SECTION, "transformers", _transformers)
    if find_spec("vllm") is not None:
        yield from guarded(SECTION, "vLLM", _vllm)
    yield from guarded(SECTION, "processor", _processor)
    yield from guarded(SECTION, "accelerator", lambda: _accelerator(device))
    yield from guarded(SECTION, "store", lambda: _store(store))
    yield from guarded(SECTION, "disk", lambda: _disk(store))


def _versions() -> Verdict:
    facts = machine()
    named = {name: facts[name] for name in ("python", "torch", "transformers")}
    text = ", ".join(f"{name} {number}" for name, number in named.items())
    return Verdict(
        SECTION,
        "versions",
        VerdictStatus.OK,
        f"pictool {facts['pictool'] or 'from its sources'}, {text}, {facts['system']}",
        facts,
    )


def _transformers() -> Verdict:
    return _needs("transformers", installed("transformers"), NEEDS, missing(NEEDS))


def _vllm() -> Verdict:
    """In a process of its own: vLLM sets up logging and threads where it is imported."""
    command = [sys.executable, "-P", "-m", "pictool.engines.vllm.needs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        return Verdict(SECTION, "vLLM", VerdictStatus.FAILED, f"it cannot be imported: {done.stderr.splitlines()[-1]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return _needs("vLLM", found["version"], found["needs"], found["lacks"])


def _needs(check: str, version: str | None, needs: Collection[str], lacks: Sequence[str]) -> Verdict:
    status = VerdictStatus.FAILED if lacks else VerdictStatus.OK
    text = f"lacks {', '.join(lacks)}" if lacks else f"has all {len(needs)} names that are called"
    return Verdict(SECTION, check, status, f"{version} {text}", {"version": version, "lacks": list(lacks)})


def _processor() -> Verdict:
    facts = machine()
    known = facts["memory_bytes"]
    memory = "" if known is None else f", {_gb(known)} of memory"
    text = f"{facts['cpu']}: {facts['cores']} cores, {facts['threads']} threads, {facts['cpu_capability']}{memory}"
    return Verdict(SECTION, "processor", VerdictStatus.OK, text)


def _accelerator(device: str) -> Verdict:
    devices.resolve_device(device)  # one that was asked for and is not there is a failure
    kind = devices.accelerator()
    if kind is None:
        text = f"none that this torch ({torch.__version__}) supports: everything runs on the CPU"
        return Verdict(SECTION, "accelerator", VerdictStatus.NOTE, text)
    found = []
    for index in range(devices.device_count()):
        name = kind if kind == "mps" else f"{kind}:{index}"
        memory = devices.device_memory(name)
        free = "" if memory is None else f", {_gb(memory[0])} of {_gb(memory[1])} free"
        found.append(f"{name} {devices.device_name(name)}{free}")
    return Verdict(SECTION, "accelerator", VerdictStatus.OK, "; ".join(found), {"devices": found})


def _store(store: Store) -> Verdict:
    if not store.root.exists():
        return Verdict(SECTION, "store", VerdictStatus.NOTE, f"{store.root}: does not exist yet")
    sizes = [entry.num_bytes for entry in store.files().values()]
    values = {"objects": len(sizes), "bytes": sum(sizes)}
    return Verdict(SECTION, "store", VerdictStatus.OK, f"{store.root}: {len(sizes)} objects, {_gb(sum(sizes))}", values)


def _disk(store: Store) -> Verdict:
    directory = nearest_directory(store.root)
    free = shutil.disk_usage(directory).free
    if not os.access(directory, os.W_OK):
        text = f"{directory}: cannot be written; choose another with --store"
        return Verdict(SECTION, "disk", VerdictStatus.FAILED, text)
    return Verdict(SECTION, "disk", VerdictStatus.OK, f"{directory}: {_gb(free)} free", {"free_bytes": free})


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
