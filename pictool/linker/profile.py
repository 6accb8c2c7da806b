"""What the loading controller estimates from: measured once per machine, and kept (CacheBlend §5.1).

$XDG_CACHE_HOME/pictool/profiles/<sha256 of "of">.json
{"of": {what it holds for: version, machine, model, …}, "rows": [[number, …], …]}

The rows are those of `measure_compute`; with a tier and a path in "of", of `measure_loads`; with a codec, of
`measure_decoding`. A file that is not of
this form is measured again; a cache directory that cannot be written only costs time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pictool.compiler.compile import CODEC, head_codec
from pictool.core import Chunk
from pictool.errors import InputError, ObjectError, StoreError
from pictool.linker.controller import STORE_TIER, RatioChoice, choose_ratio
from pictool.linker.estimate import Computed, Decoding, Estimator, PromptSize, Speed, layer_work
from pictool.linker.measure import Rows, measure_compute, measure_decoding, measure_loads, stored_bytes, token_bytes
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.resolve import Document, Part, resolve_documents
from pictool.runtime.fingerprint import cache_dir
from pictool.runtime.machine import cpu_name
from pictool.store.store import Store, atomic_write

if TYPE_CHECKING:
    from pictool.runtime.model import Model

VERSION = 1

OnMeasure = Callable[[str], None]  # is told what will be measured now, which takes a while


@dataclass(frozen=True)
class LoadProfile:
    """How fast the loader gets objects from one place: from the device itself, and from the page cache."""

    cold: Speed
    warm: Speed


def compute_profile(model: Model, again: bool = False, on_measure: OnMeasure | None = None) -> list[Computed]:
    """Full prefills of several lengths, ascending, and a recompute of scattered rows."""
    rows = _kept(machine(model), 4, lambda: measure_compute(model), "prefill", again, on_measure)
    size = token_bytes(model)
    return [
        Computed(PromptSize(int(context), int(tail), 1, size), int(runs), seconds)
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
    rows = _kept(of, 6, lambda: measure_loads(model, place), f"loading from {place}", again, on_measure)
    sizes, objects, *seconds = zip(*rows, strict=True)
    cold, cold_open, warm, warm_open = seconds
    return LoadProfile(Speed.fit(sizes, objects, cold, cold_open), Speed.fit(sizes, objects, warm, warm_open))


def decoding(model: Model, codec: str, again: bool = False, on_measure: OnMeasure | None = None) -> Decoding:
    """What the codec costs, of random KV: real KV is somewhat smaller."""
    if codec == CODEC:
        return Decoding()
    rows = _kept(
        machine(model) | {"codec": codec}, 5, lambda: measure_decoding(model, codec), f"decoding {codec}", again,
        on_measure,
    )  # fmt: skip
    return Decoding.fit(*zip(*rows, strict=True))


def machine(model: Model) -> dict[str, Any]:
    """What measured times hold for, beside the place of the objects."""
    device = torch.cuda.get_device_name(model.device) if model.device.startswith("cuda") else "cpu"
    return {
        "version": VERSION, "cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "device_name": device, "device": model.device, "model": model.fingerprint, "dtype": model.dtype,
    }  # fmt: skip


def nearest_directory(path: Path) -> Path:
    """The directory itself, or the first of its parents that exists."""
    return next(one for one in (path, *path.absolute().parents) if one.is_dir())


def _kept(
    of: dict[str, Any], width: int, measure: Callable[[], Rows], what: str, again: bool, on_measure: OnMeasure | None
) -> Rows:
    """The rows [points, width] of the profile `of`: as kept, or else measured."""
    path = cache_dir() / "profiles" / f"{hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()}.json"
    if not again and (rows := _read(path, of, width)) is not None:
        return rows
    if on_measure:
        on_measure(what)
    rows = measure()
    with suppress(StoreError), atomic_write(path) as file:
        file.write(json.dumps({"of": of, "rows": rows}, indent=1).encode())
    return rows


def _read(path: Path, of: dict[str, Any], width: int) -> Rows | None:
    """The rows of a kept profile; None if there is none, or it is damaged or old."""
    try:
        data = json.loads(path.read_bytes())
        rows = [[float(value) for value in row] for row in data["rows"]]
        is_ours = data["of"] == of
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    is_sound = all(len(row) == width and all(math.isfinite(value) and value > 0 for value in row) for row in rows)
    return rows if rows and is_ours and is_sound else None


def make_estimator(model: Model, policy: Policy, measured: Sequence[Computed]) -> Estimator:
    """The delays of a policy, from what was measured of the model."""
    layers = model.geometry.layers
    return Estimator.fit(measured, layer_work(layers, policy.check_layers(layers), projection_share(model)))


def projection_share(model: Model) -> float:
    """The share of a layer's weights that project to Q, K and V: a checked layer runs these for all rows."""
    config, geometry = model.config, model.geometry
    query, kv = config.num_attention_heads * geometry.head_dim, 2 * geometry.kv_heads * geometry.head_dim
    projections = query + kv
    return float(projections / (projections + query + 3 * config.intermediate_size))


