"""Answers cases: model, policies and objects are opened once and shared by all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import CODEC, Compiled, compile_chunks, head_codec
from pictool.core import Chunk, CompileOptions, PromptText
from pictool.errors import StoreError
from pictool.eval.cases import CaseGroup, PreparedCase, prefixed_errors
from pictool.eval.metrics import METRICS
from pictool.eval.policies import FULL
from pictool.eval.results import CaseResult, Times
from pictool.linker.grid import LabelledPolicy
from pictool.linker.policies import object_kinds
from pictool.linker.policies.base import Policy
from pictool.linker.resolve import head_chunk
from pictool.linker.spec import Spec
from pictool.runtime.machine import PeakMemory
from pictool.store.store import Store

if TYPE_CHECKING:
    from torch import Tensor

    from pictool.engines.base import Answer
    from pictool.runtime.model import Model

WARM_UP = "Once upon a time.\n"


class Runner:
    """Answers cases under policies.

    Objects are compiled before anything is timed, one chunk at a time, into a store of their own: no number depends on
    what else is compiled, answered or stored.
    """

    def __init__(self, model: Model, store: Store, policies: Sequence[LabelledPolicy], codec: str = CODEC) -> None:
        self._model, self._store, self._codec = model, store, codec
        self._policies = {labelled.label: labelled for labelled in policies}
        self._second_models = {each.label: second_fingerprint(model, each.policy) for each in policies}
        self._warm: set[str] = set()

    def run(self, group: CaseGroup, labels: Mapping[str, Sequence[str]]) -> list[CaseResult]:
        """Answer the cases of a group whose ids are there, under the policies of these labels.

        Raises:
            PicError: names the case and the policy.
        """
        every = {label for some in labels.values() for label in some}
        cases = [case for case in group.cases if case.id in labels]
        self._warm_up(every)
        self._compile(group.chunks, {case.frame.head for case in cases}, every)
        return [result for case in cases for result in self._results(case, labels[case.id])]

    def _warm_up(self, labels: set[str]) -> None:
        """Answer a small question under every policy, so that no first case is timed with the start-up."""
        cold = {FULL.label, *labels} - self._warm
        if not cold:
            return
        chunks = [make_chunk(self._model, WARM_UP, "warm-up")]
        spec = Spec(WARM_UP, chunks, max_new_tokens=2, codec=self._codec)
        self._compile(chunks, {spec.frame(self._model).head}, cold)
        for label, labelled in self._policies.items():
            if label in cold:
                self._call(replace(spec, policy=labelled.policy, after=labelled.after))
        self._warm |= cold

    def _compile(self, chunks: Sequence[Chunk], heads: set[PromptText], labels: set[str]) -> None:
        """Compile what the policies reuse and the store lacks, each chunk in a forward of its own."""
        by_context: dict[str, list[Policy]] = {}
        for label in labels:
            by_context.setdefault(self._policies[label].after, []).append(self._policies[label].policy)
        is_hybrid = self._model.geometry.states is not None
        kinds = [
            kind
            for after, policies in by_context.items()
            for kind in object_kinds(policies, self._codec, is_hybrid, after)
        ]
        for kind in kinds:
            compile_chunks(self._model, self._store, chunks, kind, alone=True, check=False)  # its link checks it
        if kinds:
            encoded = (head_chunk(self._model, head) for head in sorted(heads))
            options = CompileOptions(codec=head_codec(self._codec), cut=0)
            named = [head for head in encoded if head.tokens]
            compile_chunks(self._model, self._store, named, options, alone=True, check=False)

    def _results(self, case: PreparedCase, labels: Sequence[str]) -> Iterator[CaseResult]:
        full = self._answer(case, FULL.label)
        exact = FullAnswer.of(full[0])
        for label in labels:
            answer, peak_bytes = full if label == FULL.label else self._answer(case, label)
            yield make_result(case, self._policies[label], self._second_models[label], answer, exact, peak_bytes)

    def _answer(self, case: PreparedCase, label: str) -> tuple[Answer, int | None]:
        """The answer, and how far memory rose."""
        with prefixed_errors(f"case {case.id}, {label}"), PeakMemory(self._model.device) as peak:
            labelled = self._policies[label]
            answer = self._call(replace(case.spec, policy=labelled.policy, after=labelled.after))
        return answer, peak.bytes

    def _call(self, spec: Spec) -> Answer:
        from pictool.engines import engine_of

        return engine_of(self._model)(self._model, self._store).answer(spec, on_compile=_refuse_compiling)


def second_fingerprint(model: Model, policy: Policy) -> str | None:
    """Fingerprint of the second model that the user names in the policy's field; None if none is named."""
    if not policy.second_model:
        return None
    from pictool.runtime.model import load_model

    return load_model(policy.second_model, model.device, model.dtype).fingerprint


