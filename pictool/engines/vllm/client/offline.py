"""The engine `vllm`: an offline vLLM with PicConnector that compiles chunks, links and answers."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import Compiled, OnCompile, object_key, sink_tokens
from pictool.core import Chunk, CompileOptions, FixupTable, Layout, Sampling
from pictool.engines.base import Answer, Engine, Feature, LinkResult, outcome_of
from pictool.engines.vllm.request import FIELD
from pictool.engines.vllm.versions import INSTALL, require_version
from pictool.errors import InputError, ModelError, ObjectError, PicError, StoreError
from pictool.linker.policies.base import Policy, Prompt
from pictool.linker.resolve import Part, lay_out_spec
from pictool.linker.spec import Spec
from pictool.reading import open_regular
from pictool.runtime.model import Model
from pictool.store.store import Store

if TYPE_CHECKING:
    import torch

    from pictool.linker.link import Timing

CONNECTOR = "pictool.engines.vllm.connector"


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt whose objects are in the store; `params` link it, None if there is nothing to link.

    `objects` are the source and the key of each document.
    """

    layout: Layout
    params: Mapping[str, Any] | None
    objects: Sequence[tuple[str, str]] = ()


class VllmEngine(Engine):
    """An offline vLLM. It starts, which takes seconds, with the first request that needs it.

    Args:
        max_model_len: the longest sequence, in tokens; by default vLLM is started for the longest one that was needed
            so far, and started again for a longer one.
        options: more arguments of `vllm.LLM`, as gpu_memory_utilization.
    """

    name: ClassVar[str] = "vllm"
    title: ClassVar[str] = "vLLM"
    supports: ClassVar[frozenset[Feature]] = frozenset()

    def __init__(
        self, model: Model, store: Store, pool_bytes: int | None = 0, *, max_model_len: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, store, pool_bytes)
        if model.directory is None:
            raise ModelError(f"{model.name}: vLLM loads models from directories; save it first")
        self._is_length_fixed, self._length = max_model_len is not None, max_model_len or 0
        self._options, self._request_ids = dict(options or {}), map(str, itertools.count())
        self._llm: Any = None

    @classmethod
    def require_installed(cls) -> None:
        if find_spec("vllm") is None:
            raise InputError(f"--engine vllm: vLLM is not installed here; {INSTALL} (docs/guides/vllm.md)")

    def close(self) -> None:
        """Stop vLLM and free its memory."""
        if self._llm is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        cleanup_dist_env_and_memory()

    def compile(
        self,
        chunks: Iterable[Chunk | str],
        options: CompileOptions = CompileOptions(),
        *,
        force: bool = False,
        probe_model: Model | None = None,
        on_done: Callable[[Compiled], None] | None = None,
    ) -> list[Compiled]:
        """Compile by vLLM's own prefill; the objects equal the torch engine's up to the dtype's noise."""
        self.require_options(options)
        if probe_model is not None:
            self.require("tables", f"--probe-model {probe_model.name}")
        listed = [chunk if isinstance(chunk, Chunk) else make_chunk(self.model, chunk, "text") for chunk in chunks]
        prefix = sink_tokens(self.model, options.sinks)
        longest = max(map(len, listed), default=0)
        done: list[Compiled] = []
        for chunk in listed:
            if not chunk.tokens:
                raise InputError(f"{chunk.source}: cannot be compiled, as it has no tokens")
            key = object_key(self.model, chunk, options)
            is_new = (force and key not in {compiled.key for compiled in done}) or not self.store.has_whole(key)
            if is_new:
                self._start(min(self.model.max_positions, longest + options.sinks + 2))
                self._compile(chunk, [*prefix, *chunk.tokens, chunk.tokens[-1]], options.sinks)
            done.append(Compiled(chunk, key, self.store.path(key), is_new))
            if on_done is not None:
                on_done(done[-1])
        return done

    def link(self, spec: Spec, *, on_compile: OnCompile | None = None) -> LinkResult:
        """Link a spec's prompt; vLLM chooses one token of it, which is dropped."""
        self.require_supported(spec)
        prompt = self._prepare(spec, on_compile)
        output = self._first_token(prompt.layout, prompt.params, num_logprobs=-1)
        return _link_result(spec.policy, prompt, output, _logprob_vector(output.outputs[0].logprobs[0]))

    def run(
        self, spec: Spec, *, on_text: Callable[[str], None] | None = None, on_compile: OnCompile | None = None,
        wants_logits: bool = True,
    ) -> Answer:  # fmt: skip
        prompt = self._prepare(spec, on_compile)
        logprobs = None
        if wants_logits:
            output = self._first_token(prompt.layout, prompt.params, num_logprobs=-1)
            logprobs = _logprob_vector(output.outputs[0].logprobs[0])
        answering = _Answering(self, spec, prompt, on_text)
        for output in self._steps(*answering.request):
            answering.push(output)
        return answering.answer(logprobs)

    def answer_all(self, specs: Sequence[Spec]) -> Iterator[tuple[int, Answer | PicError]]:
        """Answer specs side by side, in one batch of vLLM's. `decode_s` of an answer is that beside the others."""
        prepared: dict[int, PreparedPrompt] = {}
        for index, spec in enumerate(specs):  # all before the first runs: vLLM may be started again for a longer one
            try:
                self.require_supported(spec)
                prepared[index] = self._prepare(spec, None)
            except PicError as error:
                yield index, error
        answering = {index: _Answering(self, specs[index], prompt, None) for index, prompt in prepared.items()}
        for index, output in self._steps_together({index: own.request for index, own in answering.items()}):
            answering[index].push(output)
            if output.finished:
                yield index, outcome_of(answering[index].answer)

    def warm_up(self, spec: Spec, on_compile: OnCompile | None = None) -> None:
        """One token of the linked prompt, and one of vLLM's own full prefill."""
        prompt = self._prepare(spec, on_compile)
        self._first_token(prompt.layout, prompt.params)
        self._first_token(prompt.layout, None)

    def _start(self, length: int) -> None:
        """Start vLLM for sequences of `length` tokens, unless it is running for as long ones."""
        if self._llm is not None and (self._is_length_fixed or length <= self._length):
            return
        self.close()
        self._length = self._length if self._is_length_fixed else max(length, self._length)
        require_version()
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # no second process for one caller
        from vllm import LLM
        from vllm.config import KVTransferConfig

        model = self.model
        extra = {"store": str(self.store.root), "compile": True, "any_model": True, "device": model.device}
        extra["fingerprint"] = model.fingerprint
        extra["show_problems"] = True  # to the owner of the store
        transfer = KVTransferConfig(
            kv_connector="PicConnector", kv_connector_module_path=CONNECTOR, kv_role="kv_both",
            kv_load_failure_policy="recompute", kv_connector_extra_config=extra,
        )  # fmt: skip
        arguments = {
            "dtype": model.dtype, "max_model_len": self._length, "max_logprobs": -1,
            "enable_prefix_caching": False, "disable_log_stats": False, "kv_transfer_config": transfer,
        }  # fmt: skip
        self._llm = LLM(str(model.directory), **(arguments | self._options))

    def _prepare(self, spec: Spec, on_compile: OnCompile | None) -> PreparedPrompt:
        """Resolve and lay out a prompt, and have its objects in the store. Mistakes are found before vLLM starts.

        Raises:
            PicError: an unusable document, a prompt that is too long, or a policy that cannot do without tables.
        """
        with ExitStack() as opened:
            prompt = lay_out_spec(self.model, self.store, spec, opened)
            parts, layout = prompt.parts[1:], prompt.layout
            if spec.policy.needs.tables:  # what vLLM compiles has no table
                tables = tuple(self._table(part) for part in parts)
                spec.policy.select(Prompt(self.model, layout, prompt.texts, tables))
            objects = prompt.objects
            longest = max([layout.num_tokens, *(len(part.chunk) + part.options.sinks for part in objects)])
            self._start(min(self.model.max_positions, longest + spec.max_new_tokens + 2))
            if spec.policy.needs.objects and parts:
                self._store_objects(objects, on_compile)
            names = [(part.chunk.source, part.key(self.model)) for part in parts if not part.is_separator]
            return PreparedPrompt(layout, link_params(self.model, parts, layout, spec.policy), names)

    def _table(self, part: Part) -> FixupTable | None:
        """The table of a part's object; None without one, or if it is still to be compiled. 0 for a separator."""
        if part.is_separator:
            return np.zeros(len(part.chunk), dtype=np.float16)
        if part.file is not None:
            return part.file.fixups()
        try:
            with self.store.peek(part.key(self.model)) as file:
                return file.fixups()
        except (StoreError, ObjectError):
            return None

    def _store_objects(self, parts: Sequence[Part], on_compile: OnCompile | None) -> None:
        """Have every part's object in the store: compile it, or copy it if it was given as a file of its own."""
        for part in parts:
            target = self.store.path(part.key(self.model))
            if part.file is None:
                for done in self.compile([part.chunk], CompileOptions(part.options.sinks)):
                    if done.is_new and on_compile is not None:
                        on_compile(done)
            elif part.file.path.resolve() != target.resolve():
                with open(open_regular(part.file.path), "rb") as file:
                    self.store.insert(part.file.meta.key, file)

    def _compile(self, chunk: Chunk, tokens: Sequence[int], sinks: int) -> None:
        if len(tokens) >= self._length:
            raise InputError(f"{chunk.source}: {len(tokens)} tokens, too long for this engine; cut it (--chunk-tokens)")
        params = self._compile_params(chunk.text, sinks)
        *_, last = self._steps(tokens, self._sampling_params(Sampling(), 1, params, None))
        report = last.kv_transfer_params[FIELD]
        if report["state"] != "compiled":
            raise InputError(f"{chunk.source}: cannot be compiled ({report['problem']})")

    def _compile_params(self, text: str, sinks: int) -> dict[str, Any]:
        return {FIELD: {"compile": {"text": text, "sinks": sinks}}}

    def _first_token(self, layout: Layout, params: Mapping[str, Any] | None, num_logprobs: int = 0) -> Any:
        """Generate one token greedily; returns vLLM's last output."""
        sampling_params = self._sampling_params(Sampling(), 1, params, num_logprobs)
        *_, last = self._steps(layout.tokens.tolist(), sampling_params)
        return last

    def _steps(self, tokens: Sequence[int], sampling_params: Any) -> Iterable[Any]:
        """The outputs of a request as they grow; the last is finished."""
        for _, output in self._steps_together({0: (tokens, sampling_params)}):
            yield output

    def _steps_together(self, requests: Mapping[int, tuple[Sequence[int], Any]]) -> Iterator[tuple[int, Any]]:
        """The outputs of requests (tokens and parameters) by their names as they grow; of each the last is finished."""
        if not requests:
            return
        engine = self._llm.llm_engine
        salt = {"cache_salt": self.model.salt} if self.model.salt else {}
        names: dict[str, int] = {}
        try:
            for name, (tokens, sampling_params) in requests.items():
                request_id = next(self._request_ids)
                names[request_id] = name
                engine.add_request(request_id, {"prompt_token_ids": list(tokens), **salt}, sampling_params)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    yield names[output.request_id], output
        finally:
            if engine.has_unfinished_requests():  # the caller ended it
                engine.abort_request(list(names))

    def _sampling_params(
        self, sampling: Sampling, count: int, params: Mapping[str, Any] | None, num_logprobs: int | None
    ) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=count, temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed % (1 << 63),
            stop=list(sampling.stop), stop_token_ids=sorted(self.model.eos_ids), logprobs=num_logprobs,
            frequency_penalty=sampling.frequency_penalty, presence_penalty=sampling.presence_penalty,
            logit_bias=dict(sampling.logit_bias) or None,
            extra_args=None if params is None else {"kv_transfer_params": dict(params)},
        )  # fmt: skip


