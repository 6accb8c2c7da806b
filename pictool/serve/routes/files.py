"""OpenAI's files: texts that requests name by their ids."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Query, UploadFile
from fastapi.responses import PlainTextResponse

from pictool.serve.bodies import BodyRoute
from pictool.serve.errors import not_found
from pictool.serve.files import MAX_BYTES
from pictool.serve.routes.openai import page_after
from pictool.serve.service import Call

router = APIRouter(tags=["openai"], route_class=BodyRoute)


@router.post("/v1/files")
def upload(
    call: Call, file: Annotated[UploadFile, File()], purpose: Annotated[str, Form()] = "user_data"
) -> dict[str, Any]:
    data = file.file.read(MAX_BYTES + 1)
    return call.service.files.add(call.tenant.id, file.filename or "text", purpose, data).report()


@router.get("/v1/files")
def listing(
    call: Call, limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000, after: str = "", purpose: str = ""
) -> dict[str, Any]:
    files = [file for file in call.service.files.list(call.tenant.id) if purpose in ("", file.purpose)]
    return page_after([file.report() for file in files], limit, after)


@router.get("/v1/files/{name}")
def show(call: Call, name: str) -> dict[str, Any]:
    return call.require_file(name)[0].report()


@router.get("/v1/files/{name}/content", response_class=PlainTextResponse)
def content(call: Call, name: str) -> str:
    return call.find_file(name)


@router.delete("/v1/files/{name}")
def remove(call: Call, name: str) -> dict[str, Any]:
    if not call.service.files.remove(call.tenant.id, name):
        raise not_found(f"file {name[:80]!r}", "file_id", "file_not_found")
    return {"id": name, "object": "file", "deleted": True}
