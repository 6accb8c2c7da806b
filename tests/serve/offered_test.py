"""The list of policies that requests may name holds for each policy that one is made of."""

from __future__ import annotations

import pytest

from pictool.linker.grid import parse_policy
from pictool.serve.errors import ApiError
from pictool.serve.prompts.offered import offered_policy

DEFAULT = parse_policy("legolink-16")


@pytest.mark.parametrize(
    ("spec", "allowed", "refused"),
    [
        ("legolink-4+fixup-5", ["union", "fixup"], None),
        ("legolink-4+fixup-5", ["union"], "fixup"),
        ("legolink-4+fixup-5", ["fixup"], "union"),
        ("cacheblend-15+legolink-4", ["union", "fixup"], "cacheblend"),
        ("cacheblend-15", ["fixup"], "cacheblend"),
        ("legolink-4+cacheblend-15", None, None),
        ("full", [], None),
    ],
)
def test_every_part_must_be_offered(spec: str, allowed: list[str] | None, refused: str | None) -> None:
    if refused is None:
        assert offered_policy(spec, DEFAULT, allowed) == parse_policy(spec)
    else:
        with pytest.raises(ApiError, match=f"policy: {refused} is not one"):
            offered_policy(spec, DEFAULT, allowed)


def test_the_parts_of_the_default_are_offered() -> None:
    default = parse_policy("fixup-5+legolink-4")
    assert offered_policy("fixup-9+legolink-1", default, []).name == "union"
    with pytest.raises(ApiError, match="cacheblend"):
        offered_policy("legolink-1+cacheblend-5", default, [])
