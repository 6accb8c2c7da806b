"""The list of policies that requests may name holds for each policy that one is made of."""

from __future__ import annotations

import pytest

from pictool.linker.grid import parse_policy
from pictool.serve.errors import ApiError
from pictool.serve.prompts.policies import allowed_policy

DEFAULT = parse_policy("legolink-16")


@pytest.mark.parametrize(
    ("spec", "allowed", "is_allowed"),
    [
        ("speccache-5", ["speccache"], True),
        ("cacheblend-15", ["speccache"], False),
        ("cacheblend-15", None, True),
        ("legolink-4", [], True),  # the default's own name
        ("full", [], True),
    ],
)
def test_what_is_allowed(spec: str, allowed: list[str] | None, is_allowed: bool) -> None:
    if is_allowed:
        assert allowed_policy(spec, DEFAULT, allowed) == parse_policy(spec)
    else:
        with pytest.raises(ApiError, match=r"^policy: cacheblend "):
            allowed_policy(spec, DEFAULT, allowed)
