"""The engine behind `--engine vllm`: an offline vLLM with PicConnector that answers requests and compiles chunks."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import CODEC, Compiled, object_key, sink_tokens
from pictool.core import Chunk, Layout
from pictool.engines.torch import Comparison, Request, first_token_kl
from pictool.engines.vllm.request import FIELD, needs_of
from pictool.errors import InputError, ModelError, ObjectError, StoreError
from pictool.linker.link import lay_out
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy, Prompt, Table
from pictool.linker.resolve import Part, resolve_documents
from pictool.runtime.decode import Generated, Sampling, TextStream
from pictool.runtime.model import Model
from pictool.runtime.template import make_frame
from pictool.store.format import ObjectFile
from pictool.store.store import Store, atomic_write

ENGINE = "vllm"
CONNECTOR = "pictool.engines.vllm.connector"


@dataclass(frozen=True)
class Answer:
    """The answer to a request. `logprobs` are the first token's, float32 [vocab], if it was compared."""

    generated: Generated
    policy: Policy
    layout: Layout
    recomputed: float
    timing: Mapping[str, float]
    model: str
    logprobs: torch.Tensor | None = None
    compare: Comparison | None = None

    @property
    def text(self) -> str:
        return self.generated.text.strip()

    def report(self) -> dict[str, Any]:
        """The JSON of `pic link --json` (docs/design.md §6)."""
        layout = self.layout
        return {
            "answer": self.text,
            "algo": self.policy.name,
            "params": self.policy.params,
            "model": self.model,
            "engine": ENGINE,
            "tokens": {
                "head": layout.starts[1],
                "context": layout.num_context,
                "tail": layout.num_tokens - layout.num_context,
                "prompt": layout.num_tokens,
                "recomputed": self.recomputed,
                "generated": len(self.generated.tokens),
            },
            "timing": dict(self.timing),
            "compare": self.compare.report() if self.compare else None,
        }