class _Answering:
    """One request of an engine, and the answer that grows."""

    def __init__(
        self, engine: VllmEngine, spec: Spec, prompt: PreparedPrompt, on_text: Callable[[str], None] | None
    ) -> None:
        from pictool.runtime.decode import TextStream

        self._engine, self._spec, self._prompt = engine, spec, prompt
        self._show = on_text or (lambda _: None)
        self._stream, self._num_shown = TextStream(engine.model.tokenizer, spec.sampling.stop), 0
        self._started = time.perf_counter()
        self._output: Any = None
        sampling = engine._sampling_params(spec.sampling, spec.max_new_tokens, prompt.params, 0)
        self.request = prompt.layout.tokens.tolist(), sampling

    def push(self, output: Any) -> None:
        """Go on with an output of vLLM's, which has all tokens so far."""
        for token in output.outputs[0].token_ids[self._num_shown :]:
            self._show("" if self._stream.is_stopped else self._stream.push(token))
        self._num_shown, self._output = len(output.outputs[0].token_ids), output

    def answer(self, logprobs: torch.Tensor | None = None) -> Answer:
        """The answer, after the last output. Raises InputError as `_recomputed` does."""
        from pictool.runtime.decode import Generated

        total_s = time.perf_counter() - self._started
        self._show(self._stream.finish())
        (last,) = self._output.outputs
        generated = Generated(self._stream.text, tuple(last.token_ids), tuple(
            float(entries[token].logprob) for token, entries in zip(last.token_ids, last.logprobs, strict=True)
        ))  # fmt: skip
        result = _link_result(self._spec.policy, self._prompt, self._output, logprobs)
        decode_s = max(0.0, total_s - result.timing.ttft_s)
        return Answer(generated, result, decode_s, self._engine.model, self._engine.name)


