"""The options of benches; imports nothing heavy, so that a command line can be built from it."""

from __future__ import annotations

from dataclasses import dataclass

from pictool.errors import InputError

TRANSFORMERS = "transformers"  # the label of its own `generate`, beside those of policies


@dataclass(frozen=True)
class PromptOptions:
    """A random prompt, and how often each policy links it.

    Fields:
        repeats: how often all policies are linked, interleaved; a warm-up before that is not counted.
        is_cold: objects come from their device in every run; else from the page cache.
    """

    chunks: int = 8
    chunk_tokens: int = 512
    tail_tokens: int = 32
    new_tokens: int = 16
    repeats: int = 5
    seed: int = 0
    is_cold: bool = False

    def __post_init__(self) -> None:
        least = {"chunks": 1, "chunk_tokens": 1, "tail_tokens": 1, "new_tokens": 0, "repeats": 1, "seed": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be {value} or more")

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.chunks * self.chunk_tokens + self.tail_tokens
