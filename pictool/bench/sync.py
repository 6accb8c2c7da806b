"""One request after another (EPIC §5.2, synchronous): all policies, `full` and `transformers`, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.bench.options import PromptOptions
from pictool.bench.prompts import make_prompt
from pictool.bench.repeats import MedianRange, OnRun, interleave, median_or_none, median_ratio
from pictool.bench.single_request import Measurement, baselines_of, run_linked
from pictool.linker.grid import LabelledPolicy, parse_grid
from pictool.linker.policies import BASELINE

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class MethodResult:
    """One policy, or `transformers`, over all repeats. Fields are the keys of the JSON.

    Fields:
        median: of the samples, field by field; None where the method has no such field.
        speedup: median of the repeats' ratios: TTFT of full ÷ this one's.
        row_floor: the speedup that the rows allow: tokens of the prompt ÷ rows.
    """

    label: str
    params: dict[str, Any]
    ttft: MedianRange
    median: dict[str, float | None]
    speedup: float
    row_floor: float
    samples: tuple[Measurement, ...]


@dataclass(frozen=True)
class SyncResult:
    """`methods`: `full` first, then the policies in their order, `transformers` last (not for GGUF files)."""

    prompt_tokens: int
    object_bytes: int
    methods: tuple[MethodResult, ...]

    def report(self) -> dict[str, Any]:
        return asdict(self)


def bench_sync(
    model: Model,
    policies: Sequence[LabelledPolicy],
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
    policies = with_full(policies)
    prompt = make_prompt(model, policies, options, directory)
    ids = prompt.ids(model)
    runs: dict[str, Callable[[], Measurement]] = {
        labelled.label: partial(run_linked, model, prompt, labelled.policy, options.new_tokens, options.is_cold)
        for labelled in policies
    }
    runs |= baselines_of(model)(ids, options.new_tokens)
    samples = interleave(runs, options.repeats, on_run)
    params = {labelled.label: labelled.policy.params for labelled in policies}
    methods = [_method_result(label, params.get(label, {}), samples, len(ids)) for label in runs]
    object_bytes = sum(prompt.store.path(key).stat().st_size for key in prompt.store.keys())
    return SyncResult(len(ids), object_bytes, tuple(methods))


def with_full(policies: Sequence[LabelledPolicy]) -> list[LabelledPolicy]:
    """The policies, `full` first."""
    full = parse_grid([BASELINE])
    return [*full, *(labelled for labelled in policies if labelled.label != full[0].label)]


def _method_result(
    label: str, params: dict[str, Any], samples: dict[str, list[Measurement]], prompt_tokens: int
) -> MethodResult:
    own, first = samples[label], samples[label][0]
    ttft, full_ttft = ([sample.ttft_s for sample in several] for several in (own, samples[BASELINE]))
    fields = [name for name in asdict(first) if name != "tokens"]
    return MethodResult(
        label=label, params=params, ttft=MedianRange.of(ttft),
        median={name: median_or_none([getattr(sample, name) for sample in own]) for name in fields},
        speedup=median_ratio(full_ttft, ttft), row_floor=prompt_tokens / first.rows,
        samples=tuple(own),
    )  # fmt: skip