@dataclass(frozen=True)
class FullAnswer:
    """What answers are compared with: the tokens of full's answer, and the logits of each, float32 [vocab]."""

    tokens: tuple[int, ...]
    logits: tuple[Tensor, ...]

    @classmethod
    def of(cls, full: Answer) -> FullAnswer:
        from pictool.runtime.decode import forced_logits

        tokens = full.generated.tokens
        return cls(tokens, tuple(forced_logits(full.linked.image, tokens)))


def make_result(
    prepared: PreparedCase, labelled: LabelledPolicy, other_model: str | None, answer: Answer,
    full: FullAnswer, peak_bytes: int | None,
) -> CaseResult:  # fmt: skip
    """Score an answer, and compare it with that of `full`."""
    case, linked, timing = prepared.case, answer.linked, answer.timing
    return CaseResult(
        id=case.id, label=labelled.label, kind=case.kind, algo=labelled.policy.name,
        params=json.loads(json.dumps(labelled.policy.params)), other_model=other_model, metric=case.metric,
        scores={name: float(metric(answer.text, case.answers)) for name, metric in METRICS.items()},
        answer=answer.text, **_against(answer, full), generated=len(answer.generated.tokens),
        tokens=prepared.num_tokens, context=prepared.num_context, rows=linked.recomputed, bytes_read=linked.bytes_read,
        timing=Times(timing.ttft_s, timing.load_s, timing.select_s, timing.recompute_s, answer.decode_s),
        peak_bytes=peak_bytes,
    )  # fmt: skip


def _against(answer: Answer, full: FullAnswer) -> dict[str, Any]:
    """The fields of a result that compare it with `full`."""
    from pictool.engines.base import first_token_kl
    from pictool.runtime.decode import forced_logits

    tokens = answer.generated.tokens
    same = [a == b for a, b in zip(tokens, full.tokens, strict=False)]
    pairs = zip(full.logits, forced_logits(answer.linked.image, full.tokens), strict=True)
    kls = [first_token_kl(exact, linked) for exact, linked in pairs]
    return {
        "kl": kls[0],
        "answer_kl": sum(kls),
        "agreement": sum(same) / max(len(tokens), len(full.tokens)),
        "common_prefix": [*same, False].index(False),
    }


def object_store(store: Store, model: Model, threads: int) -> Store:
    """Where objects of evaluations are kept: beside the user's, apart for all that may change the last bits.

    Without host memory: each policy reads what it links, so that times and bytes are its own.
    """
    import torch

    made_by = [torch.__version__, torch.backends.cpu.get_cpu_capability(), model.device, threads]
    digest = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()
    return store.within("eval", digest[:8])


def _refuse_compiling(compiled: Compiled) -> None:
    """All was compiled before. Within a link, an object's last bits depend on what is compiled beside it."""
    raise StoreError(
        f"{compiled.path}: the object of {compiled.chunk.source} was removed or can no longer be read; run the "
        "command again to continue"
    )
