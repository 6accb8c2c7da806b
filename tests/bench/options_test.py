"""Options of benches: tokens, and what is refused."""

from __future__ import annotations

import pytest

from pictool.bench.options import PromptOptions
from pictool.errors import InputError


def test_a_prompt_is_chunks_and_a_tail() -> None:
    assert PromptOptions().num_tokens == 8 * 512 + 32


@pytest.mark.parametrize(
    ("wrong", "option"),
    [
        ({"chunks": 0}, "--chunks 0"),
        ({"chunk_tokens": 0}, "--chunk-tokens 0"),
        ({"tail_tokens": 0}, "--tail-tokens 0"),
        ({"new_tokens": -1}, "--new-tokens -1"),
        ({"repeats": 0}, "--repeats 0"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_prompts_that_cannot_be_are_refused(wrong: dict[str, int], option: str) -> None:
    with pytest.raises(InputError, match=f"^{option}: "):
        PromptOptions(**wrong)  # type: ignore[arg-type]
