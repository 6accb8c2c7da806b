"""The options of benches; imports nothing heavy, so that a command line can be built from it."""

from __future__ import annotations

from dataclasses import dataclass

from pictool.errors import InputError

TRANSFORMERS = "transformers"  # the label of its own `generate`, beside those of policies


@dataclass(frozen=True)
class PromptOptions:
    """The prompt of `sync` and `breakdown`, and how often each policy links it.

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
        _require_at_least(least, vars(self))

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.chunks * self.chunk_tokens + self.tail_tokens


@dataclass(frozen=True)
class ContextOptions:
    """The lengths of `context`: prompts of `start` tokens, doubled as long as they have at most `stop`.

    All chunks have `chunk_tokens` tokens, but the last, which has what is left before the tail.
    """

    start: int = 1024
    stop: int = 32768
    chunk_tokens: int = 512
    tail_tokens: int = 32
    repeats: int = 3
    seed: int = 0
    is_cold: bool = False

    def __post_init__(self) -> None:
        _require_at_least({"chunk_tokens": 1, "tail_tokens": 1, "repeats": 1, "seed": 0}, vars(self))
        if self.start <= self.tail_tokens:
            raise InputError(f"--from {self.start}: must be more than the {self.tail_tokens} tokens of the tail")
        if self.stop < self.start:
            raise InputError(f"--to {self.stop}: must be at least --from {self.start}")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt, ascending."""
        doublings = (self.stop // self.start).bit_length()
        return tuple(self.start << i for i in range(doublings))


def _require_at_least(least: dict[str, int], values: dict[str, int]) -> None:
    for name, value in least.items():
        if values[name] < value:
            raise InputError(f"--{name.replace('_', '-')} {values[name]}: must be {value} or more")