class Engine:
    """A running vLLM. A context manager; starting one takes seconds, so many requests should share it.

    Args:
        max_model_len: the longest sequence, in tokens (default: the model's).
        options: more arguments of `vllm.LLM`, as gpu_memory_utilization.
    """

    def __init__(
        self, model: Model, store: Store, *, max_model_len: int | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        if model.directory is None:
            raise ModelError(f"{model.name}: vLLM loads models from directories; save it first")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # no second process for one caller
        from vllm import LLM
        from vllm.config import KVTransferConfig

        extra = {"store": str(store.root), "compile": True, "any_model": True, "device": model.device}
        transfer = KVTransferConfig(
            kv_connector="PicConnector", kv_connector_module_path=CONNECTOR, kv_role="kv_both",
            kv_load_failure_policy="recompute", kv_connector_extra_config=extra,
        )  # fmt: skip
        arguments = {
            "dtype": model.dtype, "max_model_len": max_model_len or model.max_positions, "max_logprobs": -1,
            "enable_prefix_caching": False, "disable_log_stats": False, "kv_transfer_config": transfer,
        }  # fmt: skip
        self._model, self._store = model, store
        self._llm: Any = LLM(str(model.directory), **(arguments | dict(options or {})))
        self._request_ids = map(str, itertools.count())

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop vLLM and free its memory."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()

    def answer(
        self,
        request: Request,
        *,
        compare: bool = False,
        on_text: Callable[[str], None] | None = None,
        on_compile: Callable[[Compiled], None] | None = None,
    ) -> Answer:
        """Link, decode, and (with `compare`) do the same under vLLM's own full prefill.

        Raises:
            PicError: an unusable document or object, or a prompt that is too long.
        """
        parts, layout = _lay_out(self._model, self._store, request)
        if needs_of(request.policy).objects and parts:
            self._store_objects([*_head_part(self._model, request), *parts], on_compile)
        params = link_params(self._model, parts, layout, request.policy)
        if compare:  # what only the first run of each sets up is not timed
            self._run(layout, params)
            self._run(layout, None)
        linked = self._answer(request, layout, params, request.policy, on_text, compare)
        if not compare:
            return linked
        full = self._answer(request, layout, None, make_policy("full", {}), None, compare)
        return replace(linked, compare=compare_answers(linked, full))

    def compile(
        self,
        chunks: Iterable[Chunk | str],
        *,
        sinks: int = 0,
        force: bool = False,
        on_done: Callable[[Compiled], None] | None = None,
    ) -> list[Compiled]:
        """Compile chunks (or texts) by vLLM's own prefill; equal to the torch engine's objects up to the dtype's noise.

        Raises:
            PicError: a text without tokens, sinks without BOS, or a store that cannot be written.
        """
        to_compile = _make_chunks(self._model, chunks)
        done: list[Compiled] = []
        prefix = sink_tokens(self._model, sinks)
        for chunk in to_compile:
            key = object_key(self._model, chunk, sinks)
            is_new = (force and key not in {compiled.key for compiled in done}) or not self._store.has(key)
            if is_new:
                self._compile(chunk, [*prefix, *chunk.tokens, chunk.tokens[-1]], sinks)
            done.append(Compiled(chunk, key, self._store.path(key), is_new))
            if on_done is not None:
                on_done(done[-1])
        return done

    def _compile(self, chunk: Chunk, tokens: Sequence[int], sinks: int) -> None:
        if len(tokens) >= self._llm.model_config.max_model_len:
            raise InputError(f"{chunk.source}: {len(tokens)} tokens, too long for this engine; cut it (--chunk-tokens)")
        params = {FIELD: {"compile": {"text": chunk.text, "sinks": sinks}}}
        *_, last = self._steps(tokens, self._sampling_params(Sampling(), 1, params, None))
        report = last.kv_transfer_params[FIELD]
        if report["state"] != "compiled":
            raise InputError(f"{chunk.source}: cannot be compiled ({report['problem']})")

    def _store_objects(self, parts: Sequence[Part], on_compile: Callable[[Compiled], None] | None) -> None:
        """Have every part's object in the store: compile it, or copy it if it was given as a file of its own."""
        for part in parts:
            target = self._store.path(part.key(self._model))
            if part.path is None:
                for done in self.compile([part.chunk], sinks=part.sinks):
                    if done.is_new and on_compile is not None:
                        on_compile(done)
            elif part.path.resolve() != target.resolve():
                with atomic_write(target, self._store.root / "tmp") as out, part.path.open("rb") as file:
                    shutil.copyfileobj(file, out, 1 << 20)

    def _answer(
        self, request: Request, layout: Layout, params: Mapping[str, Any] | None, policy: Policy,
        on_text: Callable[[str], None] | None, compare: bool,
    ) -> Answer:  # fmt: skip
        first = self._run(layout, params, num_logprobs=-1).outputs[0].logprobs if compare else None
        stream, num_shown = TextStream(self._model.tokenizer, request.sampling.stop), 0
        show = on_text or (lambda _: None)
        sampling_params = self._sampling_params(request.sampling, request.max_new_tokens, params, 0)
        started = time.perf_counter()
        for output in self._steps(layout.tokens.tolist(), sampling_params):
            for token in output.outputs[0].token_ids[num_shown:]:
                show("" if stream.is_stopped else stream.push(token))
            num_shown = len(output.outputs[0].token_ids)
        total_s = time.perf_counter() - started
        show(stream.finish())
        (last,) = output.outputs
        logprobs = tuple(
            float(entries[token].logprob) for token, entries in zip(last.token_ids, last.logprobs, strict=True)
        )
        report = (output.kv_transfer_params or {}).get(FIELD)
        return Answer(
            Generated(stream.text, tuple(last.token_ids), logprobs), policy, layout, _recomputed(report, layout),
            _timing(report, output.metrics.first_token_latency, total_s), self._model.name,
            None if first is None else _logprob_vector(first[0]),
        )  # fmt: skip

    def _run(self, layout: Layout, params: Mapping[str, Any] | None, num_logprobs: int = 0) -> Any:
        """Generate one token greedily; returns vLLM's last output."""
        sampling_params = self._sampling_params(Sampling(), 1, params, num_logprobs)
        *_, last = self._steps(layout.tokens.tolist(), sampling_params)
        return last

    def _steps(self, tokens: Sequence[int], sampling_params: Any) -> Iterable[Any]:
        """The outputs of a request as they grow; the last is finished."""
        engine = self._llm.llm_engine
        salt = {"cache_salt": self._model.salt} if self._model.salt else {}
        engine.add_request(next(self._request_ids), {"prompt_token_ids": list(tokens), **salt}, sampling_params)
        while engine.has_unfinished_requests():
            yield from engine.step()

    def _sampling_params(
        self, sampling: Sampling, count: int, params: Mapping[str, Any] | None, num_logprobs: int | None
    ) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=count, temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed % (1 << 63),
            stop=list(sampling.stop), stop_token_ids=sorted(self._model.eos_ids), logprobs=num_logprobs,
            extra_args=None if params is None else {"kv_transfer_params": dict(params)},
        )  # fmt: skip


