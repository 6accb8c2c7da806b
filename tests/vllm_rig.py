"""What the tests inside vLLM share: tiny models, documents, our link as the reference, an engine with PicConnector."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from pictool.api import compile, link
from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import CODEC, object_key
from pictool.compiler.contexts import PREVIOUS
from pictool.core import Chunk, CompileOptions, TokenIds
from pictool.linker.grid import parse_grid
from pictool.linker.link import Linked
from pictool.linker.policies import make_policy as make_policy
from pictool.linker.policies.base import Policy
from pictool.recognition.matches import Match
from pictool.runtime.model import Model, load_model
from pictool.store.objects.format import CompiledChunk
from pictool.store.store import Store

TOLERANCE = 1e-4
OPTIONS = CompileOptions(after=PREVIOUS)
HEAD, TAIL = "<s>You are a harbour.", " Numbers? She asked why."
LENGTHS = (37, 5, 70, 33, 37)  # none aligned to blocks; one is shorter than k, one is there twice
MODULE = "pictool.engines.vllm.connector"
POLICIES = (  # all that link in vLLM, but for SpecCache, which needs a second model
    "full", "naive", "legolink-4", "legolink-16", "legolink-1", "cacheblend-15", "cacheblend-30:on=kv",
    "cacheblend-15:filter=single", "cacheblend-0", "cacheblend-100",
)  # fmt: skip

SIZE: dict[str, Any] = {
    "vocab_size": tiny.VOCAB, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.08,
}  # fmt: skip
_NO_HEAD_DIM = {name: value for name, value in SIZE.items() if name != "head_dim"}
_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64}  # fmt: skip
_EXPERTS = {**tiny.EXPERTS, "moe_intermediate_size": 64}
_LATENTS: dict[str, Any] = {  # the widths that vLLM's kernels for a CPU take; without experts
    **tiny.LATENTS, "q_lora_rank": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64,
    "v_head_dim": 64, "head_dim": 64, "first_k_dense_replace": 4,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512,
         "mscale": 1.0, "mscale_all_dim": 0.7}  # fmt: skip
_GRANITE = {
    "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.5
}  # fmt: skip


def _of(model_type: str, **more: Any) -> PretrainedConfig:
    """A configuration of the common size, with fields of its own."""
    return AutoConfig.for_model(model_type, **{**SIZE, **more})


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZE),
    "llama-one-head": lambda: LlamaConfig(**{**SIZE, "num_key_value_heads": 1}),
    "llama3": lambda: LlamaConfig(**SIZE, rope_parameters=_ROPE),
    "qwen2": lambda: Qwen2Config(**_NO_HEAD_DIM, use_sliding_window=False),
    "qwen3": lambda: Qwen3Config(**SIZE),
    "mistral": lambda: MistralConfig(**SIZE, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**SIZE, sliding_window=48),
    "phi3": lambda: Phi3Config(**_NO_HEAD_DIM),
    "phi3-long": lambda: Phi3Config(
        **_NO_HEAD_DIM, original_max_position_embeddings=128,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 16,
                         "long_factor": [2.0] * 16, "original_max_position_embeddings": 128},
    ),
    "llama-dynamic": lambda: LlamaConfig(
        **SIZE, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
    ),
    "gemma2": lambda: Gemma2Config(**SIZE, sliding_window=48, query_pre_attn_scalar=32),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZE, sliding_window=48, query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "granite": lambda: _of("granite", **_GRANITE),
    "glm4": lambda: _of(
        "glm4", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "ernie4_5": lambda: _of("ernie4_5"),
    "mixtral": lambda: _of("mixtral", **_EXPERTS, sliding_window=None),
    "qwen3_moe": lambda: _of("qwen3_moe", **_EXPERTS),
    "olmoe": lambda: _of("olmoe", **_EXPERTS),
    "granitemoe": lambda: _of("granitemoe", **_EXPERTS, **_GRANITE),
    "gpt_oss": lambda: _of(
        "gpt_oss", **_EXPERTS, sliding_window=48, layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                         "original_max_position_embeddings": 512, "truncate": False},
    ),
    "deepseek_v2": lambda: _of("deepseek_v2", **_LATENTS, rope_parameters=_YARN),
    "deepseek_v3": lambda: _of("deepseek_v3", **_LATENTS, rope_parameters=_YARN),
}  # fmt: skip
LATENTS = ("deepseek_v2", "deepseek_v3")
REFUSED = ("mistral-window", "phi3-long", "llama-dynamic")
MORE = ("granite", "glm4", "ernie4_5", "mixtral", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss")


def policy_of(spec: str) -> Policy:
    return parse_grid([spec])[0].policy


def ids(*tokens: int) -> TokenIds:
    return np.asarray(tokens, dtype=np.int32)


def match(key: str, start: int, *tokens: int, offset: int = 0) -> Match:
    return Match(key, start, ids(*tokens), offset)


def chunk(*tokens: int) -> Chunk:
    return Chunk(str(tokens), tokens, "test")


def random_chunks(lengths: Sequence[int], seed: int = 0) -> list[Chunk]:
    """Random chunks; equal lengths are the same chunk."""
    made = {}
    for length in lengths:
        draw = np.random.default_rng([seed, length]).integers(3, tiny.VOCAB, length)
        made[length] = Chunk(f"chunk of {length}", tuple(int(token) for token in draw), "test")
    return [made[length] for length in lengths]


def text_chunks(model: Model) -> list[Chunk]:
    """Chunks of real text."""
    texts = [f"Page {i}: {tiny.TEXT[i : i + 90]}" for i in range(0, 60, 20)]
    return [make_chunk(model, text, f"page {i}") for i, text in enumerate(texts)]


def spelled(model: Model, token: int) -> tuple[int, ...]:
    """Other tokens of a token's text: one for each character."""
    text = model.tokenizer.decode([token])
    tokens = tuple(itertools.chain.from_iterable(model.encode(character) for character in text))
    assert len(text) > 1 and token not in tokens
    return tokens


