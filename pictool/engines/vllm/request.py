"""What a request asks of the connector: `kv_transfer_params["pic"]`, parsed and checked.

{"pic": {"chunks": [{"key": K, "start": 12}, …], "policy": "legolink-16"}}   objects, and where each one starts
{"pic": {"keys": [K, …], "policy": {"algo": "legolink", "k": 16}}}           objects to locate in the prompt, in order
{"pic": {"recognise": true, "codec": "int8"}}                                all stored chunks that are in the prompt
{"pic": {"chunks": […], "fresh": true}}                                      not from vLLM's cache of an equal link
{"pic": {"compile": {"text": "…", "before": 4}}}                             write the prompt's KV to the store
{"pic": {"chunks": […], "salt": S, "report_as": NAME}}                       of a tenant; NAME is of its report
{"pic": {"report": NAME}}                                                    its report, which no stream of vLLM has
{"pic": false}                                                               nothing: an ordinary request
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pictool.errors import InputError, ObjectError, PicError
from pictool.linker.grid import named_policy
from pictool.linker.grid import parse_policy as parse_spec
from pictool.linker.policies.base import Policy
from pictool.store.codecs import codecs

FIELD = "pic"
SALT_PREFIX = "pic:"  # of the connector's own salts
MAX_OBJECTS = 1024  # that a request may name: each is opened to plan the request
MAX_PROBLEM = 500  # characters
_WAYS = ("chunks", "keys", "recognise", "compile", "report")
_MAX_NAME = 4096  # characters of a salt, and of a report's name
_MORE = ("policy", "codec", "fresh", "salt", "report_as")
SECRET = "PIC_ROUTER_SECRET"  # the variable of a router and of its vLLM: by it the router may compile


class RequestError(InputError):
    """What a client asks for cannot be done. The message is part of the response, and says what the client may know."""


class UnusableObjectError(ObjectError):
    """An object that a request cannot link. The message is for the server's log: it may name paths."""

    def __init__(self, key: str, reason: object) -> None:
        super().__init__(str(reason))
        self.key = key


@dataclass(frozen=True)
class Problem:
    """Why a request is computed exactly: `shown` is for its client, `detail` for the server's log.

    A client may be a stranger: it is told neither paths, nor whether an object exists that is not its own.
    """

    shown: str
    detail: str

    @classmethod
    def of(cls, error: BaseException) -> Problem:
        """What an exception tells the two."""
        detail = str(error) if isinstance(error, PicError) else f"{type(error).__name__}: {error}"
        if isinstance(error, RequestError):
            return cls(_clip(detail), _clip(detail))
        if isinstance(error, UnusableObjectError):
            shown = f"object {error.key[:12]}: no usable object with this request's cache_salt"
            return cls(_clip(shown), _clip(detail))
        return cls("could not be linked; see the server's log", _clip(detail))


def _clip(text: str) -> str:
    """One line of bounded length: a client's own words are in it."""
    line = " ".join(text.split())
    half = MAX_PROBLEM // 2
    return line if len(line) <= MAX_PROBLEM else f"{line[:half]} … {line[-half:]}"


@dataclass(frozen=True)
class PlanningDeadline:
    """Until when a request may be planned, on the clock of `time.monotonic`."""

    limit_s: float
    end_s: float

    @classmethod
    def after(cls, limit_s: float) -> PlanningDeadline:
        return cls(limit_s, time.monotonic() + limit_s)

    def check(self) -> None:
        """Raise a RequestError once the time is over."""
        if time.monotonic() > self.end_s:
            raise RequestError(f'not planned within {self.limit_s:g} s (kv_connector_extra_config "plan_s")')


@dataclass(frozen=True)
class ObjectRef:
    """An object that a request names. `start` is its first token in the prompt; None: to be located."""

    key: str
    start: int | None


@dataclass(frozen=True)
class LinkParams:
    """A request to link the prompt. `objects` is None if the chunks in it are to be recognised, those of a codec.

    With `fresh` it is linked anew, though vLLM's own cache may have an equal link.
    """

    policy: Policy
    objects: tuple[ObjectRef, ...] | None
    codec: str | None = None  # None: any
    fresh: bool = False
    salt: str | None = field(default=None, repr=False)
    report_as: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class CompileParams:
    """A request to compile the prompt: `before` tokens whose KV is dropped, those of `text`, and one of padding.

    `proof` is that of the server's own router (`compile_proof`), which may write objects where clients may not. With
    `later`, all other work of the engine comes first.
    """

    policy: Policy
    text: str
    before: int
    proof: str = field(default="", repr=False)
    later: bool = False
    salt: str | None = field(default=None, repr=False)
    report_as: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class ReportParams:
    """A request for the report of another one, by the name that it was given. vLLM's streams have none."""

    name: str = field(repr=False)


Params = LinkParams | CompileParams | ReportParams


def compile_proof(text: str, before: Sequence[int], salt: str) -> str:
    """What a router's request to compile carries: an HMAC under the secret that the router shares with its vLLM.

    It is of this text, the token ids before it, and the salt alone: whoever reads it on its way can have nothing else
    compiled. Empty: no secret.
    """
    secret = os.environ.get(SECRET, "")
    signed = json.dumps([text, [*before], salt]).encode()
    return hmac.new(secret.encode(errors="replace"), signed, hashlib.sha256).hexdigest() if secret else ""


def is_proof(proof: str, text: str, before: Sequence[int], salt: str) -> bool:
    """Whether a request to compile is of a router that shares the secret of this process."""
    own = compile_proof(text, before, salt)
    return bool(own) and hmac.compare_digest(proof.encode(errors="replace"), own.encode())


