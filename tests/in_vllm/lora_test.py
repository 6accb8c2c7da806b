"""LoRA adapters: the base model's objects are linked for its own requests, and never for those of an adapter."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm_rig as rig
from safetensors.torch import load_file, save_file
from vllm_matrix import Answered

from pictool.compiler.compile import object_key
from pictool.compiler.contexts import PREVIOUS, contexts_of
from pictool.core import Chunk, CompileOptions
from pictool.engines.vllm.scheduler.matching import adapted
from pictool.runtime.model import load_model
from pictool.store.store import Store


def adapter(directory: Path, seed: int = 3) -> Path:
    """A LoRA adapter of the tiny Llama whose weights are random."""
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 32, "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj"],
    }  # fmt: skip
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(config))
    hidden, widths = rig.SIZE["hidden_size"], {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(rig.SIZE["num_hidden_layers"]):
        for name, width in widths.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{path}.lora_A.weight"] = torch.randn(8, hidden, generator=draw) * 0.1
            weights[f"{path}.lora_B.weight"] = torch.randn(width, 8, generator=draw) * 0.1
    save_file(weights, directory / "adapter_model.safetensors")
    return directory


def merged(world: rig.World, path: Path) -> rig.World:
    """The base model with the adapter's weights added to its own."""
    weights = load_file(path / "adapter_model.safetensors")
    tensors = load_file(world.directory / "model.safetensors")
    for name in tensors:
        lora = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{lora}.lora_A.weight" in weights:
            tensors[name] += 32 / 8 * weights[f"{lora}.lora_B.weight"] @ weights[f"{lora}.lora_A.weight"]
    directory = path.with_name(f"merged {path.name}")
    directory.mkdir()
    for file in world.directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return rig.World(directory, Store(directory / "store"), load_model(str(directory), "cpu", "float32"))


@dataclass(frozen=True)
class Tuned:
    """An engine with an adapter, the base model, and the base model with the adapter's weights in its own.

    `under` has what the engine's store has for the adapter.
    """

    engine: rig.Engine
    base: rig.World
    own: rig.World
    lora: Any

    @property
    def under(self) -> rig.World:
        model = copy(self.base.model)
        vars(model)["target"] = adapted(model.target, self.lora.lora_path)
        return rig.World(self.base.directory, self.base.store, model)

    def compile(self, chunks: Sequence[Chunk]) -> None:
        """Compile chunks in vLLM under the adapter."""
        for chunk in chunks:
            (before,) = contexts_of(self.base.model, chunk, CompileOptions(after=PREVIOUS))
            tokens = [*before, *chunk.tokens, 5]
            params = {"pic": {"compile": {"text": chunk.text, "before": len(before)}}}
            (answer,) = self.ask(rig.Case(tokens, params, None), num_tokens=1)  # type: ignore[arg-type]
            assert answer.report is not None and answer.report["state"] == "compiled"

    def cases(self, number: int, seed: int = 0) -> list[rig.Case]:
        """Requests of the adapter in turn linked and not; the reference is a model with its weights."""
        specs = ("naive", "legolink-4", "legolink-1", "cacheblend-15", None)
        chunks, cases, under = rig.text_chunks(self.base.model), list[rig.Case](), self.under
        for turn in range(seed, seed + number):
            spec, tail = specs[turn % len(specs)], f" Question {turn}?"
            order = [chunks[i] for i in np.random.default_rng(turn).permutation(len(chunks))]
            case = self.own.case(spec or "full", chunks=order, tail=tail)
            if spec is None:
                cases.append(rig.Case(case.tokens, None, case.linked))
                continue
            keys = [object_key(under.model, chunk, CompileOptions(after=PREVIOUS)) for chunk in order]
            self.compile([chunk for chunk, key in zip(order, keys, strict=True) if not under.store.has(key)])
            cases.append(rig.case_of(under, case.linked, order))
        return cases

    def ask(self, *cases: rig.Case, num_tokens: int = 4) -> list[rig.Answer]:
        """Ask the adapter."""
        return self.engine.ask(*cases, num_tokens=num_tokens, options={"lora_request": [self.lora] * len(cases)})


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any]) -> Tuned:
    from vllm.lora.request import LoRARequest

    root = tmp_path_factory.mktemp("lora")
    world = rig.make_world(root, "llama")
    path = adapter(root / "adapter")
    engine = start(world, {"compile": True}, enable_prefix_caching=True, enable_lora=True, max_lora_rank=8)
    return Tuned(engine, world, merged(world, path), LoRARequest("tuned", 1, str(path)))


