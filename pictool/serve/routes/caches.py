"""Caches as a resource: a cache id is a lease on objects (docs/reference/serving.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from pictool.serve.bodies import BodyRoute
from pictool.serve.errors import ApiError, no_share, not_found
from pictool.serve.prompts.reading import turns_of
from pictool.serve.routes.openai import page
from pictool.serve.schema import CacheChange, CacheRequest, Ttl
from pictool.serve.service import Service, unless_gone
from pictool.serve.tenants import Tenant
from pictool.serve.work import MarkedText, ObjectReference, PlainText, Turn
from pictool.store.leases import Lease, LeasedObject

_ATTEMPTS = 3  # to compile what others evict
_FORMS = ("text", "messages", "file_id")


def cache_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter(tags=["caches"], route_class=BodyRoute)

    @router.post("/v1/caches")
    async def create(request: Request, body: CacheRequest) -> dict[str, Any]:
        tenant = service.tenant(request)
        service.require_model(body.model)
        expires = expiry(service, body.ttl, body.expires_at)
        turns = await asyncio.to_thread(_turns, service, tenant, body)
        name = body.display_name or ""
        lease = compile_turns(service, tenant, turns, expires, name, body.renew, body.chunk_tokens)
        return report(service, await unless_gone(request, lease))

    @router.get("/v1/caches")
    def listing(request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 20, after: str = "") -> dict[str, Any]:
        leases = service.leases.page(service.tenant(request).id, limit + 1, after)
        return page([report(service, lease) for lease in leases[:limit]], len(leases) > limit)

    @router.get("/v1/caches/{name}")
    def show(request: Request, name: str) -> dict[str, Any]:
        return report(service, require_lease(service.leases.find(name, service.tenant(request).id), name))

    @router.patch("/v1/caches/{name}")
    def change(request: Request, name: str, body: CacheChange) -> dict[str, Any]:
        tenant = service.tenant(request)
        if body.ttl is None and body.expires_at is None:
            raise ApiError(400, "ttl: or expires_at must be given", param="ttl")
        expires = expiry(service, body.ttl, body.expires_at)
        return report(service, require_lease(service.leases.extend(name, tenant.id, expires), name))

    @router.delete("/v1/caches/{name}")
    def remove(request: Request, name: str) -> dict[str, Any]:
        if not service.leases.remove(name, service.tenant(request).id):
            raise not_found(f"cache {name[:80]!r}", "cache_id", "cache_not_found")
        return {"id": name, "object": "cache", "deleted": True}

    return router


def require_lease(lease: Lease | None, name: str) -> Lease:
    """A lease that there is. Raises ApiError 404."""
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
        raise ApiError(400, "ttl: and expires_at are two ways to say the same; give one", param="ttl")
    if ttl is None:
        expires = now + service.settings.default_ttl_s if expires_at is None else expires_at
    else:
        expires = now + float(ttl.removesuffix("s") if isinstance(ttl, str) else ttl)
    if not now < expires <= now + limit + 1:
        raise ApiError(400, f"ttl: a cache ends after now, and within {limit:g} s", param="ttl")
    return expires


def _turns(service: Service, tenant: Tenant, body: CacheRequest) -> Sequence[Turn]:
    """The texts to compile, by role."""
    given = [name for name in _FORMS if getattr(body, name) is not None]
    if len(given) != 1:
        raise ApiError(400, f"text: give one of {', '.join(_FORMS)}, not {len(given)}", param="text")
    if body.messages is not None:
        return turns_of(body.messages, service.find_cache(tenant), service.find_file(tenant))
    text = body.text if body.text is not None else service.find_file(tenant)(str(body.file_id))
    return (Turn("user", (PlainText(text),)),)


async def compile_turns(
    service: Service, tenant: Tenant, turns: Sequence[Turn], expires: float, name: str = "", renews: bool = False,
    chunk_tokens: int | None = None,
) -> Lease:  # fmt: skip
    """Compile the texts of turns, an object each, and lease them.

    Raises:
        ApiError: there is no text, or more than the tenant may keep.
    """
    for _ in range(_ATTEMPTS):
        objects = [part for turn in turns for part in await _compile_turn(service, tenant, turn, chunk_tokens)]
        if not objects:
            raise ApiError(400, "text: is empty; there is nothing to compile", param="text")
        model = service.backend.model
        lease = await asyncio.to_thread(
            service.leases.add, tenant.id, model, objects, expires, name=name, renews=renews
        )  # fmt: skip
        if all(service.backend.has(entry.key) for entry in objects):
            return lease
        await asyncio.to_thread(service.leases.remove, lease.id, tenant.id)  # one was evicted before it was leased
    raise no_share("the texts are larger than what may be kept here")  # each made the others go


async def _compile_turn(service: Service, tenant: Tenant, turn: Turn, chunk_tokens: int | None) -> list[LeasedObject]:
    objects: list[LeasedObject] = []
    for piece in turn.pieces:
        if isinstance(piece, ObjectReference):
            raise ApiError(400, "messages: a cache cannot be made of caches; use their ids", param="messages")
        if isinstance(piece, PlainText | MarkedText) and piece.text:
            done = await service.backend.compile(piece.text, tenant, chunk_tokens)
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
