"""Options of benches: tokens, and what is refused."""

from __future__ import annotations

import pytest

from pictool.bench.options import PromptOptions
from pictool.errors import InputError


def test_a_prompt_is_chunks_and_a_tail() -> None:
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
