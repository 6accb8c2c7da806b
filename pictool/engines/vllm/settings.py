"""`kv_connector_extra_config`: what the connector is told at start-up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pictool.engines.vllm.wanted import parse_policy
from pictool.errors import InputError
from pictool.linker.policies.base import Policy


@dataclass(frozen=True)
class Settings:
    """Fields of `kv_connector_extra_config`.

    store: directory of the objects. policy: what requests get that name none. recognise: look for stored chunks in
    requests that say nothing. min_tokens: of a chunk that is recognised. refresh_s: how often the store is looked
    through for new objects. compile: let requests write objects. device: where a speculative model runs. any_model: let
    requests name the model that a policy reads prompts with; else only the one of `policy` is loaded.
    """

    store: str
    policy: Policy
    recognise: bool
    min_tokens: int
    refresh_s: float
    compile: bool
    device: str
    any_model: bool


_DEFAULTS: dict[str, Any] = {
    "store": None, "policy": "legolink-16", "recognise": False, "min_tokens": 16, "refresh_s": 10.0, "compile": False,
    "device": "cpu", "any_model": False,
}  # fmt: skip
_KINDS: dict[str, type | tuple[type, ...]] = {
    "store": str, "recognise": bool, "min_tokens": int, "refresh_s": (int, float), "compile": bool, "device": str,
    "any_model": bool,
}  # fmt: skip


def parse_settings(extra: Mapping[str, Any]) -> Settings:
    """The settings of a server.

    Raises:
        InputError: no store, an unknown field, or a value that does not fit.
    """
    if unknown := sorted(set(extra) - set(_DEFAULTS)):
        raise InputError(
            f"kv_connector_extra_config has no field {unknown[0]!r}; its fields are {', '.join(_DEFAULTS)}"
        )
    values = {**_DEFAULTS, **extra}
    if values["store"] is None:
        raise InputError('kv_connector_extra_config: "store" must name the directory of the objects')
    for field, kind in _KINDS.items():
        if not isinstance(values[field], kind) or (isinstance(values[field], bool) and kind is not bool):
            raise InputError(f"kv_connector_extra_config: {field}={values[field]!r} is not what {field} takes")
    if values["min_tokens"] < 1 or values["refresh_s"] <= 0:
        raise InputError("kv_connector_extra_config: min_tokens must be 1 or more, refresh_s above 0")
    return Settings(**{**values, "policy": parse_policy(values["policy"])})
