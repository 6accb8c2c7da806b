"""What a request asks of the connector: `kv_transfer_params["pic"]`, parsed and checked.

{"pic": {"chunks": [{"key": K, "start": 12}, …], "policy": "legolink-16"}}   objects, and where each one starts
{"pic": {"keys": [K, …], "policy": {"algo": "legolink", "k": 16}}}           objects to locate in the prompt, in order
{"pic": {"recognise": true}}                                                 all stored chunks that are in the prompt
{"pic": {"compile": {"text": "…", "sinks": 4}}}                              write the prompt's KV to the store
{"pic": false}                                                               nothing: an ordinary request
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pictool.errors import InputError
from pictool.linker.grid import parse_grid
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy

FIELD = "pic"
MAX_OBJECTS = 1024  # that a request may name: each is opened before the request is scheduled
_WAYS = ("chunks", "keys", "recognise", "compile")


@dataclass(frozen=True)
class ObjectRef:
    """An object that a request names. `start` is its first token in the prompt; None: to be located."""

    key: str
    start: int | None


@dataclass(frozen=True)
class LinkRequest:
    """A request to link the prompt. `objects` is None if the chunks in it are to be recognised."""

    policy: Policy
    objects: tuple[ObjectRef, ...] | None


@dataclass(frozen=True)
class CompileRequest:
    """A request to compile the prompt: `sinks` dummy tokens, the tokens of `text`, and one token of padding."""

    policy: Policy
    text: str
    sinks: int


def parse_request(
    params: Mapping[str, Any] | None, policy: Policy, recognise: bool
) -> LinkRequest | CompileRequest | None:
    """Parse a request's `kv_transfer_params`; None for an ordinary request.

    Args:
        policy: the policy of requests that name none.
        recognise: whether the server recognises chunks in requests that have no field `pic`.

    Raises:
        InputError: names the field that cannot be used.
    """
    if params is not None and not isinstance(params, Mapping):
        raise InputError("kv_transfer_params: must be an object")
    fields = None if params is None else params.get(FIELD)
    if fields is None:
        return LinkRequest(policy, None) if recognise else None
    if fields is False:
        return None
    if not isinstance(fields, Mapping):
        raise InputError(f"kv_transfer_params: {FIELD} must be an object with chunks, keys or recognise, or false")
    if unknown := sorted(set(fields) - {*_WAYS, "policy"}):
        raise InputError(f"kv_transfer_params: {FIELD} has no field {unknown[0]!r}; it has {', '.join(_WAYS)}, policy")
    ways = [way for way in _WAYS if way in fields]
    if len(ways) != 1:
        raise InputError(f"kv_transfer_params: {FIELD} needs one of {', '.join(_WAYS)}, not {len(ways)}")
    return _parse_way(ways[0], fields[ways[0]], parse_policy(fields["policy"]) if "policy" in fields else policy)


def parse_policy(value: object) -> Policy:
    """Parse a policy: a specification (`legolink-16`), or an object with `algo` and the policy's fields.

    Raises:
        InputError: no such policy, a grid of several, or a field that does not fit.
    """
    if isinstance(value, Mapping) and isinstance(value.get("algo"), str):
        fields = {name: field for name, field in value.items() if name != "algo"}
        return _require_linking(make_policy(value["algo"], fields))
    if not isinstance(value, str):
        raise InputError("policy: must be a specification as legolink-16, or an object with algo and its fields")
    grid = parse_grid([value])
    if len(grid) != 1:
        raise InputError(f"policy {value!r}: names {len(grid)} policies; a request takes one")
    return _require_linking(grid[0].policy)


def _require_linking(policy: Policy) -> Policy:
    if policy.needs.chain_block:
        raise InputError(f"policy {policy.name!r}: vLLM has a prefix cache of its own, for requests that link nothing")
    return policy


def _parse_way(way: str, value: object, policy: Policy) -> LinkRequest | CompileRequest | None:
    if way == "recognise":
        if not isinstance(value, bool):
            raise InputError(f"kv_transfer_params: recognise={value!r} must be true or false")
        return LinkRequest(policy, None) if value else None
    if way == "compile":
        return _parse_compile(value, policy)
    if not isinstance(value, list) or not 0 < len(value) <= MAX_OBJECTS:
        raise InputError(f"kv_transfer_params: {way} must be a list of at least one object, and at most {MAX_OBJECTS}")
    return LinkRequest(policy, tuple(_parse_object(way, entry) for entry in value))


def _parse_compile(value: object, policy: Policy) -> CompileRequest:
    if not isinstance(value, Mapping) or set(value) != {"text", "sinks"}:
        raise InputError("kv_transfer_params: compile must be an object with text and sinks")
    if not isinstance(value["text"], str) or not _is_count(value["sinks"]):
        raise InputError("kv_transfer_params: compile takes a text, and sinks of 0 or more")
    return CompileRequest(policy, value["text"], value["sinks"])


def _parse_object(way: str, value: object) -> ObjectRef:
    if way == "keys":
        value = {"key": value, "start": None}
    elif not isinstance(value, Mapping) or set(value) != {"key", "start"} or not _is_count(value["start"]):
        raise InputError("kv_transfer_params: each of chunks must be an object with key, and start of 0 or more")
    assert isinstance(value, Mapping)
    if not isinstance(value["key"], str):
        raise InputError(f"kv_transfer_params: {value['key']!r} is no object key")
    return ObjectRef(value["key"], value["start"])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
