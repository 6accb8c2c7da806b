"""What the drivers have in common: the questions, and one line of JSON with the result of each feature."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

GIVEN: dict[str, Any] = json.loads(os.environ["PIC_CLIENT"])
URL, MODEL, DOCUMENT, CACHE = GIVEN["url"], GIVEN["model"], GIVEN["document"], GIVEN["cache"]
HELLO, THINK, LOOK, CUT, ASK = (f"Please (say {name})" for name in ("hello", "think", "look", "cut", "nothing"))
ABOUT, SEEN = "Look somewhere.", "A boat, red."
SCHEMA = {
    "type": "object", "properties": {"kind": {"type": "string", "enum": ["harbour", "town"]}}, "required": ["kind"],
    "additionalProperties": False,
}  # fmt: skip
PLACE = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"], "additionalProperties": False}
FUNCTION = {"name": "look", "description": ABOUT, "parameters": PLACE}


def report(**features: Callable[[], Any]) -> None:
    """Print the result of each feature, or its error. A feature that is a text needs no result: why it has none."""
    results: dict[str, Any] = {}
    for name, feature in features.items():
        try:
            results[name] = feature()
        except Exception as error:
            results[name] = {"error": type(error).__name__, "message": str(error)}
    print("\n" + json.dumps(results, default=str), file=sys.stdout)


def user(text: Any) -> list[Any]:
    return [{"role": "user", "content": text}]