@pytest.fixture(scope="module")
def other(tuned: Tuned) -> Tuned:
    """Another adapter on the same engine, which has a place for one."""
    from vllm.lora.request import LoRARequest

    path = adapter(Path(tuned.lora.lora_path).with_name("other"), seed=4)
    return Tuned(tuned.engine, tuned.base, merged(tuned.base, path), LoRARequest("other", 2, str(path)))


def test_requests_of_an_adapter_are_linked(tuned: Tuned, answered: Answered) -> None:
    cases = tuned.cases(answered.per_cell)
    answered.check("LoRA: requests of an adapter", cases, tuned.ask(*cases))


def test_requests_of_two_adapters_for_whom_there_is_one_place(tuned: Tuned, other: Tuned) -> None:
    """Each is linked under its own, one after the other."""
    linked = other.cases(5, seed=50)
    requests, loras = [tuned.own.exact(seed=82), *linked], [tuned.lora, *[other.lora] * len(linked)]
    answer, *beside = tuned.engine.ask(*requests, num_tokens=30, options={"lora_request": loras})
    assert rig.difference(requests[0], answer) <= rig.TOLERANCE
    for case, given in zip(linked, beside, strict=True):
        assert rig.difference(case, given) <= rig.TOLERANCE
        assert case.params is None or (given.report is not None and given.report["state"] == "linked")


def test_objects_of_an_adapter_are_not_linked_for_others(tuned: Tuned, other: Tuned) -> None:
    """Nor for the base model: each computes them as if they were missing."""
    case = tuned.cases(1)[0]
    for answer in (*tuned.engine.ask(case), *other.ask(case)):
        assert answer.report is not None and answer.report["state"] == "exact"
        assert "no usable object" in answer.report["problem"]


def test_objects_are_never_linked_under_an_adapter(tuned: Tuned) -> None:
    """They are the base model's. What was linked for it is none of the adapter's either."""
    cases = rig.mixed(tuned.base, 5)
    tuned.engine.ask(*cases)
    for seed, (case, answer) in enumerate(zip(cases, tuned.ask(*cases), strict=True)):
        assert rig.difference(tuned.own.exact(seed=seed), answer) <= rig.TOLERANCE
        if case.params is not None:
            assert answer.report is not None and answer.report["state"] == "exact"
            assert "no usable object" in answer.report["problem"]


def test_requests_of_the_base_model_are_linked(tuned: Tuned, answered: Answered) -> None:
    tuned.ask(tuned.own.exact(seed=80))  # its weights are in the layers from here on
    cases = rig.mixed(tuned.base, answered.per_cell)
    answered.check("LoRA: requests of the base model", cases, tuned.engine.ask(*cases))


def test_links_are_computed_while_an_adapter_s_request_decodes(tuned: Tuned) -> None:
    """vLLM's CPU kernels give a whole batch the adapter that one of its requests has, also without this connector.

    So the linked blocks are seen by questions that come later, alone.
    """
    cases = [tuned.base.case("legolink-16", seed=seed) for seed in range(90, 95)]
    requests, loras = [tuned.own.exact(seed=81), *cases], [tuned.lora, *[None] * len(cases)]
    answer, *beside = tuned.engine.ask(*requests, num_tokens=30, options={"lora_request": loras})
    assert rig.difference(requests[0], answer) <= rig.TOLERANCE
    assert all(given.report is not None and given.report["state"] == "linked" for given in beside)
    before = tuned.engine.metric("prefix_cache_hits")
    later = [tuned.base.case("legolink-16", seed=seed, tail=" Why?") for seed in range(90, 95)]
    for case, given in zip(later, tuned.engine.ask(*later), strict=True):
        assert rig.difference(case, given) <= rig.TOLERANCE
    assert tuned.engine.metric("prefix_cache_hits") > before