def _link_result(policy: Policy, prompt: PreparedPrompt, output: Any, logprobs: torch.Tensor | None) -> LinkResult:
    """What the connector's report and vLLM's metrics say of a link."""
    report, layout = (output.kv_transfer_params or {}).get(FIELD), prompt.layout
    timing = _timing(report, output.metrics.first_token_latency)
    recomputed = _recomputed(report, layout)
    return LinkResult(policy, layout, recomputed, timing, 0, logprobs, objects=prompt.objects)


def link_params(model: Model, parts: Sequence[Part], layout: Layout, policy: Policy) -> dict[str, Any] | None:
    """The `kv_transfer_params` that link a prompt; None if there is nothing to link."""
    if not policy.needs.objects or not parts:
        return None
    spans = zip(parts, layout.chunks, strict=True)
    chunks = [{"key": part.key(model), "start": start} for part, (start, _) in spans if not part.is_separator]
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


def _timing(report: Mapping[str, Any] | None, ttft_s: float) -> Timing:
    """The times of a link, as the torch engine reports them: what neither loads nor selects recomputes."""
    from pictool.linker.link import Timing

    measured = {} if report is None else report["timing"]
    load_s, select_s = measured.get("load_s", 0.0), measured.get("select_s", 0.0)
    return Timing(load_s, select_s, ttft_s - load_s - select_s, ttft_s, fetch_s=load_s)


def _logprob_vector(entries: Mapping[int, Any]) -> torch.Tensor:
    """vLLM's log-probabilities by token as a vector [vocab]."""
    import torch

    return torch.tensor([entries[token].logprob for token in range(len(entries))])
