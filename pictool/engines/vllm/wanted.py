"""What a request asks for: `kv_transfer_params["pic"]`, parsed.

{"pic": {"chunks": [{"key": K, "start": 12}, …], "policy": "legolink-16"}}   where every object stands
{"pic": {"keys": [K, …], "policy": {"algo": "legolink", "k": 16}}}           found in the prompt, in this order
{"pic": {"recognise": true}}                                                 whatever the store knows
{"pic": false}                                                               nothing: exact
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
_WAYS = ("chunks", "keys", "recognise", "compile")


@dataclass(frozen=True)
class Place:
    """An object in a prompt; `start` is None if it is to be found."""

    key: str
    start: int | None


@dataclass(frozen=True)
class Compile:
    """The prompt behind `sinks` dummy tokens, and before one token of padding, is a chunk to be compiled."""

    text: str
    sinks: int


@dataclass(frozen=True)
class Wanted:
    """What to link. `places` is None where chunks are to be recognised; `compile` is set instead of all else."""

    policy: Policy
    places: tuple[Place, ...] | None
    compile: Compile | None = None


def parse_wanted(params: Mapping[str, Any] | None, policy: Policy, recognises: bool) -> Wanted | None:
    """What a request wants; None if it is an ordinary one.

    Args:
        policy: what is taken if the request names none.
        recognises: whether the server looks for chunks in requests that say nothing.

    Raises:
        InputError: names the field that cannot be used.
    """
    given = None if params is None else params.get(FIELD)
    if given is None:
        return Wanted(policy, None) if recognises else None
    if given is False:
        return None
    if not isinstance(given, Mapping):
        raise InputError(f"kv_transfer_params: {FIELD} must be an object with chunks, keys or recognise, or false")
    if unknown := sorted(set(given) - {*_WAYS, "policy"}):
        raise InputError(f"kv_transfer_params: {FIELD} has no field {unknown[0]!r}; it has {', '.join(_WAYS)}, policy")
    ways = [way for way in _WAYS if way in given]
    if len(ways) != 1:
        raise InputError(f"kv_transfer_params: {FIELD} needs one of {', '.join(_WAYS)}, not {len(ways)}")
    return _wanted(ways[0], given[ways[0]], parse_policy(given["policy"]) if "policy" in given else policy)


def parse_policy(given: object) -> Policy:
    """A policy from its specification (`legolink-16`), or from an object of algo and fields.

    Raises:
        InputError: no such policy, a grid of several, or a field that does not fit.
    """
    if isinstance(given, Mapping) and isinstance(given.get("algo"), str):
        return _linking(make_policy(given["algo"], {name: value for name, value in given.items() if name != "algo"}))
    if not isinstance(given, str):
        raise InputError("policy: must be a specification as legolink-16, or an object with algo and its fields")
    found = parse_grid([given])
    if len(found) != 1:
        raise InputError(f"policy {given!r}: names {len(found)} policies; a request takes one")
    return _linking(found[0].policy)


def _linking(policy: Policy) -> Policy:
    if policy.chain_block:
        raise InputError(f"policy {policy.name!r}: vLLM has a prefix cache of its own, for requests that link nothing")
    return policy


def _wanted(way: str, value: object, policy: Policy) -> Wanted | None:
    if way == "recognise":
        if not isinstance(value, bool):
            raise InputError(f"kv_transfer_params: recognise={value!r} must be true or false")
        return Wanted(policy, None) if value else None
    if way == "compile":
        return Wanted(policy, (), _compile(value))
    if not isinstance(value, list) or not value:
        raise InputError(f"kv_transfer_params: {way} must be a list of at least one object")
    return Wanted(policy, tuple(_place(way, one) for one in value))


def _compile(value: object) -> Compile:
    if not isinstance(value, Mapping) or set(value) != {"text", "sinks"}:
        raise InputError("kv_transfer_params: compile must be an object with text and sinks")
    if not isinstance(value["text"], str) or not _is_count(value["sinks"]):
        raise InputError("kv_transfer_params: compile takes a text, and sinks of 0 or more")
    return Compile(value["text"], value["sinks"])


def _place(way: str, value: object) -> Place:
    if way == "keys":
        value = {"key": value, "start": None}
    elif not isinstance(value, Mapping) or set(value) != {"key", "start"} or not _is_count(value["start"]):
        raise InputError("kv_transfer_params: each of chunks must be an object with key, and start of 0 or more")
    assert isinstance(value, Mapping)
    if not isinstance(value["key"], str):
        raise InputError(f"kv_transfer_params: {value['key']!r} is no object key")
    return Place(value["key"], value["start"])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
