"""What is installed and found: versions, devices, memory, disk, store, packages of each feature."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

import torch
from packaging.requirements import Requirement

from pictool.doctor.verdict import Verdict, VerdictStatus, guarded
from pictool.engines.vllm.versions import INSTALL, VERSIONS, is_supported
from pictool.runtime import device as devices
from pictool.runtime.machine import machine
from pictool.store.scratch import nearest_directory
from pictool.store.store import Store

SECTION = "machine"
# Extras of the package that users install, and what each is for; those of tests are left out.
_FEATURES = {
    "serve": "pic serve", "tui": "pic tui", "eval": "ROUGE and significance in pic eval",
}  # fmt: skip


def examine_surroundings(store: Store, device: str) -> Iterator[Verdict]:
    """Look at the machine; `device` is as `load_model` takes it."""
    yield from guarded(SECTION, "versions", _versions)
    yield from guarded(SECTION, "processor", _processor)
    yield from guarded(SECTION, "accelerator", lambda: _accelerator(device))
    yield from guarded(SECTION, "store", lambda: _store(store))
    yield from guarded(SECTION, "disk", lambda: _disk(store))
    yield from guarded(SECTION, "packages", _packages)


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
        text = f"none that this torch ({torch.__version__}) uses: all runs on the CPU"
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
        text = f"{directory}: cannot be written; name another with --store"
        return Verdict(SECTION, "disk", VerdictStatus.FAILED, text)
    return Verdict(SECTION, "disk", VerdictStatus.OK, f"{directory}: {_gb(free)} free", {"free_bytes": free})


def _packages() -> Iterator[Verdict]:
    """The packages of each feature: a missing one, or an old one, with what installs it."""
    try:
        known = [Requirement(text) for text in requires("pictool") or ()]
    except PackageNotFoundError:
        text = "pictool runs from its sources; what its extras need is in pyproject.toml"
        yield Verdict(SECTION, "packages", VerdictStatus.NOTE, text)
        return
    lacking = [problem for each in known if _is_of(each, "") and (problem := _problem(each))]
    if lacking:
        text = f"{', '.join(lacking)}; pip install --upgrade pictool"
        yield Verdict(SECTION, "packages", VerdictStatus.FAILED, text, {"missing": lacking})
    else:
        yield Verdict(SECTION, "packages", VerdictStatus.OK, "all that pictool needs is installed")
    for extra, feature in _FEATURES.items():
        lacking = [problem for each in known if _is_of(each, extra) and (problem := _problem(each))]
        status = VerdictStatus.NOTE if lacking else VerdictStatus.OK
        text = f"{', '.join(lacking)}; pip install 'pictool[{extra}]'" if lacking else f"[{extra}] is installed"
        yield Verdict(SECTION, feature, status, text, {"missing": lacking})
    yield _vllm()


def _is_of(requirement: Requirement, extra: str) -> bool:
    """Whether a package is required here for this extra (empty: always), and not without it."""
    marker = requirement.marker
    if marker is None:
        return not extra
    needed = marker.evaluate({"extra": extra})
    return needed and (not extra or not marker.evaluate({"extra": ""}))


def _problem(requirement: Requirement) -> str | None:
    """What is wrong with a package that is required; None if nothing is."""
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(found, prereleases=True):
        return None
    return f"{requirement.name} {found} is installed, {requirement.specifier} is needed"


def _vllm() -> Verdict:
    """vLLM of the version whose classes the connector works with."""
    feature = "vLLM (pic serve --engine vllm)"
    try:
        found = version("vllm")
    except PackageNotFoundError:
        text = f"vllm is not installed; {INSTALL}, in an environment of its own"
        return Verdict(SECTION, feature, VerdictStatus.NOTE, text, {"missing": ["vllm"]})
    if not is_supported(found):
        text = f"vllm {found} is installed; the connector works with {VERSIONS} alone: {INSTALL}"
        return Verdict(SECTION, feature, VerdictStatus.NOTE, text)
    return Verdict(SECTION, feature, VerdictStatus.OK, f"vllm {found} is installed")


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