@dataclass(frozen=True)
class Case:
    """A prompt of documents as the torch engine links it; `params` ask vLLM for the same."""

    tokens: list[int]
    params: dict[str, Any] | None
    linked: Linked
    salt: str | None = None

    def logprobs(self, answer: Sequence[int]) -> torch.Tensor:
        """The reference's log-probabilities at every token of an answer, [tokens, vocab]. To be called once."""
        image = self.linked.image
        assert image.logits is not None
        logits = [image.logits, *(image.append(token) for token in answer[:-1])]
        return torch.stack(logits).double().log_softmax(-1)


@dataclass(frozen=True)
class World:
    """A model directory, the store of its objects, and the model for the torch engine."""

    directory: Path
    store: Store
    model: Model

    def case(
        self, spec: str | Policy, lengths: Sequence[int] = LENGTHS, *, chunks: Sequence[Chunk] | None = None,
        seed: int = 0, head: str = HEAD, tail: str = TAIL,
    ) -> Case:  # fmt: skip
        """Compile chunks (random ones of these lengths), link them by the torch engine, and name them to vLLM."""
        policy = policy_of(spec) if isinstance(spec, str) else spec
        chunks = random_chunks(lengths, seed) if chunks is None else chunks
        compile(self.model, self.store, chunks)
        linked = link(self.model, self.store, chunks, tail, policy, head=head)
        return case_of(self, linked, chunks)

    def exact(self, lengths: Sequence[int] = LENGTHS, **options: Any) -> Case:
        """The same prompt without linking."""
        case = self.case("full", lengths, **options)
        return Case(case.tokens, None, case.linked)


def case_of(world: World, linked: Linked, chunks: Sequence[Chunk], options: CompileOptions = OPTIONS) -> Case:
    """A link as a case for vLLM: chunks by key and start."""
    layout, policy = linked.image.layout, linked.policy
    keys = [object_key(world.model, chunk, options) for chunk in chunks]
    places = [{"key": key, "start": start} for key, (start, _) in zip(keys, layout.chunks, strict=True)]
    params = {"pic": {"chunks": places, "policy": {"algo": policy.name, **policy.params}}}
    return Case(layout.tokens.tolist(), params, linked)


def mixed(world: World, number: int, **options: Any) -> list[Case]:
    """Linked requests and ordinary ones in turn, each over documents of its own."""
    specs = ("naive", "legolink-4", "legolink-1", "cacheblend-15", None)
    chosen = [(seed, specs[seed % len(specs)]) for seed in range(number)]
    return [
        world.exact(seed=seed, **options) if spec is None else world.case(spec, seed=seed, **options)
        for seed, spec in chosen
    ]


def forget_head(world: World, case: Case) -> None:
    """Remove the object of a case's head, whose tokens vLLM then computes."""
    head = case.linked.image.layout.tokens[: case.linked.image.layout.chunks[0][0]]
    world.store.path(world.model.target.key(head, CODEC)).unlink(missing_ok=True)


def part_of(world: World, chunk: Chunk, tokens: slice) -> World:
    """A world whose store has a part of a chunk as the object of that part's tokens, with the KV of the whole."""
    (whole,) = compile(world.model, world.store, [chunk])
    part, geometry = chunk.tokens[tokens], world.model.geometry
    shape = geometry.kv_heads, len(chunk), geometry.head_dim
    with world.store.peek(whole.key) as file:
        arrays = [[np.frombuffer(data, np.float32) for data in file.layer(i)] for i in range(geometry.layers)]
        key_and_value = [[data.reshape(shape)[:, tokens].tobytes() for data in pair] for pair in arrays]
        key = object_key(world.model, Chunk("", part, ""), OPTIONS)
        meta = replace(file.meta, key=key, num_tokens=len(part))
    store = Store(world.store.root.with_name("parts"))
    store.put(
        CompiledChunk(meta, "part", np.asarray(part, dtype=np.int32), [(key, value) for key, value in key_and_value])
    )
    return World(world.directory, store, world.model)


