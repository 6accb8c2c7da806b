"""Options of benches: lengths and tokens, and what is refused."""

from __future__ import annotations

import pytest

from pictool.bench.options import ContextOptions, PromptOptions
from pictool.errors import InputError


def test_lengths_double_up_to_the_last() -> None:
    assert ContextOptions().lengths == (1024, 2048, 4096, 8192, 16384, 32768)
    assert ContextOptions(start=1000, stop=3999).lengths == (1000, 2000)
    assert ContextOptions(start=1000, stop=1000).lengths == (1000,)
    assert PromptOptions().num_tokens == 8 * 512 + 32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chunks": 0}, "--chunks 0: must be 1 or more"),
        ({"chunk_tokens": 0}, "--chunk-tokens 0"),
        ({"tail_tokens": 0}, "--tail-tokens 0"),
        ({"new_tokens": -1}, "--new-tokens -1: must be 0 or more"),
        ({"repeats": 0}, "--repeats 0"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_prompts_that_cannot_be_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PromptOptions(**wrong)  # type: ignore[arg-type]


def test_lengths_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="--from 32: must be more than the 32 tokens of the tail"):
        ContextOptions(start=32)
    with pytest.raises(InputError, match="--to 512: must be at least --from 1024"):
        ContextOptions(stop=512)