def parse_request(params: object, policy: Policy, recognise: bool, codec: str | None = None) -> Params | None:
    """Parse a request's `kv_transfer_params`; None for an ordinary request.

    Args:
        policy, codec: those of requests that name none.
        recognise: whether the server recognises chunks in requests that have no field `pic`.

    Raises:
        RequestError: names the field that cannot be used.
    """
    if params is not None and not isinstance(params, Mapping):
        raise RequestError(f"kv_transfer_params: must be an object, not {type(params).__name__}")
    fields = None if params is None else params.get(FIELD)
    if fields is None:
        return LinkParams(policy, None, codec) if recognise else None
    if fields is False:
        return None
    if not isinstance(fields, Mapping):
        raise RequestError(f"kv_transfer_params: {FIELD} must be an object with chunks, keys or recognise, or false")
    if unknown := sorted(set(fields) - {*_WAYS, *_MORE}):
        raise RequestError(
            f"kv_transfer_params: {FIELD} has no field {unknown[0]!r}; it has {', '.join((*_WAYS, *_MORE))}"
        )
    ways = [way for way in _WAYS if way in fields]
    if len(ways) != 1:
        raise RequestError(f"kv_transfer_params: {FIELD} needs exactly one of {', '.join(_WAYS)}, not {len(ways)}")
    return _parse_way(ways[0], fields, policy, codec)


def _parse_way(way: str, fields: Mapping[str, object], policy: Policy, codec: str | None) -> Params | None:
    """What the fields of `pic` ask for. Raises RequestError."""
    value = fields[way]
    if way == "report":
        if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME:
            raise RequestError("kv_transfer_params: report must be a name that an earlier request set (report_as)")
        return ReportParams(value)
    names: dict[str, Any] = {name: fields.get(name) for name in ("salt", "report_as")}
    for name, text in names.items():
        if not isinstance(text, str | None) or len(text or "") > _MAX_NAME:
            raise RequestError(f"kv_transfer_params: {name} must be a string of at most {_MAX_NAME} characters")
    policy = parse_policy(fields["policy"]) if "policy" in fields else policy
    if way == "compile":
        return replace(_parse_compile(value, policy), **names)
    fresh = fields.get("fresh", False)
    if not isinstance(fresh, bool):
        raise RequestError(f"kv_transfer_params: fresh={fresh!r} must be true or false")
    if way == "recognise":
        if not isinstance(value, bool):
            raise RequestError(f"kv_transfer_params: recognise={value!r} must be true or false")
        codec = parse_codec(fields["codec"]) if "codec" in fields else codec
        return LinkParams(policy, None, codec, fresh, **names) if value else None
    if "codec" in fields:
        raise RequestError(f"kv_transfer_params: codec applies to recognise only; {way} already name their objects")
    if not isinstance(value, list) or not 0 < len(value) <= MAX_OBJECTS:
        raise RequestError(f"kv_transfer_params: {way} must be a list of 1 to {MAX_OBJECTS} objects")
    return LinkParams(policy, tuple(_parse_object(way, entry) for entry in value), None, fresh, **names)


def parse_policy(value: object) -> Policy:
    """Parse a policy: a specification (`legolink-16`), or an object with `algo` and the policy's fields.

    Raises:
        RequestError: no such policy, a grid of several, or a field that does not fit.
    """
    try:
        if isinstance(value, str):
            return _linked(parse_spec(value))
        if isinstance(value, Mapping) and isinstance(value.get("algo"), str):
            fields = {name: field for name, field in value.items() if name != "algo"}
            return _linked(named_policy(value["algo"], fields))
    except InputError as error:
        raise RequestError(f"policy: {error}") from error
    raise RequestError("policy: must be a specification such as legolink-16, or an object with algo and its fields")


def parse_codec(value: object) -> str | None:
    """Parse the codec of the objects that are recognised; None for any.

    Raises:
        RequestError: no such codec.
    """
    if value is None or (isinstance(value, str) and value in codecs()):
        return value
    raise RequestError(f"codec {_clip(repr(value))}: must be one of {', '.join(codecs())}")


def _linked(policy: Policy) -> Policy:
    """What is linked for a policy. Raises RequestError: vLLM cannot."""
    policy = policy.without_attention
    if policy.needs.attention:
        raise RequestError(f"{policy.name!r}: the connector cannot read attention; use legolink")
    if policy.needs.chain_block:
        raise RequestError(f"{policy.name!r}: vLLM has its own prefix cache, for requests that link nothing")
    return policy


def _parse_compile(value: object, policy: Policy) -> CompileParams:
    if not isinstance(value, Mapping) or set(value) - {"proof", "later"} != {"text", "before"}:
        raise RequestError("kv_transfer_params: compile must be an object with text and before")
    proof, later = value.get("proof", ""), value.get("later", False)
    if not (isinstance(value["text"], str) and _is_count(value["before"]) and isinstance(proof, str)) or (
        not isinstance(later, bool)
    ):
        raise RequestError("kv_transfer_params: compile needs text, a string, and before, at least 0")
    return CompileParams(policy, value["text"], value["before"], proof, later)


def _parse_object(way: str, value: object) -> ObjectRef:
    if way == "keys":
        value = {"key": value, "start": None}
    elif not isinstance(value, Mapping) or set(value) != {"key", "start"} or not _is_count(value["start"]):
        raise RequestError("kv_transfer_params: each of chunks must be an object with key, and start of 0 or more")
    assert isinstance(value, Mapping)
    if not isinstance(value["key"], str):
        raise RequestError(f"kv_transfer_params: {value['key']!r} is not an object key")
    return ObjectRef(value["key"], value["start"])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
