"""What PicConnector does with each feature of vLLM: the tests read this table, and docs/reference/vllm.md shows it.

A cell is right only if its test compares answers, of linked and of ordinary requests, with references that vLLM did
not compute: 5 of them in `make test-vllm`, 50 in `make vllm-matrix`, which keeps what it saw in
benchmarks/results/vllm_matrix.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import vllm_rig as rig

RIGHT, REFUSED, UNTRIED, GPU = "right", "rejected", "not tried", "needs a GPU"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "vllm_matrix.json"


@dataclass(frozen=True)
class Cell:
    """A feature of vLLM.

    Fields:
        verdict: `RIGHT`, `REFUSED`, `UNTRIED` or `GPU`.
        test: `file::function` below tests/in_vllm that sees it.
        says: of a refusal, words of its line; else what there is to know.
        tolerance: the largest |Δ log-probability| of an answer that is right.
    """

    verdict: str
    test: str = ""
    says: str = ""
    tolerance: float = 1e-4


@dataclass
class Count:
    """The answers of a cell that were compared, and the largest |Δ log-probability| among them."""

    linked: int = 0
    exact: int = 0
    difference: float = 0.0

    def add(self, is_linked: bool, difference: float) -> None:
        self.linked += is_linked
        self.exact += not is_linked
        self.difference = max(self.difference, difference)


class Answered:
    """Compares answers with their references, and counts them by feature.

    Args:
        per_cell: how many answers each cell has at least.
    """

    def __init__(self, per_cell: int) -> None:
        self.per_cell, self._counts = per_cell, dict[str, Count]()

    def check(self, feature: str, cases: Sequence[rig.Case], answers: Sequence[rig.Answer]) -> None:
        """All answers of a cell: each equals its reference, and says whether it was linked."""
        import vllm_rig as rig

        count = Count()
        for case, answer in zip(cases, answers, strict=True):
            state = None if answer.report is None else answer.report["state"]
            assert state in ((None,) if case.params is None else ("linked", "cached")), (feature, answer.report)
            difference = rig.difference(case, answer)
            assert difference <= CELLS[feature].tolerance, (feature, state, difference, case.params)
            count.add(state is not None, difference)
        self.record(feature, count)

    def record(self, feature: str, count: Count) -> None:
        """What a test of a cell has compared by itself."""
        assert CELLS[feature].verdict == RIGHT
        assert count.linked + count.exact >= self.per_cell and min(count.linked, count.exact) > 0
        self._counts[feature] = count

    def write(self, path: Path) -> None:
        """Write the counts with the date; those of other cells that the file has for this version of vLLM stay."""
        import vllm

        from pictool.runtime.machine import machine

        before = json.loads(path.read_text()) if path.exists() else {}
        cells = before["cells"] if before.get("vllm") == vllm.__version__ else {}
        date = datetime.now(UTC).date().isoformat()
        cells |= {feature: {**asdict(count), "date": date} for feature, count in self._counts.items()}
        ordered = {feature: cells[feature] for feature in CELLS if feature in cells}
        command = f"make vllm-matrix VLLM={'.'.join(vllm.__version__.split('.')[:2])}"
        content = {"command": command, "machine": machine(), "vllm": vllm.__version__, "cells": ordered}
        path.write_text(json.dumps(content, indent=1) + "\n")


_WHOLE, _FAMILY = "agreement_test.py::test_the_cell", "agreement_test.py::test_a_family"
_SCHEDULING, _OPTION = "scheduler_test.py::test_the_cell", "setup_test.py::test_options_that_are_refused"
_KIND, _PROCESS = "setup_test.py::test_models_that_are_refused", "process_test.py::test_in_processes"
_LATENT = "latents_test.py::test_the_cell"
_BF16 = "latents (MLA), YaRN; on a CPU with AMX, in bfloat16, to 0.1 (CacheBlend, whose rows rounding changes, to 0.2)"
_FP8 = "fp8_test.py::test_the_cell"
_CODED = "on a CPU, to 0.01: a number at a border of the code may fall on either side"
_LAYOUT = "setup_test.py::test_kinds_of_caches_that_are_refused"

# By area, then by feature.
MATRIX: Mapping[str, Mapping[str, Cell]] = {
    "models": {
        "llama": Cell(RIGHT, _WHOLE, "Yi and other descendants too"),
        "llama-one-head": Cell(RIGHT, _WHOLE, "Llama with one KV head"),
        "llama3": Cell(RIGHT, _WHOLE, "Llama with the RoPE scaling of Llama 3"),
        "qwen2": Cell(RIGHT, _WHOLE),
        "qwen3": Cell(RIGHT, _WHOLE),
        "mistral": Cell(RIGHT, _WHOLE, "without a window"),
        "phi3": Cell(RIGHT, _WHOLE),
        "gemma2": Cell(RIGHT, _WHOLE, "windows in every second layer"),
        "gemma3": Cell(RIGHT, _WHOLE, "text; windows in some layers"),
        "granite": Cell(RIGHT, _FAMILY, "layers add the residual themselves"),
        "glm4": Cell(RIGHT, _FAMILY),
        "ernie4_5": Cell(RIGHT, _FAMILY),
        "mixtral": Cell(RIGHT, _FAMILY, "experts"),
        "qwen3_moe": Cell(RIGHT, _FAMILY, "experts"),
        "olmoe": Cell(RIGHT, _FAMILY, "experts"),
        "granitemoe": Cell(RIGHT, _FAMILY, "experts"),
        "gpt_oss": Cell(RIGHT, _FAMILY, "experts, learned sinks, windows; weights that are not quantized"),
        "other families": Cell(
            REFUSED, "setup_test.py::test_families_that_are_not_tested_are_refused", "'olmo2' .* vLLM"
        ),
        "dynamic and long RoPE": Cell(
            REFUSED, "setup_test.py::test_rope_that_depends_on_the_length_is_refused", "RoPE"
        ),
        "deepseek_v2": Cell(RIGHT, _LATENT, _BF16, tolerance=0.1),
        "deepseek_v3": Cell(RIGHT, _LATENT, _BF16, tolerance=0.1),
        "latents without AMX, or in float32": Cell(
            REFUSED, "setup_test.py::test_latents_of_other_backends_are_refused", "CPU_MLA"
        ),
        "latents with unscaled RoPE": Cell(
            REFUSED, "setup_test.py::test_latents_that_are_rotated_another_way_are_refused", "unscaled RoPE"
        ),
        "M-RoPE": Cell(REFUSED, _KIND, "M-RoPE"),
        "models of images and text": Cell(REFUSED, _KIND, "multimodal"),
        "hybrids with Mamba layers": Cell(REFUSED, _LAYOUT, "MambaSpec"),
        "a sliding window in every layer": Cell(
            REFUSED, "setup_test.py::test_an_engine_does_not_start_with_them", "SlidingWindowSpec"
        ),
        "pooling models": Cell(REFUSED, _OPTION, "pooling models"),
    },
    "weights and KV": {
        "weights of compressed-tensors or fp8": Cell(
            REFUSED, "setup_test.py::test_quantized_weights_are_refused", "quantized weights"
        ),
        "weights of torchao": Cell(
            REFUSED, "setup_test.py::test_configurations_that_are_refused", "quantized weights"
        ),
        "weights of AWQ, GPTQ, MXFP4 and others": Cell(UNTRIED, says="the same line refuses all"),
        "--kv-cache-dtype fp8": Cell(RIGHT, _FP8, _CODED, 0.01),
        "--kv-cache-dtype fp8_e5m2": Cell(RIGHT, _FP8, _CODED, 0.01),
        "--kv-cache-dtype fp8 with the router, or `compile`": Cell(
            REFUSED, "setup_test.py::test_nothing_is_compiled_from_coded_kv", "coded KV"
        ),
        "other --kv-cache-dtype, and fp8 on a GPU": Cell(
            REFUSED, "setup_test.py::test_a_cache_of_another_dtype_is_refused", "kv_cache_dtype"
        ),
        "--load-format dummy": Cell(REFUSED, _OPTION, "load_format dummy"),
        "--hf-overrides": Cell(REFUSED, _OPTION, "hf_overrides"),
        "--revision": Cell(REFUSED, _OPTION, "revision"),
        "--tokenizer elsewhere": Cell(
            REFUSED, "setup_test.py::test_configurations_that_are_refused", "a tokenizer of its own"
        ),
        "LoRA: requests of the base model": Cell(
            RIGHT, "lora_test.py::test_requests_of_the_base_model_are_linked",
            "on a CPU vLLM itself computes a whole batch with the adapter of one of its requests",
        ),
        "LoRA: requests of an adapter": Cell(
            RIGHT, "lora_test.py::test_requests_of_an_adapter_are_linked",
            "objects that vLLM compiled under it (the field `compile`)",
        ),
    },
    "scheduling": {
        "prefix caching": Cell(RIGHT, _SCHEDULING),
        "no prefix caching": Cell(RIGHT, _SCHEDULING),
        "chunked prefill": Cell(RIGHT, _SCHEDULING),
        "preemption": Cell(RIGHT, "scheduler_test.py::test_preemption_and_resume"),
        "--scheduling-policy priority": Cell(
            RIGHT, "features_test.py::test_requests_of_a_high_priority_push_out_others"
        ),
        "torch.compile": Cell(RIGHT, _SCHEDULING),
        "torch.compile with LoRA": Cell(GPU, says="vLLM's CPU build switches compilation off"),
        "asynchronous scheduling": Cell(
            GPU, "async_scheduling_test.py::test_links_beside_others_are_exact",
            "vLLM's CPU build switches it off; forced on there, answers are right",
        ),
        "model runner V2, CUDA graphs": Cell(
            GPU, "gpu_test.py::test_loads_in_the_order_of_model_runner_v2", "its code for connectors is right"
        ),
        "FlashAttention, FlashInfer, FlexAttention, Triton": Cell(
            GPU, "gpu_test.py::test_passes_of_a_backend_that_holds_so_many_sequences", "their limits are kept"
        ),
        "speculative decoding by n-grams": Cell(RIGHT, _PROCESS),
        "speculative decoding by a model": Cell(
            REFUSED, "setup_test.py::test_drafts_of_a_model_are_refused", "n-grams"
        ),
    },
    "processes": {
        "--tensor-parallel-size 2": Cell(RIGHT, _PROCESS),
        "--tensor-parallel-size 2, a KV head on several ranks": Cell(RIGHT, _PROCESS),
        "--data-parallel-size 2": Cell(RIGHT, "process_test.py::test_two_engines_behind_two_servers"),
        "--api-server-count 2": Cell(RIGHT, "process_test.py::test_two_engines_behind_two_servers"),
        "--pipeline-parallel-size 2": Cell(REFUSED, _OPTION, "pipeline parallelism"),
        "--decode-context-parallel-size 2": Cell(
            REFUSED, "setup_test.py::test_configurations_that_are_refused", "context parallelism"
        ),
        "--enable-dbo": Cell(REFUSED, "setup_test.py::test_configurations_that_are_refused", "dual-batch"),
        "MultiConnector": Cell(
            REFUSED, "setup_test.py::test_connectors_beside_it_are_refused", "MultiConnector "
        ),
        "OffloadingConnector beside it": Cell(
            REFUSED, "setup_test.py::test_connectors_beside_it_are_refused", "MultiConnector "
        ),
        "--kv-offloading-size": Cell(
            REFUSED, "setup_test.py::test_an_option_that_replaces_the_connector_is_refused",
            "--kv-offloading-size ",
        ),
    },
    "requests": {
        "n > 1": Cell(RIGHT, "features_test.py::test_several_answers_to_a_request"),
        "structured output": Cell(RIGHT, "features_test.py::test_answers_of_a_given_structure"),
        "beam search": Cell(RIGHT, "matching_test.py::test_beam_search", "of recognised documents"),
        "echo": Cell(RIGHT, "process_test.py::test_the_openai_server"),
        "echo with logprobs": Cell(
            REFUSED, "process_test.py::test_the_openai_server", "log-probabilities of the prompt"
        ),
        "prompt_logprobs": Cell(
            REFUSED, "failure_test.py::test_log_probabilities_of_the_prompt_are_exact",
            "log-probabilities of the prompt",
        ),
        "prompts of embeddings": Cell(
            REFUSED, "features_test.py::test_a_prompt_of_embeddings_is_computed_and_says_so",
            "a prompt of embeddings has no tokens to link",
        ),
        "media, streamed input": Cell(UNTRIED, says="refused in the response"),
    },
}  # fmt: skip
CELLS: Mapping[str, Cell] = {feature: cell for area in MATRIX.values() for feature, cell in area.items()}
