"""What a client did wrong, as OpenAI's API says it: {"error": {message, type, param, code}}."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pictool.errors import (
    ChangedModelError,
    InputError,
    ModelError,
    NoRoomError,
    ObjectError,
    PicError,
    StoreError,
    UnwritableStoreError,
)
from pictool.store.leases import ShareError

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "conflict_error", 413: "request_too_large",
    415: "invalid_request_error", 422: "invalid_request_error",
    429: "rate_limit_error", 499: "client_closed_request", 503: "service_unavailable",
}  # fmt: skip
RETRY_AFTER_S = 1
_MAX_MESSAGE = 1000  # characters: a client's own words may be in it


class ApiError(Exception):
    """A request that is refused. `param` is the field that is wrong, `code` a word for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(ApiError, param=self.param, code=self.code, headers=self.headers)
        return made, (self.status, str(self))

    @property
    def message(self) -> str:
        return " ".join(str(self).split())[:_MAX_MESSAGE]

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "api_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @classmethod
    def of(cls, error: BaseException) -> ApiError:
        """The error that a client receives: no paths, and nothing about objects of others."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ChangedModelError):
            return cls(503, "the model's files changed after it was loaded; see the server's log", code="model")
        if isinstance(error, InputError | ModelError):
            code = "context_length_exceeded" if "positions" in str(error) else None
            return cls(400, str(error), code=code)
        if isinstance(error, NoRoomError):
            return no_share(str(error) if isinstance(error, ShareError) else "it is too large to be stored here")
        if isinstance(error, UnwritableStoreError):
            return cls(503, "the store cannot be written; stored documents work, new ones are not stored", code="store")
        if isinstance(error, ObjectError | StoreError):
            return cls(503, "the store cannot be used; see the server's log", code="store")
        if isinstance(error, PicError):
            return cls(400, str(error))
        return cls(500, "internal server error; see the server's log", code="internal")


def model_not_found(name: str, served: str) -> ApiError:
    """A request names a model that is not the one that is `served`."""
    return ApiError(404, f"the model {name[:80]!r} is not served; use {served}", param="model", code="model_not_found")


def not_found(what: str, param: str | None = None, code: str = "not_found") -> ApiError:
    """The same error for an object that does not exist and for another tenant's."""
    return ApiError(404, f"{what}: not found", param=param, code=code)


def no_share(problem: str) -> ApiError:
    """The tenant's quota is used up. `problem` describes only the client's own objects."""
    return ApiError(429, f"{problem}; texts can be sent without being stored", code="insufficient_quota")


def server_ends() -> ApiError:
    """The server ends before a request did."""
    return ApiError(503, "the server is shutting down; try again", code="server_ends")


def queue_full() -> ApiError:
    """There is no room left in the queue, or not for this tenant."""
    return ApiError(
        429, "the request queue is full; try again", code="queue_full",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )  # fmt: skip
