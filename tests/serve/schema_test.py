"""Requests that schemathesis makes of the OpenAPI description: none meets an error of the server.

`PIC_SCHEMA_CASES` is how many are drawn at most for each route. `make fuzz` sets it, which adds the thousands that
schemathesis derives from the description (its coverage phase): to derive them takes longer than to collect all tests.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from pictool.linker.grid import parse_policy
from pictool.serve.app import make_app
from pictool.serve.backends.base import BackendSettings
from pictool.serve.service import Service
from pictool.serve.tenants import Keys, Tenant
from pictool.serve.work import AnswerRequest, Backend, BackendStatus, ChatPrompt, CompiledText, Event
from pictool.store.store import Store
from serve.live import Live, serving, tiny_model

CASES = int(os.environ.get("PIC_SCHEMA_CASES", "5"))
CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]


class Nobody(Backend):
    """A backend that answers nothing: the description is made without a model."""

    model, created, context_length = "tiny", 0, 0

    def answer(self, work: AnswerRequest) -> AsyncGenerator[Event, None]:
        raise NotImplementedError

    async def compile(self, text: str, tenant: Tenant, chunk_tokens: int | None = None) -> list[CompiledText]:
        raise NotImplementedError

    async def count(self, prompt: ChatPrompt, tenant: Tenant) -> int:
        raise NotImplementedError

    def has(self, key: str) -> bool:
        raise NotImplementedError

    async def execute(self, query: str, tenant: Tenant) -> list[str]:
        raise NotImplementedError

    def status(self) -> BackendStatus:
        raise NotImplementedError


DESCRIPTION = make_app(Service(Nobody(), Path("nowhere"), Keys()), "test").openapi()
schema = schemathesis.openapi.from_dict(DESCRIPTION)
schema.config.phases.coverage.enabled = "PIC_SCHEMA_CASES" in os.environ


@pytest.fixture(scope="module")
def terse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of short answers."""
    backend = BackendSettings(parse_policy("legolink-4"), max_tokens=2, refresh_s=3600)
    with serving(tiny_model(), Store(tmp_path_factory.mktemp("terse") / "store"), settings=backend) as live:
        yield live


@schema.parametrize()
@settings(max_examples=CASES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_meets_an_error_of_the_server(case: Any, terse: Live) -> None:
    if isinstance(case.body, dict) and "model" in case.body and case.meta is not None:
        case.body["model"] = "tiny"  # else most are 404
    response = case.call(base_url=terse.url, timeout=60)
    case.validate_response(response, checks=CHECKS)


def test_the_description_has_all_routes() -> None:
    assert {"/v1/chat/completions", "/v1/caches/{name}", "/v1beta/cachedContents", "/v1/query/execute"} <= {
        *DESCRIPTION["paths"]
    }
