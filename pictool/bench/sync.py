"""One request after another (EPIC §5.2, synchronous): every policy, `full` and `transformers`, in the same rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.bench.floor import Rates, measure_rates
from pictool.bench.options import PromptOptions
from pictool.bench.plain import plain_module, run_plain
from pictool.bench.rounds import OnRun, Spread, median_of, median_ratio, rounds
from pictool.bench.sample import PLAIN, Prompt, Sample, compile_for, run_linked
from pictool.bench.workload import random_chunks, random_tail, require_positions
from pictool.linker.grid import Labelled, parse_grid
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Measured:
    """One policy, or `transformers`, over all rounds.

    Fields:
        median: of the samples, field by field; None where there is no such thing.
        speedup: median of the rounds' ratios: TTFT of full ÷ its own. row_floor: the speedup that rows allow, tokens of
            the prompt ÷ rows.
        floor_s: what no link of these bytes and rows can be faster than here.
    """

    label: str
    params: dict[str, Any]
    ttft: Spread
    median: dict[str, float | None]
    speedup: float
    row_floor: float
    floor_s: float
    samples: tuple[Sample, ...]

    @property
    def ttft_by_floor(self) -> float:
        return self.ttft.median / self.floor_s


@dataclass(frozen=True)
class SyncResult:
    """`methods`: `full` first, then the policies in their order, `transformers` last."""

    prompt_tokens: int
    object_bytes: int
    rates: Rates
    methods: tuple[Measured, ...]

    def report(self) -> dict[str, Any]:
        methods = [{**asdict(one), "ttft_by_floor": one.ttft_by_floor} for one in self.methods]
        return {**asdict(self), "methods": methods}


def bench_sync(
    model: Model,
    policies: Sequence[Labelled],
    options: PromptOptions,
    directory: Path,
    on_run: OnRun | None = None,
) -> SyncResult:
    """Measure single requests; their objects go to `directory`, which the caller removes.

    Args:
        on_run: called after each of the (policies and baselines) · (repeats + 1) runs.

    Raises:
        PicError: a prompt that is too long for the model, a policy that does not fit it, no room for the objects.
    """
    policies, plain = with_full(policies), plain_module(model)
    prompt = make_prompt(model, policies, options, directory)
    ids = prompt.ids(model)
    runs = {
        one.label: partial(run_linked, model, prompt, one.policy, options.new_tokens, options.is_cold)
        for one in policies
    }
    runs[PLAIN] = partial(run_plain, model, plain, ids, options.new_tokens)
    rates = measure_rates(model.device, model.dtype)
    samples = rounds(runs, options.repeats, on_run)
    rates = rates.or_better(measure_rates(model.device, model.dtype))
    params = {one.label: one.policy.params for one in policies} | {PLAIN: {}}
    measured = [_measured(label, params[label], samples, len(ids), rates) for label in runs]
    return SyncResult(len(ids), object_bytes(prompt.store), rates, tuple(measured))


def with_full(policies: Sequence[Labelled]) -> list[Labelled]:
    """The policies, `full` first."""
    full = parse_grid(["full"])
    return [*full, *(one for one in policies if one.label != full[0].label)]


def make_prompt(model: Model, policies: Sequence[Labelled], options: PromptOptions, directory: Path) -> Prompt:
    """The prompt of the options, its chunks compiled for these policies."""
    require_positions(model, options.num_tokens, "fewer --chunks or --chunk-tokens")
    chunks = random_chunks(model, options.chunks, options.chunk_tokens, options.seed)
    prompt = Prompt(Store(directory / "objects"), tuple(chunks), random_tail(model, options.tail_tokens, options.seed))
    compile_for(model, prompt.store, chunks, policies)
    return prompt


def object_bytes(store: Store) -> int:
    return sum(store.path(key).stat().st_size for key in store.keys())


def _measured(
    label: str, params: dict[str, Any], samples: dict[str, list[Sample]], prompt_tokens: int, rates: Rates
) -> Measured:
    mine, full = samples[label], samples["full"]
    ttft, full_ttft = ([one.ttft_s for one in several] for several in (mine, full))
    fields = [name for name in asdict(mine[0]) if name != "tokens"]
    return Measured(
        label=label, params=params, ttft=Spread.of(ttft),
        median={name: median_of([getattr(one, name) for one in mine]) for name in fields},
        speedup=median_ratio(full_ttft, ttft), row_floor=prompt_tokens / mine[0].rows,
        floor_s=rates.floor_s(mine[0].bytes_read, mine[0].flops), samples=tuple(mine),
    )  # fmt: skip
