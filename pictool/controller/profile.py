"""The speeds of this machine for a model, measured once and then kept; and the ratio that follows (CacheBlend §5.1).

$XDG_CACHE_HOME/pictool/profiles/<sha256 of "of">.json
{"of": {what it holds for: version, machine, model, …}, "rows": [[number, …], …]}

"rows" are the measurements of `measure_compute`; with a path and a codec in "of", those of `measure_loads`. A file that
is not of this form is measured again; a cache directory that cannot be written only costs time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.controller.cost import Estimator, PromptSize, RatioChoice, Speed, fit_nonnegative
from pictool.controller.measuring import Measurements, measure_compute, measure_loads, token_bytes
from pictool.errors import InputError
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.resolve import lay_out_spec
from pictool.linker.spec import Spec
from pictool.reading import parse_json, read_file
from pictool.runtime.device import device_name, is_accelerator
from pictool.runtime.machine import cpu_name
from pictool.runtime.memory.user_cache import cache_dir, write_cache_file
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

VERSION = 3  # of profiles
_MAX_PROFILE_BYTES = 1 << 20  # of a kept profile: some ten rows
_MAX_MEASURED = 1e18  # bytes, tokens or seconds: a kept number beyond is damaged
MAX_DISAGREEMENT = 3.0  # factor between what a link takes and what the profile says

OnMeasure = Callable[[str], None]  # called with what is measured next, which takes a while


@dataclass(frozen=True)
class LoadProfile:
    """How fast the loader gets objects of a codec: from the store's device, and from the page cache.

    `stored`: bytes in a file per byte of KV.
    """

    device: Speed
    cached: Speed
    stored: float

    def at(self, bytes_s: float) -> Speed:
        """From a device that reads so many bytes a second; what the loader does with them comes on top."""
        return Speed(self.cached.byte_s + self.stored / bytes_s, self.cached.object_s)


def make_estimator(
    model: Model, policy: Policy, again: bool = False, on_measure: OnMeasure | None = None
) -> Estimator:  # fmt: skip
    """The delays of a policy: layers before the first one that it checks are computed whole."""
    rows = _kept(_machine(model), 4, lambda: measure_compute(model), "prefill", again, on_measure)
    layers = model.geometry.layers
    return Estimator.fit(rows, min(policy.check_layers(layers), default=0) / layers)


def load_profile(
    model: Model, store: Store, codec: str, again: bool = False, on_measure: OnMeasure | None = None
) -> LoadProfile:
    """The speed of the place where a store is, or will be.

    Raises:
        StoreError: it has to be measured, and the directory cannot be written.
    """
    of = _machine(model) | {"path": str(store.root.resolve()), "codec": codec}
    rows = _kept(
        of, 5, lambda: measure_loads(model, store.root, codec), f"loading from {store.root}", again, on_measure
    )
    sizes, objects, stored, cold, warm = zip(*rows, strict=True)
    device, cached = (Speed(*fit_nonnegative([sizes, objects], seconds)) for seconds in (cold, warm))
    return LoadProfile(device, cached, sum(stored) / sum(sizes))


def forget_compute(model: Model) -> None:
    """Have the computing of this model measured again when it is next needed."""
    with suppress(OSError):
        _place(_machine(model)).unlink()


def auto_ratio(model: Model, store: Store, spec: Spec, on_measure: OnMeasure | None = None) -> RatioChoice:
    """The ratio for a prompt whose objects are read from where the store lives.

    Args:
        spec: its policy with any ratio. on_measure: called before something is measured.

    Raises:
        PicError: an unusable document, or a store whose directory cannot be measured.
    """
    size = measure_size(model, store, spec)
    estimator = make_estimator(model, spec.policy, on_measure=on_measure)
    return estimator.choose_ratio(size, load_profile(model, store, spec.codec, on_measure=on_measure).device)


def with_ratio(policy: Policy, ratio: float) -> Policy:
    """The same policy with another share of rows.

    Raises:
        InputError: none of its fields is that, or the ratio is no share.
    """
    knob = policy.knob
    field = knob.field if knob is not None and knob.is_share else "ratio"
    return make_policy(policy.name, policy.params | {field: ratio})


def measure_size(model: Model, store: Store, spec: Spec) -> PromptSize:
    """The size of a prompt; nothing is compiled.

    Raises:
        PicError: an unusable document, or a prompt that is too long for the model.
    """
    with ExitStack() as opened:
        prompt = lay_out_spec(model, store, spec, opened)
        num_context = prompt.layout.num_context
        num_tail = prompt.layout.num_tokens - num_context
        return PromptSize(num_context, num_tail, len(prompt.objects), token_bytes(model))


def require_room(model: Model, size: PromptSize) -> PromptSize:
    """Refuse what no link would take. Raises InputError: more tokens than the model has positions."""
    if size.context + size.tail > model.max_positions:
        raise InputError(
            f"{size.context} tokens of context and {size.tail} of the query, but {model.name} takes "
            f"{model.max_positions} positions; use fewer or shorter documents"
        )
    return size


def _machine(model: Model) -> dict[str, Any]:
    """What measured times hold for, beside the place of the objects."""
    import torch

    device = device_name(model.device) if is_accelerator(model.device) else "cpu"
    return {
        "version": VERSION, "cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "device_name": device, "device": model.device, "model": model.fingerprint, "dtype": model.dtype,
    }  # fmt: skip


def _kept(
    of: dict[str, Any], width: int, measure: Callable[[], Measurements], what: str, again: bool,
    on_measure: OnMeasure | None,
) -> Measurements:  # fmt: skip
    """The measurements [points, width] of the profile `of`: from the cache, or made now."""
    if not again and (rows := _read(of, width)) is not None:
        return rows
    if on_measure:
        on_measure(what)
    rows = measure()
    write_cache_file(_place(of), json.dumps({"of": of, "rows": rows}, indent=1).encode())
    return rows


def _place(of: dict[str, Any]) -> Path:
    return cache_dir() / "profiles" / f"{hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()}.json"


def _read(of: dict[str, Any], width: int) -> Measurements | None:
    """The measurements of a kept profile; None if there is none, or it is damaged."""
    try:
        data = parse_json(read_file(_place(of), _MAX_PROFILE_BYTES))
        rows = [[float(value) for value in row] for row in data["rows"]]
        is_ours = data["of"] == of
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    is_sound = all(len(row) == width and all(0 < value < _MAX_MEASURED for value in row) for row in rows)
    return rows if len(rows) > 1 and is_ours and is_sound else None
