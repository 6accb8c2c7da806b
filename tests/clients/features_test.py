"""Every client, unmodified and at its locked version, against `pic serve`: a test for each cell of the table."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from clients.conftest import CALL, REPLIES, TEXT, THOUGHT, Results
from clients.table import CLIENTS, FEATURES, Client

CELLS = [pytest.param(client, feature, id=f"{client.name}-{feature}") for client in CLIENTS for feature in FEATURES]


@pytest.fixture(scope="module")
def num_prompt(url: str) -> int:
    """Tokens of the prompt of `answer`, as raw HTTP has it."""
    body = {"model": "said", "messages": [{"role": "user", "content": "Please (say hello)"}], "max_tokens": 9}
    usage = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
    return int(usage["prompt_tokens"])


@pytest.mark.parametrize(("client", "feature"), CELLS)
def test_cell(results: Results, client: Client, feature: str, num_prompt: int) -> None:
    if feature not in (found := results(client)):
        assert feature in client.hidden
        return
    got: Any = found[feature]
    if expected_error := (client.refused | client.raised).get(feature):
        assert got["error"] == expected_error[0] and expected_error[1] in got["message"], got
        return
    if feature == "error":
        assert got["error"] == client.error and "'nope'" in got["message"], got
        return
    assert "error" not in got, got
    if feature in client.hidden:
        assert not got.get("reasoning") and not got.get("cached"), got
        return
    expected: dict[str, Any] = {
        "answer": {"text": TEXT, "input": num_prompt}, "reasoning": {"reasoning": THOUGHT, "text": "Not so far."},
        "tools": {"call": ["look", CALL], "text": REPLIES["look"][1].removesuffix("</s>")},
    }  # fmt: skip
    if feature in expected:
        assert got == expected[feature]
    elif feature == "stream":
        assert len(got["pieces"]) > 1 and "".join(got["pieces"]) == TEXT
    elif feature == "structured":
        assert got["value"]["kind"] in ("harbour", "town")
    elif feature == "documents":
        assert got["cached"] > 50
    else:
        assert feature == "cut" and got["calls"] == 0, got
