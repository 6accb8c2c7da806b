"""The bodies of requests: read, parsed and validated within bounds; of large ones one at a time, in another thread."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.params import Form
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from pictool.reading import parse_json, require_shape
from pictool.serve.errors import ApiError

T = TypeVar("T")
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
_SMALL = 16 << 10  # bytes that are parsed at once, on the event loop
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
_threads = ThreadPoolExecutor(1, "pic-bodies")


async def read_text(request: Request, max_containers: int) -> str:
    """A body that is JSON of a bounded size, unparsed; how deep it may be is its reader's. Raises ApiError."""
    data = await _read(request)

    def checked() -> str:
        _require_shape(data, len(data), max_containers)
        return _decode(data)

    return await _apart(data, checked)


def parse(data: bytes) -> Any:
    """The value of a body: JSON of a bounded depth and number of values, whose texts are Unicode.

    Raises:
        ApiError: 400.
    """
    _require_shape(data)
    try:
        value = parse_json(_decode(data))
        if _HALF_PAIR.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise ApiError(400, f"body: is not JSON ({where})") from error
    except UnicodeEncodeError as error:
        raise ApiError(400, "body: contains an unpaired surrogate, which is not text") from error
    except ValueError as error:  # a number that is not finite, or of thousands of digits
        raise ApiError(400, f"body: is not JSON ({error})") from error
    return value


def validated(adapter: TypeAdapter[T], value: object) -> T:
    """A value as a type has it. Raises ApiError 422, which names the first mistake."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_context=False, include_input=False)) from error


def invalid(errors: Sequence[Any]) -> ApiError:
    """What pydantic says of a value; of the types that it might have had, that which fits the furthest."""
    first = max(errors, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))
    place = ".".join(str(part) for part in first["loc"] if not isinstance(part, str) or "[" not in part)[:200]
    problem = "is not supported" if first["type"] == "extra_forbidden" else first["msg"]
    return ApiError(422, f"{place or 'body'}: {problem}", param=place.partition(".")[0] or None)


class BodyRoute(APIRoute):
    """A route whose JSON body is read here, before FastAPI, which would parse and validate it on the event loop."""

    def get_route_handler(self) -> Handler:
        handle, field = super().get_route_handler(), self.body_field
        kind: TypeAdapter[Any] | None = None
        if field is not None and not isinstance(field.field_info, Form):
            kind = TypeAdapter(field.field_info.annotation)  # type: ignore[arg-type]

        async def handle_bounded(request: Request) -> Response:
            if kind is not None:
                if not _is_json(request.headers.get("content-type", "")):
                    raise ApiError(415, "Content-Type: must be application/json", param="Content-Type")
                data = await _read(request)
                value = await _apart(data, lambda: validated(kind, parse(data)))
                request = _ReadRequest(request.scope, request.receive, value)
            try:
                return await handle(request)
            except HTTPException as error:
                if isinstance(error.__cause__, ApiError):  # while FastAPI read a form; it says 400 for whatever it was
                    raise error.__cause__ from error
                raise

        return handle_bounded


class _ReadRequest(Request):
    """A request whose body is a value already."""

    def __init__(self, scope: Any, receive: Any, value: object) -> None:
        super().__init__(scope, receive)
        self._body, self._json = b"is read", value


async def _read(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise ApiError(499, "the client closed the request") from error


def _is_json(content_type: str) -> bool:
    message = Message()
    message["content-type"] = content_type
    kind, _, subtype = message.get_content_type().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


async def _apart(data: bytes, work: Callable[[], T]) -> T:
    if len(data) <= _SMALL:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


def _require_shape(data: bytes, *bounds: int) -> None:
    try:
        require_shape(data, *bounds)
    except ValueError as error:
        raise ApiError(400, f"body: {error}") from error


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"body: is not UTF-8 at byte {error.start}") from error