def make_world(directory: Path, name: str = "llama", seed: int = 0, dtype: str = "float32") -> World:
    """A random model whose context matters, and an empty store."""
    path = directory / name
    module = tiny.random_module(CONFIGS[name](), seed, std=0.08)
    module.save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return World(path, Store(directory / "store"), load_model(str(path), "cpu", dtype))


@dataclass(frozen=True)
class Answer:
    """What vLLM answered: tokens, their log-probabilities over the vocabulary, and the connector's report."""

    tokens: list[int]
    logprobs: torch.Tensor
    report: dict[str, Any] | None


class Engine:
    """An offline vLLM with PicConnector, in this process."""

    def __init__(self, world: World, extra: Mapping[str, Any] | None = None, **options: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        config = KVTransferConfig(
            kv_connector="PicConnector", kv_connector_module_path=MODULE, kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"store": str(world.store.root), "any_model": True, **(extra or {})},
        )  # fmt: skip
        try:
            self.llm: Any = LLM(str(world.directory), kv_transfer_config=config, **(default_options() | options))
        except BaseException:  # else the next engine in this process gets the connector of this one
            ensure_kv_transfer_shutdown()
            raise

    def ask(self, *cases: Case, num_tokens: int = 4, options: Mapping[str, Any] = {}, **sampling: Any) -> list[Answer]:
        """Answer prompts, all in one batch, greedily; with `n`, the answers of a prompt one after the other.

        Args:
            options: of `LLM.generate`. sampling: more of `SamplingParams`.
        """
        from vllm import SamplingParams

        salts = [{} if case.salt is None else {"cache_salt": case.salt} for case in cases]
        prompts = [{"prompt_token_ids": case.tokens, **salt} for case, salt in zip(cases, salts, strict=True)]
        common = {"max_tokens": num_tokens, "temperature": 0, "logprobs": -1, "ignore_eos": True, "detokenize": False}
        extra = [None if case.params is None else {"kv_transfer_params": case.params} for case in cases]
        params = [SamplingParams(**{**common, **sampling, "extra_args": each}) for each in extra]
        outputs = self.llm.generate(prompts, params, use_tqdm=False, **options)
        return [_answer(output, completion) for output in outputs for completion in output.outputs]

    def metric(self, name: str) -> float:
        """A counter of vLLM's metrics."""
        return float(sum(metric.value for metric in self.llm.get_metrics() if metric.name == f"vllm:{name}"))

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()


def default_options() -> dict[str, Any]:
    return {
        "enforce_eager": True, "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "max_logprobs": -1,
        "max_num_batched_tokens": 512, "block_size": 32, "disable_log_stats": False, "seed": 0,
        "kv_cache_memory_bytes": 64 << 20,
    }  # fmt: skip


def _answer(output: Any, completion: Any) -> Answer:
    logprobs = torch.full((len(completion.token_ids), tiny.VOCAB), float("nan"), dtype=torch.float64)
    for row, entries in zip(logprobs, completion.logprobs, strict=True):
        for token, entry in entries.items():
            row[token] = entry.logprob
    assert not logprobs.isnan().any()
    return Answer(list(completion.token_ids), logprobs, (output.kv_transfer_params or {}).get("pic"))


def difference(case: Case, answer: Answer) -> float:
    """The largest |Δ log-probability| over the vocabulary at any token of the answer."""
    return float((case.logprobs(answer.tokens) - answer.logprobs).abs().max())


@cache
def small_environment() -> None:
    """One thread, one process, no network; before vllm is imported."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip


def set_chat_template(world: World) -> None:
    """A template that puts a user's message between `<s>user:` and `assistant:`, after the documents in tags."""
    tokenizer = load_model(str(world.directory), "cpu").tokenizer
    documents = "{% for d in documents or [] %}<doc>{{ d['text'] }}</doc>{% endfor %}"
    template = "{{ bos_token }}" + documents + "user:{% for m in messages %}{{ m['content'] }}{% endfor %}assistant:"
    tokenizer.chat_template = template
    tokenizer.save_pretrained(world.directory)


def link_tokens(world: World, chunks: Sequence[Chunk], last: Chunk) -> torch.Tensor:
    """Log-probabilities after a prompt whose last chunk is reused but for its last token, computed by our runtime."""
    cut = Chunk("", last.tokens[:-1], "cut")
    compile(world.model, world.store, [*chunks, cut])
    linked = link(world.model, world.store, [*chunks, cut], TAIL, policy_of("naive"), head=HEAD)
    image = linked.image
    image.num_tokens = image.layout.num_context
    return image.append(last.tokens[-1]).double().log_softmax(-1)