def answer(
    model: Model,
    store: Store,
    request: Request,
    *,
    compare: bool = False,
    on_text: Callable[[str], None] | None = None,
    on_compile: Callable[[Compiled], None] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Answer:
    """Start vLLM, answer one request, and stop it. Mistakes in the request are found before vLLM starts."""
    if needs_of(request.policy).chain_block:
        raise InputError(
            f"--algo {request.policy.name}: vLLM has a prefix cache of its own; ask for full, or --engine torch"
        )
    _require_supported(request.codec)
    parts, layout = _lay_out(model, store, request)
    longest = max([layout.num_tokens, *(len(part.chunk) + part.sinks for part in parts)])
    length = min(model.max_positions, longest + request.max_new_tokens + 2)
    with Engine(model, store, max_model_len=length, options=options) as engine:
        return engine.answer(request, compare=compare, on_text=on_text, on_compile=on_compile)


def compile(
    model: Model,
    store: Store,
    chunks: Iterable[Chunk | str],
    *,
    sinks: int = 0,
    codec: str = CODEC,
    probes: int = 0,
    probe_model: Model | None = None,
    force: bool = False,
    on_done: Callable[[Compiled], None] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Compiled]:
    """Compile chunks by vLLM, which is started only if an object is missing."""
    _require_supported(codec, probes, probe_model)
    to_compile = _make_chunks(model, chunks)
    done = [Compiled(chunk, key := object_key(model, chunk, sinks), store.path(key), False) for chunk in to_compile]
    if force or not all(store.has(compiled.key) for compiled in done):
        length = min(model.max_positions, max(map(len, to_compile), default=0) + sinks + 2)
        with Engine(model, store, max_model_len=length, options=options) as engine:
            return engine.compile(to_compile, sinks=sinks, force=force, on_done=on_done)
    for compiled in done:
        if on_done is not None:
            on_done(compiled)
    return done


def _require_supported(codec: str, probes: int = 0, probe_model: Model | None = None) -> None:
    """Objects of any codec, and with tables, are linked, but those that vLLM compiles are not coded and have none."""
    if codec != CODEC:
        raise InputError(f"--codec {codec}: vLLM compiles without one; compile with the torch engine first")
    if probes or probe_model is not None:
        raise InputError(f"--probes {probes}: vLLM measures no tables; compile with the torch engine first")


def _make_chunks(model: Model, chunks: Iterable[Chunk | str]) -> list[Chunk]:
    return [chunk if isinstance(chunk, Chunk) else make_chunk(model, chunk, "text") for chunk in chunks]


def _lay_out(model: Model, store: Store, request: Request) -> tuple[list[Part], Layout]:
    """The documents of a request, and the layout of its prompt.

    Raises:
        PicError: an unusable document, a prompt that is too long, or a policy that cannot do without tables.
    """
    frame, needs = make_frame(model, request.query, request.head, request.query_template), needs_of(request.policy)
    sinks = needs.sinks if request.sinks is None else request.sinks
    parts = resolve_documents(model, store, request.documents, sinks, request.chunk_tokens)
    head = Chunk(frame.head, model.encode(frame.head), "head")
    layout = lay_out(model, head, [part.chunk for part in parts], model.encode(frame.tail))
    if needs.tables:  # before vLLM starts: what it compiles has no table
        texts = (frame.head, *(part.chunk.text for part in parts), frame.tail)
        tables = tuple(_table(model, store, part) for part in parts)
        request.policy.select(Prompt(model, layout, texts, tables))
    return parts, layout


def _table(model: Model, store: Store, part: Part) -> Table | None:
    """The table of a part's object; None without one, or if it is still to be compiled.

    Raises:
        ObjectError: an object that was given as a file, or a table, is damaged.
    """
    try:
        file = store.look(part.key(model)) if part.path is None else ObjectFile(part.path)
    except (StoreError, ObjectError):
        if part.path is not None:
            raise
        return None
    with file:
        return file.fixups()


def _head_part(model: Model, request: Request) -> list[Part]:
    """The head as a chunk to compile. It is linked at position 0, where it is compiled, so its object is exact."""
    text = make_frame(model, request.query, request.head, request.query_template).head
    chunk = Chunk(text, model.encode(text), "head")
    return [Part(chunk, None, 0)] if chunk.tokens else []


def link_params(model: Model, parts: Sequence[Part], layout: Layout, policy: Policy) -> dict[str, Any] | None:
    """The `kv_transfer_params` that link a prompt; None if there is nothing to link."""
    if not needs_of(policy).objects or not parts:
        return None
    keys = [part.key(model) for part in parts]
    chunks = [{"key": key, "start": start} for key, (start, _) in zip(keys, layout.chunks, strict=True)]
    return {FIELD: {"chunks": chunks, "policy": {"algo": policy.name, **policy.params}}}


def _recomputed(report: Mapping[str, Any] | None, layout: Layout) -> float:
    """Mean context rows per layer, from the connector's report. A request that was not linked as asked is an error.

    Raises:
        InputError: says what was wrong with an object.
    """
    if report is None:
        return float(layout.num_context)
    if report["problem"] is not None:
        raise InputError(str(report["problem"]))
    return float(report["recomputed"] or 0)


def _timing(report: Mapping[str, Any] | None, ttft_s: float, total_s: float) -> dict[str, float]:
    """The times of an answer, as the torch engine reports them: what neither loads nor selects recomputes."""
    measured = {} if report is None else report["timing"]
    load_s, select_s = measured.get("load_s", 0.0), measured.get("select_s", 0.0)
    return {
        "load_s": load_s, "select_s": select_s, "recompute_s": ttft_s - load_s - select_s, "ttft_s": ttft_s,
        "decode_s": max(0.0, total_s - ttft_s),
    }  # fmt: skip


def _logprob_vector(entries: Mapping[int, Any]) -> torch.Tensor:
    """vLLM's log-probabilities by token as a vector [vocab]."""
    return torch.tensor([entries[token].logprob for token in range(len(entries))])


def compare_answers(linked: Answer, full: Answer) -> Comparison:
    """How far an answer is from that of full recompute, and how much sooner its first token came."""
    linked_tokens, full_tokens = linked.generated.tokens, full.generated.tokens
    assert linked.logprobs is not None and full.logprobs is not None
    pairs = enumerate(zip(linked_tokens, full_tokens, strict=False))
    shorter = min(len(linked_tokens), len(full_tokens))
    return Comparison(
        answer=full.text,
        ttft_s=full.timing["ttft_s"],
        speedup=full.timing["ttft_s"] / linked.timing["ttft_s"],
        kl=first_token_kl(full.logprobs, linked.logprobs),
        same_first_token=bool(full.logprobs.argmax() == linked.logprobs.argmax()),
        same_answer=linked.text == full.text,
        common_prefix=next((index for index, (a, b) in pairs if a != b), shorter),
    )
