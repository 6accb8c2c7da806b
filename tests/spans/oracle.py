"""spnl's wheel as an oracle."""

from __future__ import annotations

import json
import platform
import sys

import pytest

from pictool.spans.query import Query, to_json

if sys.platform != "linux" or platform.machine() != "x86_64":
    pytest.skip("spnl has wheels for Linux on x86-64 only", allow_module_level=True)
import spnl


async def execute(query: Query) -> str:
    """The text of a query that calls no model, as spnl executes it."""
    response = await spnl.execute(json.dumps(json.loads(to_json(query))))
    text: str = response.data
    return text
