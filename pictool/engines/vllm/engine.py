"""The engine behind `--engine vllm`: an offline vLLM with PicConnector that answers requests and compiles chunks."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import CODEC, Compiled, object_key, sink_tokens
from pictool.core import Chunk, Layout, Sampling
from pictool.engines.vllm.answer import Answer, compare_answers, dense, recomputed_of, timing_of
from pictool.engines.vllm.objects import table_of
from pictool.errors import InputError, ModelError
from pictool.linker.link import lay_out
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy, Prompt
from pictool.linker.resolve import Part, resolve_documents
from pictool.linker.spec import Spec
from pictool.runtime.decode import Generated, TextStream
from pictool.runtime.model import Model
from pictool.runtime.template import make_frame
from pictool.store.store import Store, atomic_write

CONNECTOR = "pictool.engines.vllm.connector"
_EXACT = "full"


class Engine:
    """A running vLLM. A context manager; starting one takes seconds, so that many requests should share it.

    Args:
        max_model_len: positions to be ready for (default: the model's).
        options: of `vllm.LLM`, as gpu_memory_utilization.
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
        given = {
            "dtype": model.dtype, "max_model_len": max_model_len or model.max_positions, "max_logprobs": -1,
            "enable_prefix_caching": False, "disable_log_stats": False, "kv_transfer_config": transfer,
        }  # fmt: skip
        self._model, self._store = model, store
        self._llm: Any = LLM(str(model.directory), **(given | dict(options or {})))
        self._names = map(str, itertools.count())

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop vLLM and give its memory back."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()

    def answer(
        self,
        request: Spec,
        *,
        compare: bool = False,
        on_text: Callable[[str], None] | None = None,
        on_compile: Callable[[Compiled], None] | None = None,
    ) -> Answer:
        """Link, decode, and (with `compare`) do the same under vLLM's own full prefill.

        Raises:
            PicError: an unusable document or object, or a prompt that is too long.
        """
        parts, layout = prompt_of(self._model, self._store, request)
        if request.policy.name != _EXACT and parts:
            self._bring([*_head_part(self._model, request), *parts], on_compile)
        params = link_params(self._model, parts, layout, request.policy)
        if compare:  # neither is timed with what its first run sets up
            self._run(layout, params, Sampling(), 1)
            self._run(layout, None, Sampling(), 1)
        mine = self._answer(request, layout, params, request.policy, on_text, compare)
        if not compare:
            return mine
        full = self._answer(request, layout, None, make_policy(_EXACT, {}), None, compare)
        return Answer(**{**vars(mine), "compare": compare_answers(mine, full)})

    def compile(
        self,
        chunks: Iterable[Chunk | str],
        *,
        sinks: int = 0,
        force: bool = False,
        on_done: Callable[[Compiled], None] | None = None,
    ) -> list[Compiled]:
        """Compile chunks (or texts) by vLLM's own prefill; equal to our engine's objects within the dtype's noise.

        Raises:
            PicError: a text without tokens, sinks without BOS, or a store that cannot be written.
        """
        wanted = [chunk if isinstance(chunk, Chunk) else make_chunk(self._model, chunk, "text") for chunk in chunks]
        done: list[Compiled] = []
        prefix = sink_tokens(self._model, sinks)
        for chunk in wanted:
            key = object_key(self._model, chunk, sinks)
            is_new = (force and key not in {one.key for one in done}) or not self._store.has(key)
            if is_new:
                tokens = [*prefix, *chunk.tokens, chunk.tokens[-1]]
                self._compile(tokens, {"text": chunk.text, "sinks": sinks}, chunk)
            done.append(Compiled(chunk, key, self._store.path(key), is_new))
            if on_done is not None:
                on_done(done[-1])
        return done

    def _compile(self, tokens: Sequence[int], what: Mapping[str, Any], chunk: Chunk) -> None:
        if len(tokens) >= self._llm.model_config.max_model_len:
            raise InputError(f"{chunk.source}: {len(tokens)} tokens, too long for this engine; cut it (--chunk-tokens)")
        params = self._sampling(Sampling(), 1, {"pic": {"compile": dict(what)}}, None)
        *_, last = self._steps(tokens, params)
        report = last.kv_transfer_params["pic"]
        if report["state"] != "compiled":
            raise InputError(f"{chunk.source}: cannot be compiled ({report['problem']})")

    def _bring(self, parts: Sequence[Part], on_compile: Callable[[Compiled], None] | None) -> None:
        """Every part's object, into the store: compiled, or copied if it was given as a file of its own."""
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
        self, request: Spec, layout: Layout, params: Mapping[str, Any] | None, policy: Policy,
        on_text: Callable[[str], None] | None, compare: bool,
    ) -> Answer:  # fmt: skip
        first = self._run(layout, params, Sampling(), 1, num_logprobs=-1)[0].outputs[0].logprobs if compare else None
        stream, shown = TextStream(self._model.tokenizer, request.sampling.stop), 0
        show = on_text or (lambda _: None)
        started = time.perf_counter()
        for output in self._steps(
            layout.tokens.tolist(), self._sampling(request.sampling, request.max_new_tokens, params, 0)
        ):
            for token in output.outputs[0].token_ids[shown:]:
                show("" if stream.is_stopped else stream.push(token))
            shown = len(output.outputs[0].token_ids)
        total = time.perf_counter() - started
        show(stream.finish())
        (last,) = output.outputs
        logprobs = tuple(float(one[token].logprob) for token, one in zip(last.token_ids, last.logprobs, strict=True))
        report = (output.kv_transfer_params or {}).get("pic")
        return Answer(
            Generated(stream.text, tuple(last.token_ids), logprobs), policy, layout, recomputed_of(report, layout),
            timing_of(report, output.metrics.first_token_latency, total), self._model.name,
            None if first is None else dense(first[0]),
        )  # fmt: skip

    def _run(
        self, layout: Layout, params: Mapping[str, Any] | None, sampling: Sampling, count: int, num_logprobs: int = 0
    ) -> list[Any]:
        return list(self._steps(layout.tokens.tolist(), self._sampling(sampling, count, params, num_logprobs)))[-1:]

    def _steps(self, tokens: Sequence[int], params: Any) -> Iterable[Any]:
        """The outputs of a request as they grow; the last is finished."""
        engine = self._llm.llm_engine
        salt = {"cache_salt": self._model.salt} if self._model.salt else {}
        engine.add_request(next(self._names), {"prompt_token_ids": list(tokens), **salt}, params)
        while engine.has_unfinished_requests():
            yield from engine.step()

    def _sampling(
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
    request: Spec,
    *,
    compare: bool = False,
    on_text: Callable[[str], None] | None = None,
    on_compile: Callable[[Compiled], None] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Answer:
    """Start vLLM, answer one request, and stop it; the prompt is looked at first, so that mistakes are found soon."""
    if request.policy.chain_block:
        raise InputError(
            f"--algo {request.policy.name}: vLLM has a prefix cache of its own; ask for full, or --engine torch"
        )
    _require_plain(request.codec)
    parts, layout = prompt_of(model, store, request)
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
    """Compile chunks by vLLM; it is started only if something is missing."""
    _require_plain(codec, probes, probe_model)
    wanted = [chunk if isinstance(chunk, Chunk) else make_chunk(model, chunk, "text") for chunk in chunks]
    done = [Compiled(one, key := object_key(model, one, sinks), store.path(key), False) for one in wanted]
    if force or not all(store.has(one.key) for one in done):
        length = min(model.max_positions, max(map(len, wanted), default=0) + sinks + 2)
        with Engine(model, store, max_model_len=length, options=options) as engine:
            return engine.compile(wanted, sinks=sinks, force=force, on_done=on_done)
    for one in done:
        if on_done is not None:
            on_done(one)
    return done


def _require_plain(codec: str, probes: int = 0, probe_model: Model | None = None) -> None:
    """Objects of any codec, and with tables, are linked, but those that vLLM compiles are not coded and have none."""
    if codec != CODEC:
        raise InputError(f"--codec {codec}: vLLM compiles without one; compile with the torch engine first")
    if probes or probe_model is not None:
        raise InputError(f"--probes {probes}: vLLM measures no tables; compile with the torch engine first")


def prompt_of(model: Model, store: Store, request: Spec) -> tuple[list[Part], Layout]:
    """The documents of a request, and where they stand between its head and tail.

    Raises:
        PicError: an unusable document, a prompt that is too long, or a policy that cannot do without tables.
    """
    frame = make_frame(model, request.query, request.head, request.query_template)
    sinks = request.policy.sinks if request.sinks is None else request.sinks
    parts = resolve_documents(model, store, request.documents, sinks, request.chunk_tokens)
    head = Chunk(frame.head, model.encode(frame.head), "head")
    layout = lay_out(model, head, [part.chunk for part in parts], model.encode(frame.tail))
    if request.policy.uses_tables:  # before vLLM starts: what it compiles has no table
        texts = (frame.head, *(part.chunk.text for part in parts), frame.tail)
        tables = tuple(table_of(model, store, part) for part in parts)
        request.policy.select(Prompt(model, layout, texts, tables))
    return parts, layout


def _head_part(model: Model, request: Spec) -> list[Part]:
    """The head as what it can be compiled as; it stands where it is compiled, so its object is exact."""
    text = make_frame(model, request.query, request.head, request.query_template).head
    chunk = Chunk(text, model.encode(text), "head")
    return [Part(chunk, None, 0)] if chunk.tokens else []


def link_params(model: Model, parts: Sequence[Part], layout: Layout, policy: Policy) -> dict[str, Any] | None:
    """`kv_transfer_params` that link a prompt; None if there is nothing to link."""
    if policy.name == _EXACT or not parts:
        return None
    keys = [part.key(model) for part in parts]
    places = [{"key": key, "start": start} for key, (start, _) in zip(keys, layout.chunks, strict=True)]
    return {"pic": {"chunks": places, "policy": {"algo": policy.name, **policy.params}}}
