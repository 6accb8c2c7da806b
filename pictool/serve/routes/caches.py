"""Caches as a resource: a cache id is a lease on objects (docs/reference/serving.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query

from pictool.serve.bodies import BodyRoute
from pictool.serve.errors import ApiError, no_share, not_found
from pictool.serve.prompts.requests import turns_of
from pictool.serve.routes.openai import page
from pictool.serve.schema import CacheChange, CacheRequest, Ttl
from pictool.serve.service import ApiCall, Call, Service
from pictool.serve.work import MarkedText, ObjectReference, PlainText, Turn
from pictool.store.leases import Lease, LeasedObject

_ATTEMPTS = 3  # to compile what others evict
_FORMS = ("text", "messages", "file_id")


router = APIRouter(tags=["caches"], route_class=BodyRoute)


@router.post("/v1/caches")
async def create(call: Call, body: CacheRequest) -> dict[str, Any]:
    call.service.require_model(body.model)
    expires = expiry(call.service, body.ttl, body.expires_at)
    turns = await asyncio.to_thread(_turns, call, body)
    lease = compile_turns(call, turns, expires, body.display_name or "", body.renew, body.chunk_tokens)
    return report(call.service, await call.unless_gone(lease))


@router.get("/v1/caches")
def listing(call: Call, limit: Annotated[int, Query(ge=1, le=1000)] = 20, after: str = "") -> dict[str, Any]:
    leases = call.service.leases.page(call.tenant.id, limit + 1, after)
    return page([report(call.service, lease) for lease in leases[:limit]], len(leases) > limit)


@router.get("/v1/caches/{name}")
def show(call: Call, name: str) -> dict[str, Any]:
    return report(call.service, find_lease(call, name))


@router.patch("/v1/caches/{name}")
def change(call: Call, name: str, body: CacheChange) -> dict[str, Any]:
    if body.ttl is None and body.expires_at is None:
        raise ApiError(400, "ttl: this or expires_at is required", param="ttl")
    return report(call.service, extend_lease(call, name, body.ttl, body.expires_at))


@router.delete("/v1/caches/{name}")
def remove(call: Call, name: str) -> dict[str, Any]:
    remove_lease(call, name)
    return {"id": name, "object": "cache", "deleted": True}


def find_lease(call: ApiCall, name: str) -> Lease:
    """A lease of the tenant. Raises ApiError 404."""
    return _required(call.service.leases.find(name, call.tenant.id), name)


def extend_lease(call: ApiCall, name: str, ttl: Ttl | None, expires_at: float | None) -> Lease:
    """The same with another end. Raises ApiError."""
    return _required(call.service.leases.extend(name, call.tenant.id, expiry(call.service, ttl, expires_at)), name)


def remove_lease(call: ApiCall, name: str) -> None:
    """End a lease of the tenant. Raises ApiError 404."""
    if not call.service.leases.remove(name, call.tenant.id):
        _required(None, name)


def _required(lease: Lease | None, name: str) -> Lease:
    if lease is None:
        raise not_found(f"cache {name[:80]!r}", "cache_id", "cache_not_found")
    return lease


def expiry(service: Service, ttl: Ttl | None, expires_at: float | None) -> float:
    """When a cache ends, in seconds since 1970.

    Raises:
        ApiError: both are given, or it is past, or too far away.
    """
    now, limit = service.clock(), service.settings.max_ttl_s
    if ttl is not None and expires_at is not None:
        raise ApiError(400, "ttl: cannot be combined with expires_at", param="ttl")
    if ttl is None:
        expires = now + service.settings.default_ttl_s if expires_at is None else expires_at
    else:
        expires = now + float(ttl.removesuffix("s") if isinstance(ttl, str) else ttl)
    if not now < expires <= now + limit + 1:
        raise ApiError(400, f"ttl: must end in the future, within {limit:g} s", param="ttl")
    return expires


def _turns(call: ApiCall, body: CacheRequest) -> Sequence[Turn]:
    """The texts to compile, by role."""
    given = [name for name in _FORMS if getattr(body, name) is not None]
    if len(given) != 1:
        raise ApiError(400, f"text: exactly one of {', '.join(_FORMS)} is required, not {len(given)}", param="text")
    if body.messages is not None:
        return turns_of(body.messages, call.find_cache, call.find_file)
    text = body.text if body.text is not None else call.find_file(str(body.file_id))
    return (Turn("user", (PlainText(text),)),)


async def compile_turns(
    call: ApiCall, turns: Sequence[Turn], expires: float, name: str = "", renews: bool = False,
    chunk_tokens: int | None = None,
) -> Lease:  # fmt: skip
    """Compile the texts of turns, an object each, and lease them.

    Raises:
        ApiError: there is no text, or more than the tenant may keep.
    """
    service, tenant = call.service, call.tenant
    for _ in range(_ATTEMPTS):
        objects = [part for turn in turns for part in await _compile_turn(call, turn, chunk_tokens)]
        if not objects:
            raise ApiError(400, "text: is empty; nothing to compile", param="text")
        lease = await asyncio.to_thread(
            service.leases.add, tenant.id, service.backend.model, objects, expires, name=name, renews=renews
        )  # fmt: skip
        if all(service.backend.has(entry.key) for entry in objects):
            return lease
        await asyncio.to_thread(service.leases.remove, lease.id, tenant.id)  # one was evicted before it was leased
    raise no_share("the texts are too large to be stored here")  # each made the others go


async def _compile_turn(call: ApiCall, turn: Turn, chunk_tokens: int | None) -> list[LeasedObject]:
    objects: list[LeasedObject] = []
    for piece in turn.pieces:
        if isinstance(piece, ObjectReference):
            raise ApiError(400, "messages: a cache cannot be made from caches; use their ids", param="messages")
        if isinstance(piece, PlainText | MarkedText) and piece.text:
            done = await call.service.backend.compile(piece.text, call.tenant, chunk_tokens)
            objects += [LeasedObject(part.key, part.num_tokens, turn.role, part.continues) for part in done]
    return objects


def report(service: Service, lease: Lease) -> dict[str, Any]:
    """A cache as the API shows it."""
    are_here = [service.backend.has(entry.key) for entry in lease.objects]
    return {
        "id": lease.id, "object": "cache", "model": lease.model, "created_at": int(lease.created),
        "expires_at": int(lease.expires), "display_name": lease.name or None, "renew": lease.renews,
        "usage": {"total_tokens": lease.num_tokens, "objects": len(lease.objects)},
        "status": "ready" if all(are_here) else "gone",
    }  # fmt: skip
