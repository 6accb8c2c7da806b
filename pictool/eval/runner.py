"""Answers units of work in one process: model, policies and objects are opened once and shared by all questions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import CODEC, Compiled, compile_chunks, head_codec
from pictool.compiler.fixups import PROBES
from pictool.core import Chunk, CompileOptions
from pictool.errors import ModelError
from pictool.eval.contenders import FULL, Contender
from pictool.eval.methods import Method
from pictool.eval.metrics import METRICS
from pictool.eval.reply import Reply
from pictool.eval.row import Row
from pictool.eval.units import Question, Unit, naming
from pictool.linker.policies import object_kinds
from pictool.linker.policies.base import Policy
from pictool.runtime.memory import PeakMemory
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.engines.base import Answer
    from pictool.linker.spec import Spec
    from pictool.runtime.model import Model

WARM_UP = "Once upon a time.\n"


@dataclass(frozen=True)
class Task:
    """A unit, and the labels that each of its cases is still to be asked under, by the case's id."""

    unit: Unit
    wanted: Mapping[str, tuple[str, ...]]


class Runner:
    """Asks the questions of tasks under contenders.

    Objects are compiled before anything is timed, one chunk at a time, into a store of their own: no number depends on
    what else is compiled, asked or stored.
    """

    def __init__(
        self, model: Model, store: Store, contenders: Sequence[Contender], codec: str = CODEC
    ) -> None:  # fmt: skip
        self._model, self._store, self._codec = model, store, codec
        self._contenders = {one.label: one for one in contenders}
        self._other_models = {one.label: one.other_model(model) for one in contenders}
        self._warm: set[str] = set()

    def run(self, task: Task) -> list[Row]:
        """The rows that the task wants.

        Raises:
            PicError: names the case and the algorithm.
        """
        labels = {label for wanted in task.wanted.values() for label in wanted}
        self._warm_up(labels)
        heads = {question.frame.head for question in task.unit.questions if question.case.id in task.wanted}
        self._compile(task.unit.chunks, heads, labels)
        return [row for one in task.unit.questions for row in self._rows(task, one)]

    def _warm_up(self, labels: set[str]) -> None:
        """A small question under every policy, so that none's first case is timed with its start-up."""
        cold = {FULL.label, *labels} - self._warm
        if not cold:
            return
        from pictool.linker.spec import Spec
        from pictool.runtime.template import make_frame

        chunks = [make_chunk(self._model, WARM_UP, "warm-up")]
        self._compile(chunks, {make_frame(self._model, WARM_UP).head}, cold)
        for policy in self._policies(cold):
            self._ask(Spec(WARM_UP, chunks, policy, max_new_tokens=2, codec=self._codec))
        self._warm |= cold

    def _policies(self, labels: set[str]) -> list[Policy]:
        """Of these labels, in the order of tables."""
        return [one.algo for one in self._contenders.values() if one.label in labels and isinstance(one.algo, Policy)]

    def _compile(self, chunks: Sequence[Chunk], heads: set[str], labels: set[str]) -> None:
        """What the policies reuse and the store lacks, each in a forward of its own."""
        kinds = object_kinds(self._policies(labels), self._codec, PROBES)
        for kind in kinds:
            compile_chunks(self._model, self._store, chunks, kind, alone=True)
        if kinds:
            encoded = (Chunk(head, self._model.encode(head), "head") for head in sorted(heads))
            options = CompileOptions(codec=head_codec(self._codec))
            compile_chunks(self._model, self._store, [head for head in encoded if head.tokens], options, alone=True)

    def _rows(self, task: Task, question: Question) -> Iterator[Row]:
        wanted = task.wanted.get(question.case.id, ())
        if not wanted:
            return
        full, peak = self._reply(task.unit, question, FULL)
        for label in wanted:
            one = self._contenders[label]
            reply, bytes_ = (full, peak) if one.is_full else self._reply(task.unit, question, one)
            yield make_row(question, one, self._other_models[label], reply, full, bytes_)

    def _reply(self, unit: Unit, question: Question, contender: Contender) -> tuple[Reply, int | None]:
        """The reply, and how far memory rose."""
        policy = contender.algo if isinstance(contender.algo, Policy) else FULL.algo
        spec = make_spec(unit, question, policy, self._codec)
        with naming(f"case {question.case.id}, {contender.label}"), PeakMemory(self._model.device) as peak:
            if isinstance(contender.algo, Method):
                reply = contender.algo.answer(self._model, self._ask, spec)
            else:
                reply = Reply.of(self._ask(spec))
        return reply, peak.bytes

    def _ask(self, spec: Spec) -> Answer:
        from pictool.engines.torch import TorchEngine

        given = TorchEngine(self._model, self._store).answer(spec, on_compile=_never)
        if given.logits.isnan().any():
            raise ModelError(
                f"{self._model.name} computes what is no number in {self._model.dtype}; use another --dtype"
            )
        return given


def make_spec(unit: Unit, question: Question, policy: Any, codec: str) -> Spec:
    from pictool.core import Sampling
    from pictool.linker.spec import Spec

    return Spec(
        question.case.query, unit.chunks, policy, question.head, question.query_template, question.max_new_tokens,
        Sampling(stop=question.case.stop), codec=codec,
    )  # fmt: skip


def make_row(
    question: Question, contender: Contender, other_model: str | None, reply: Reply, full: Reply,
    peak_bytes: int | None,
) -> Row:  # fmt: skip
    from pictool.engines.base import first_token_kl

    case, logits = question.case, reply.logits
    assert full.logits is not None
    same = [a == b for a, b in zip(reply.tokens, full.tokens, strict=False)]
    return Row(
        id=case.id, label=contender.label, kind=case.kind, algo=contender.algo.name,
        params=json.loads(json.dumps(contender.algo.params)), other_model=other_model, metric=case.metric,
        scores={name: float(metric(reply.text, case.answers)) for name, metric in METRICS.items()}, answer=reply.text,
        kl=None if logits is None else first_token_kl(full.logits, logits),
        agreement=sum(same) / max(len(reply.tokens), len(full.tokens)),
        common_prefix=[*same, False].index(False), generated=len(reply.tokens), tokens=question.num_tokens,
        context=question.num_context, rows=reply.rows, bytes_read=reply.bytes_read,
        timing=reply.times, peak_bytes=peak_bytes,
    )  # fmt: skip


def object_store(store: Store, model: Model, threads: int) -> Store:
    """Where objects of evaluations are kept: beside the user's, apart for all that may change the last bits.

    Without host memory: each policy reads what it links, so that times and bytes are its own.
    """
    import torch

    made_by = [torch.__version__, torch.backends.cpu.get_cpu_capability(), model.device, threads]
    digest = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()
    return store.within("eval", digest[:8])


def _never(done: Compiled) -> None:
    raise AssertionError(f"{done.chunk.source} was compiled within a link, where its bytes depend on others")