def measure_size(
    model: Model, store: Store, documents: Sequence[Document], tail: str, policy: Policy, *, head: str = "",
    sinks: int | None = None, chunk_tokens: int | None = None, codec: str = CODEC, again: bool = False,
    on_measure: OnMeasure | None = None,
) -> PromptSize:  # fmt: skip
    """The size of a prompt; nothing is compiled. Objects that are there have the bytes that they have.

    Raises:
        PicError: an unusable document, or a prompt that is too long for the model.
    """
    parts = resolve_documents(model, store, documents, policy.sinks if sinks is None else sinks, chunk_tokens, codec)
    if head_ids := model.encode(head):
        parts.append(Part(Chunk(head, head_ids, "head"), None, 0, head_codec(codec)))
    size = PromptSize(sum(len(one.chunk) for one in parts), len(model.encode(tail)), len(parts), token_bytes(model))
    require_room(model, size)
    if all(part.codec == CODEC for part in parts):
        return size
    costs = {name: decoding(model, name, again, on_measure) for name in sorted({part.codec for part in parts})}
    kv = [len(part.chunk) * size.token_bytes for part in parts]
    stored = [_stored_bytes(model, store, part) or round(costs[part.codec].stored * n)
              for part, n in zip(parts, kv, strict=True)]  # fmt: skip
    decode_s = sum(costs[part.codec].seconds(n, 1) for part, n in zip(parts, kv, strict=True))
    return replace(size, coded_bytes=sum(stored), decode_s=decode_s)


def _stored_bytes(model: Model, store: Store, part: Part) -> int | None:
    """Bytes that a part's KV takes in its object; None if it is still to be compiled."""
    with suppress(ObjectError):
        return stored_bytes(part.path or store.path(part.key(model)))
    return None


def coded_size(size: PromptSize, cost: Decoding) -> PromptSize:
    """A prompt whose objects are all kept in one codec, of which none has to be there."""
    return replace(
        size, coded_bytes=round(cost.stored * size.num_bytes), decode_s=cost.seconds(size.num_bytes, size.objects)
    )


def require_room(model: Model, size: PromptSize) -> None:
    """Refuse what no link would take.

    Raises:
        InputError: more tokens than the model has positions.
    """
    if size.num_tokens > model.max_positions:
        raise InputError(
            f"{size.context} tokens of context and {size.tail} of the query, but {model.name} takes "
            f"{model.max_positions} positions; use fewer or shorter documents"
        )


def with_ratio(policy: Policy, ratio: float) -> Policy:
    """The same policy with another ratio.

    Raises:
        InputError: it has none, or the ratio is no share.
    """
    return make_policy(policy.name, {**policy.params, "ratio": ratio})


def auto_ratio(
    model: Model, store: Store, documents: Sequence[Document], tail: str, policy: Policy, *, head: str = "",
    sinks: int | None = None, chunk_tokens: int | None = None, codec: str = CODEC,
    on_measure: OnMeasure | None = None,
) -> RatioChoice:  # fmt: skip
    """The ratio for a prompt whose objects are read from where the store lives (CacheBlend §5.1).

    Args:
        policy: with any ratio; by the layers that it checks.
        on_measure: called before something is measured, which happens once per machine, model and place.

    Raises:
        PicError: an unusable document, or a store whose directory cannot be measured.
    """
    size = measure_size(
        model, store, documents, tail, policy, head=head, sinks=sinks, chunk_tokens=chunk_tokens, codec=codec,
        on_measure=on_measure,
    )  # fmt: skip
    estimator = make_estimator(model, policy, compute_profile(model, on_measure=on_measure))
    speed = load_profile(model, STORE_TIER, store.root, on_measure=on_measure).cold
    return choose_ratio(estimator, size, speed)
