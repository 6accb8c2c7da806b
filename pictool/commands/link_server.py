"""`pic link --server`: a running `pic serve` links in place of this process, which pays no start-up."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.commands.errors import UsageError
from pictool.commands.settings import DEFAULT, Settings
from pictool.commands.verbosity import note
from pictool.commands.words import count
from pictool.errors import InputError
from pictool.reading import exists

if TYPE_CHECKING:
    from pictool.linker.spec import Spec

_TIMEOUT_S = 600.0  # without a byte; a long prompt has none before its first token
_MAX_LINE = 1 << 24
_OF_HERE = ("model", "device", "dtype", "store", "remote", "salt")  # settings that are the server's own


def require_possible(settings: Settings, local: Mapping[str, object]) -> None:
    """Refuse options that are for a link in this process.

    Args:
        local: options that need the model here, by name; None or False: unused.

    Raises:
        UsageError: one is used.
    """
    named = [settings.origin(name) for name in _OF_HERE if settings.option(name) is not None]
    for name in [*named, *(name for name, value in local.items() if value)]:
        raise UsageError(f"{name}: is not for a server ({settings.origin('server')}); --server '' links here")


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
                return report, origin
    raise InputError(f"{settings.server}: ended in the middle of an answer; ask again")


def _body(spec: Spec, compare: bool) -> dict[str, Any]:
    said = {
        "head": spec.head, "query_template": spec.query_template, "sinks": spec.sinks, "chunk_tokens": spec.chunk_tokens
    }  # fmt: skip
    sampling = spec.sampling
    return {
        "query": spec.query, "documents": [_document(str(document)) for document in spec.documents],
        "policy": {"algo": spec.policy.name} | spec.policy.params, "max_new_tokens": spec.max_new_tokens,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed,
        "stop": list(sampling.stop), "compare": compare,
    } | {name: value for name, value in said.items() if value is not None}  # fmt: skip


def _document(name: str) -> dict[str, str]:
    from pictool.compiler.chunking import read_text

    if Path(name).suffix == ".kvo":
        raise InputError(f"{name}: a server has no files of yours; name its key, or the text")
    return {"text": read_text(Path(name)), "source": name} if exists(name) else {"key": name}


def _events(settings: Settings, body: Mapping[str, Any]) -> Iterator[Any]:
    assert settings.server is not None
    url, key = settings.server.rstrip("/") + "/v1/link", settings.server_key
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            while line := response.readline(_MAX_LINE):
                data = line.strip().removeprefix(b"data: ")
                if data and data != b"[DONE]":
                    yield json.loads(data)
    except urllib.error.HTTPError as error:
        raise InputError(f"{settings.server}: {_refusal(error)}") from error
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise InputError(f"{settings.server}: no server answers ({reason}); start one with pic serve") from error
    except (ConnectionError, TimeoutError, http.client.IncompleteRead) as error:
        raise InputError(f"{settings.server}: ended in the middle of an answer ({error}); ask again") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InputError(f"{settings.server}: does not answer as pic serve ({error}); is it one?") from error


def _refusal(error: urllib.error.HTTPError) -> str:
    """Why a server refuses, in its own words if it is a `pic serve`."""
    try:
        message = str(json.loads(error.read(_MAX_LINE))["error"]["message"])
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return f"has no /v1/link ({error.code} {error.reason}); is it a pic serve of this version?"
    if error.code == 401:
        return f"{message} (PIC_SERVER_KEY)"
    return message
