"""Profiles of the loading controller (CacheBlend §5.1): measured once per machine, model and place, then kept.

$XDG_CACHE_HOME/pictool/profiles/<sha256 of "of">.json
{"of": {what it holds for: version, machine, model, …}, "rows": [[number, …], …], "scatter": share, "measured_at": s}

"rows" are the measurements of `measure_compute`; with a tier and a path in "of", of `measure_loads`; with a codec, of
`measure_decoding`. "scatter" is how far repeats were apart: what was measured on a busy machine is measured again soon.
A file that is not of this form is measured again; a cache directory that cannot be written only costs time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.compiler.compile import CODEC
from pictool.controller.cost import ComputeMeasurement, Decoding, PromptSize, Speed
from pictool.controller.measuring import (
    Measured,
    Measurements,
    measure_compute,
    measure_decoding,
    measure_loads,
    token_bytes,
)
from pictool.reading import parse_json, read_file
from pictool.runtime.device import device_name, is_accelerator
from pictool.runtime.machine import cpu_name
from pictool.runtime.memory.user_cache import cache_dir, write_cache_file

if TYPE_CHECKING:
    from pictool.runtime.model import Model

VERSION = 2  # of profiles
_MAX_PROFILE_BYTES = 1 << 20  # of a kept profile: some ten rows
_MAX_MEASURED = 1e18  # bytes, tokens or seconds: a kept number beyond is damaged
MAX_SCATTER = 0.5  # of repeats, beyond which the machine was busy
_BUSY_S = 600.0  # for so long a profile of a busy machine is used
MAX_DISAGREEMENT = 3.0  # factor between what a link takes and what the profile says

OnMeasure = Callable[[str], None]  # called with what is measured next, which takes a while


@dataclass(frozen=True)
class ProfileFacts:
    """When a profile was measured (seconds since 1970), and how evenly."""

    measured_at: float
    scatter: float

    @property
    def is_busy(self) -> bool:
        return self.scatter > MAX_SCATTER


@dataclass(frozen=True)
class LoadProfile:
    """How fast the loader gets objects from one place: from the device itself, and from the page cache."""

    cold: Speed
    warm: Speed


def compute_profile(model: Model, again: bool = False, on_measure: OnMeasure | None = None) -> list[ComputeMeasurement]:
    """Full prefills of several lengths, ascending, and a recompute of scattered rows."""
    rows = _kept(machine(model), 3, 4, lambda: measure_compute(model), "prefill", again, on_measure)
    size = token_bytes(model)
    return [
        ComputeMeasurement(PromptSize(int(context), int(tail), 1, size), int(runs), seconds)
        for context, tail, runs, seconds in rows
    ]


def load_profile(
    model: Model, tier: str, directory: Path, again: bool = False, on_measure: OnMeasure | None = None
) -> LoadProfile:
    """The speed of the tier on which `directory` lies (or its nearest parent, if it does not exist yet).

    Raises:
        StoreError: it has to be measured, and the directory cannot be written.
    """
    place = nearest_directory(directory)
    of = machine(model) | {"tier": tier, "path": str(directory.resolve())}
    rows = _kept(of, 2, 6, lambda: measure_loads(model, place), f"loading from {place}", again, on_measure)
    sizes, objects, *seconds = zip(*rows, strict=True)
    cold, cold_open, warm, warm_open = seconds
    return LoadProfile(Speed.fit(sizes, objects, cold, cold_open), Speed.fit(sizes, objects, warm, warm_open))


def decoding(model: Model, codec: str, again: bool = False, on_measure: OnMeasure | None = None) -> Decoding:
    """What the codec costs, of random KV: real KV is somewhat smaller."""
    if codec == CODEC:
        return Decoding()
    rows = _kept(
        machine(model) | {"codec": codec}, 1, 5, lambda: measure_decoding(model, codec), f"decoding {codec}", again,
        on_measure,
    )  # fmt: skip
    return Decoding.fit(*zip(*rows, strict=True))


def machine(model: Model) -> dict[str, Any]:
    """What measured times hold for, beside the place of the objects."""
    import torch

    device = device_name(model.device) if is_accelerator(model.device) else "cpu"
    return {
        "version": VERSION, "cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "device_name": device, "device": model.device, "model": model.fingerprint, "dtype": model.dtype,
    }  # fmt: skip


def nearest_directory(path: Path) -> Path:
    """The directory itself, or the first of its parents that exists."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())


def _kept(
    of: dict[str, Any],
    num_counts: int,
    width: int,
    measure: Callable[[], Measured],
    what: str,
    again: bool,
    on_measure: OnMeasure | None,
) -> Measurements:
    """The measurements [points, width] of the profile `of`, the counts first: from the cache, or made now."""
    path = _place(of)
    if not again and (rows := _read(path, of, num_counts, width)) is not None:
        return rows
    if on_measure:
        on_measure(what)
    measured = measure()
    if measured.scatter > MAX_SCATTER and on_measure:
        on_measure(f"{what} on a busy machine: repeats were {measured.scatter:.0%} apart; it is measured again soon")
    kept = {"of": of, "rows": measured.rows, "scatter": measured.scatter, "measured_at": time.time()}
    write_cache_file(path, json.dumps(kept, indent=1).encode())
    return measured.rows


def _place(of: dict[str, Any]) -> Path:
    return cache_dir() / "profiles" / f"{hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()}.json"


def compute_facts(model: Model) -> ProfileFacts | None:
    """When, and how evenly, the profile of this model's computing was measured; None if none is kept."""
    try:
        return _facts(parse_json(read_file(_place(machine(model)), _MAX_PROFILE_BYTES)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _facts(data: Any) -> ProfileFacts:
    facts = ProfileFacts(float(data["measured_at"]), float(data["scatter"]))
    if not (math.isfinite(facts.measured_at) and math.isfinite(facts.scatter)):
        raise ValueError(facts)
    return facts


def forget_compute(model: Model) -> None:
    """Have the computing of this model measured again when it is next needed."""
    with suppress(OSError):
        _place(machine(model)).unlink()


def _read(path: Path, of: dict[str, Any], num_counts: int, width: int) -> Measurements | None:
    """The measurements of a cached profile; None if there is none, it is damaged or old, or of a busy machine."""
    try:
        data = parse_json(read_file(path, _MAX_PROFILE_BYTES))
        rows = [[float(value) for value in row] for row in data["rows"]]
        is_ours, facts = data["of"] == of, _facts(data)
        if facts.is_busy and abs(time.time() - facts.measured_at) > _BUSY_S:
            return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    is_sound = all(
        len(row) == width and all(0 < value < _MAX_MEASURED for value in row) and min(row[:num_counts]) >= 1
        for row in rows
    )
    return rows if rows and is_ours and is_sound else None
