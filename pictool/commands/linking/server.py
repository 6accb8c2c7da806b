"""`pic link --server`: a running `pic serve` links in place of this process, which pays no start-up."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.commands.console.errors import UsageError
from pictool.commands.console.verbosity import note
from pictool.commands.console.words import count
from pictool.commands.settings.settings import DEFAULT, Settings
from pictool.errors import InputError
from pictool.reading import exists, parse_json, shown
from pictool.urls import open_url

if TYPE_CHECKING:
    from pictool.linker.spec import Document, Spec

_TIMEOUT_S = 600.0  # without a byte; a long prompt has none before its first token
_MAX_LINE = 1 << 24
_MAX_NUMBER = 1 << 53
_MAX_ANSWER = 1 << 26  # bytes of all events of one answer
# What is used of a report; `compare` is there if it was asked for.
_REPORT: dict[str, Any] = {
    "answer": str, "algo": str, "params": dict, "model": str, "engine": str,
    "tokens": dict.fromkeys(("head", "context", "tail", "prompt", "generated"), int) | {"recomputed": int | float},
    "timing": dict.fromkeys(("load_s", "select_s", "recompute_s", "ttft_s", "decode_s"), int | float),
}  # fmt: skip
_COMPARE: dict[str, Any] = {
    "answer": str, "ttft_s": int | float, "speedup": int | float, "kl": int | float, "same_first_token": bool,
    "same_answer": bool, "common_prefix": int, "answer_kl": int | float | None,
}  # fmt: skip
_OF_HERE = ("model", "device", "dtype", "store", "remote", "require_signed", "salt")  # the server has its own


def require_possible(settings: Settings, local: Mapping[str, object]) -> None:
    """Refuse options that are for a link in this process.

    Args:
        local: options that need the model here, by name; None or False: unused.

    Raises:
        UsageError: one is used.
    """
    named = [settings.origin(name) for name in _OF_HERE if settings.option(name) is not None]
    for name in [*named, *(name for name, value in local.items() if value)]:
        raise UsageError(f"{name}: cannot be used with a server ({settings.origin('server')}); --server '' links here")


def ask_server(
    settings: Settings, spec: Spec, compare: bool, on_text: Callable[[str], None] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a server answers: the report of `pic link --json`, and the objects and the model that it is of.

    Raises:
        InputError: no server, one that refuses, or one that does not speak as `pic serve`.
    """
    body = _body(spec, compare) | ({} if settings.origin("codec") == DEFAULT else {"codec": spec.codec})
    for event in _events(settings, body):
        match event:
            case {"text": str(text)}:
                if on_text is not None:
                    on_text(text)
            case {"compiled": {"source": str(source), "tokens": int(tokens)}}:
                note(f"compiled {source} first ({count(tokens, 'token')})")
            case {"error": {"message": str(message)}}:
                raise InputError(f"{settings.server}: {message}")
            case {"report": dict(report), "origin": dict(origin)}:
                _require_report(settings, report, compare)
                return report, origin
    raise InputError(f"{settings.server}: ended in the middle of an answer; ask again")


def _require_report(settings: Settings, report: Mapping[str, Any], compare: bool) -> None:
    """Raise InputError unless the value is a report of `pic link --json`."""
    wanted = _REPORT | ({"compare": _COMPARE} if compare else {})
    if problem := _misfit(report, wanted):
        raise InputError(f"{settings.server}: does not answer like pic serve (report: {problem}); check the URL")


def _misfit(value: Any, wanted: Any, name: str = "") -> str | None:
    """What of a JSON value is not of the types that are wanted; None if all is."""
    if isinstance(wanted, dict):
        if not isinstance(value, dict):
            return f"{name or 'it'} is no object"
        found = (_misfit(value.get(key), kind, f"{name}.{key}".lstrip(".")) for key, kind in wanted.items())
        return next(filter(None, found), None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_right = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    is_right = is_right and not (is_number and abs(value) >= _MAX_NUMBER)
    return None if is_right else f"{name} is {shown(value)}"


def _body(spec: Spec, compare: bool) -> dict[str, Any]:
    said = {
        "head": spec.head, "query_template": spec.query_template, "separator": spec.separator, "sinks": spec.sinks,
        "chunk_tokens": spec.chunk_tokens,
    }  # fmt: skip
    sampling = spec.sampling
    return {
        "query": spec.query, "documents": [_document(document) for document in spec.documents],
        "policy": {"algo": spec.policy.name} | spec.policy.params, "max_new_tokens": spec.max_new_tokens,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed,
        "stop": list(sampling.stop), "compare": compare,
    } | {name: value for name, value in said.items() if value is not None}  # fmt: skip


def _document(document: Document) -> dict[str, str]:
    from pictool.compiler.chunking import read_text
    from pictool.core import Text

    if isinstance(document, Text):
        return {"text": document.text, "source": document.source}
    name = str(document)
    if Path(name).suffix == ".kvo":
        raise InputError(f"{name}: a server cannot read your files; name the object's key, or the text")
    return {"text": read_text(Path(name)), "source": name} if exists(name) else {"key": name}


def _events(settings: Settings, body: Mapping[str, Any]) -> Iterator[Any]:
    assert settings.server is not None
    url, key = settings.server.rstrip("/") + "/v1/link", settings.server_key
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with open_url(request, _TIMEOUT_S) as response:
            num_bytes = 0
            while line := response.readline(_MAX_LINE):
                num_bytes += len(line)
                if num_bytes > _MAX_ANSWER:
                    raise ValueError(f"more than {_MAX_ANSWER >> 20} MiB")
                data = line.strip().removeprefix(b"data: ")
                if data and data != b"[DONE]":
                    yield parse_json(data)
    except urllib.error.HTTPError as error:
        raise InputError(f"{settings.server}: {_refusal(error)}") from error
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise InputError(f"{settings.server}: no server answers ({reason}); start one with pic serve") from error
    except (ConnectionError, TimeoutError, http.client.IncompleteRead) as error:
        raise InputError(f"{settings.server}: ended in the middle of an answer ({error}); ask again") from error
    except (OSError, ValueError, OverflowError, RecursionError, http.client.HTTPException) as error:
        raise InputError(f"{settings.server}: does not answer like pic serve ({error}); check the URL") from error


def _refusal(error: urllib.error.HTTPError) -> str:
    """Why a server refuses, in its own words if it is a `pic serve`."""
    try:
        message = str(parse_json(error.read(_MAX_LINE))["error"]["message"])
    except (OSError, ValueError, RecursionError, LookupError, TypeError, http.client.HTTPException):
        return f"has no /v1/link ({error.code} {error.reason}); is it a pic serve of this version?"
    if error.code == 401:
        return f"{message} (PIC_SERVER_KEY)"
    return message
