"""The options of `python -m benchmarks.span_queries`; imports nothing heavy: a command line is built from it."""

from __future__ import annotations

from dataclasses import dataclass

from pictool.errors import InputError

MAX_DOCUMENTS = 32  # the names of the embedded world do not last for more pages


@dataclass(frozen=True)
class DocumentsOptions:
    """Fig. 13b. `counts`: documents of a query, each of `tokens` random tokens. `questions`: of quality, by count."""

    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    tokens: int = 2857
    repeats: int = 3
    questions: int = 60
    seed: int = 0

    def __post_init__(self) -> None:
        _require_each("--documents", self.counts, 1)
        if max(self.counts) > MAX_DOCUMENTS:
            raise InputError(f"--documents {max(self.counts)}: must be {MAX_DOCUMENTS} at most")


@dataclass(frozen=True)
class JudgeOptions:
    """Figs. 14 and 15. Outer calls read `fan_outs` outputs of `tokens` tokens, drawn at `temperatures`.

    Outputs are drawn from `pool` ones for each temperature. All fan-outs are measured at the `middle` temperature, and
    all temperatures at the least and the largest fan-out; each `samples` times.
    """

    fan_outs: tuple[int, ...] = (1, 4, 8, 16, 24)
    temperatures: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    tokens: int = 64
    pool: int = 48
    samples: int = 100
    questions: int = 60
    seed: int = 0

    def __post_init__(self) -> None:
        _require_each("--fan-out", self.fan_outs, 1)
        if not all(0 <= temperature <= 100 for temperature in self.temperatures):
            raise InputError("--temperature: must be from 0 to 100")

    @property
    def middle(self) -> float:
        return sorted(self.temperatures)[len(self.temperatures) // 2]

    @property
    def grid(self) -> tuple[tuple[float, int], ...]:
        """What is measured: (temperature, fan-out)."""
        ends = (min(self.fan_outs), max(self.fan_outs))
        pairs = [(temperature, count) for temperature in self.temperatures for count in ends]
        return tuple(dict.fromkeys([*pairs, *((self.middle, count) for count in self.fan_outs)]))


@dataclass(frozen=True)
class MovesOptions:
    """Fig. 13a. `tokens` that are moved at once, in blocks of `block`, with `batches` of blocks."""

    tokens: tuple[int, ...] = (1024, 4096, 16384, 65536)
    batches: tuple[int, ...] = (16, 64, 256)
    block: int = 16
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        _require_each("--tokens", self.tokens, self.block)
        _require_each("--batch", self.batches, 1)


@dataclass(frozen=True)
class PoolOptions:
    """Streams of `requests`, each of `read` of the `documents` of `tokens`; the pool holds `share` of all documents,
    beside one image. Then as many in waves of `wave`, beside whose images the pool holds as much; 0: no waves."""

    documents: int = 24
    read: int = 6
    tokens: int = 512
    share: float = 0.5
    requests: int = 20
    seed: int = 0
    wave: int = 4

    @property
    def num_waves(self) -> int:
        """That are measured."""
        return max(1, self.requests // self.wave) if self.wave else 0

    def __post_init__(self) -> None:
        if not 0 < self.read <= self.documents:
            raise InputError(f"--read {self.read}: must be from 1 to --documents {self.documents}")
        if not 0 <= self.share <= 1:
            raise InputError(f"--pool-share {self.share}: must be from 0 to 1")


@dataclass(frozen=True)
class BulkOptions:
    """Table 4. Queries of a dataset, in bulks of `sizes` (0: all), with a cache for `share` of what they read."""

    sizes: tuple[int, ...] = (1, 64, 0)
    share: float = 0.125
    limit: int = 150
    repeats: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        _require_each("--bulk", self.sizes, 0)
        if not 0 < self.share <= 1:
            raise InputError(f"--cache-share {self.share}: must be above 0 and at most 1")


@dataclass(frozen=True)
class TreeOptions:
    """Figs. 16 and 17. `candidates` facts, with `hay` tokens of filler around each; `runs` prompts by length."""

    hay: tuple[int, ...] = (0, 32, 64, 128, 256, 512)
    candidates: int = 8
    arity: int = 2
    runs: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        _require_each("--hay", self.hay, 0)
        if not 2 <= self.candidates <= 16 or not 2 <= self.arity <= self.candidates:
            raise InputError("--candidates: from 2 to 16, and --arity from 2 to as many")


def _require_each(option: str, values: tuple[int, ...], least: int) -> None:
    for value in values:
        if value < least:
            raise InputError(f"{option} {value}: must be {least} or more")
