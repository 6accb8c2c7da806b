"""The routes of the server are those that docs/reference/serving.md lists."""

from __future__ import annotations

import re
from pathlib import Path

from pictool.serve.app import make_app
from pictool.serve.service import Service
from pictool.serve.tenants import Keys
from serve.schema_test import Nobody

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "serving.md"


def test_every_route_is_documented_and_every_documented_route_is_there() -> None:
    paths = make_app(Service(Nobody(), Path("nowhere"), Keys()), "test").openapi()["paths"]
    registered = {(method.upper(), _form(path)) for path, methods in paths.items() for method in methods}
    table = PAGE.read_text(encoding="utf-8").partition("## Routes")[2].partition("\n## ")[0]
    found = re.findall(r"`(GET|POST|PATCH|DELETE) (/[^`?]*)[^`]*`", table)
    documented = {(method, _form(path)) for method, path in found}
    documented |= {(method, path.replace("/v1beta/", "/v1/")) for method, path in documented}  # as the page says
    assert documented == registered


def _form(path: str) -> str:
    """A path without the names of what varies in it."""
    return re.sub(r"\{[^}]*\}", "{}", path)
