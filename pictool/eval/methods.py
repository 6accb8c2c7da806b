"""Methods that answer without linking: other ways to prompt over documents, as baselines (CacheBlend §7.1).

All of them recompute everything. Here is also what any answer of an evaluation is measured as: `MeasuredAnswer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pictool.core import Chunk
from pictool.errors import InputError
from pictool.linker.policies.base import PlotStyle

if TYPE_CHECKING:
    from pictool.engines.base import Answer
    from pictool.linker.spec import Spec
    from pictool.runtime.memory.image import Image
    from pictool.runtime.model import Model

ModelCall = Callable[["Spec"], "Answer"]  # answers one spec
_GREY = "#8a8a8a"


@dataclass(frozen=True)
class Times:
    """Seconds. load_s, select_s and recompute_s are parts of ttft_s, as in `Timing`; decode_s comes after it."""

    ttft_s: float
    load_s: float
    select_s: float
    recompute_s: float
    decode_s: float


@dataclass(frozen=True)
class MeasuredAnswer:
    """An answer and its costs. Costs are those of all calls of the model that it took.

    Fields:
        tokens: generated. logprobs: of these tokens, in nats.
        image: of the linked prompt; None where the prompt is not that of the case.
        rows: mean number of context rows that were computed per layer.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    image: Image | None
    rows: float
    bytes_read: int
    times: Times

    @classmethod
    def from_answer(cls, answer: Answer) -> MeasuredAnswer:
        linked, timing = answer.linked, answer.linked.timing
        return cls(
            answer.text, answer.generated.tokens, answer.generated.logprobs, linked.image,
            linked.recomputed, linked.bytes_read,
            Times(timing.ttft_s, timing.load_s, timing.select_s, timing.recompute_s, answer.decode_s),
        )  # fmt: skip

    @property
    def confidence(self) -> float:
        """Mean log-probability of the generated tokens, in nats."""
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else float("-inf")


@dataclass(frozen=True)
class Method(ABC):
    """A way to answer by several calls of the model; its fields are its options."""

    name: ClassVar[str]
    reference: ClassVar[str]
    plot: ClassVar[PlotStyle] = PlotStyle()

    @property
    def params(self) -> dict[str, Any]:
        return asdict(self)

    @abstractmethod
    def answer(self, model: Model, call: ModelCall, spec: Spec) -> MeasuredAnswer:
        """Answer a spec whose documents are chunks and whose policy is `full`.

        Args:
            call: calls the model.
        """


@dataclass(frozen=True)
class MapReduce(Method):
    """MapReduce (CacheBlend §7.1 [7], LangChain): every chunk is summarised by itself; the summaries are the context.

    The summaries are made one after another, and the time to the first token counts all of that. The last call has the
    case's own head and query.

    Fields:
        prompt: asks for a summary of {text}; the text before {text} is the head.
        summary_tokens: tokens of a summary, at most.
        separator: is put between the summaries.
    """

    name: ClassVar[str] = "mapreduce"
    reference: ClassVar[str] = "CacheBlend §7.1; LangChain, MapReduceDocumentsChain"
    plot: ClassVar[PlotStyle] = PlotStyle("D", _GREY, 6.5)
    prompt: str = 'Write a concise summary of the following:\n\n\n"{text}"\n\n\nCONCISE SUMMARY:'
    summary_tokens: int = 64
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        if "{text}" not in self.prompt or not self.prompt.partition("{text}")[2].strip():
            raise InputError(f"mapreduce: prompt={self.prompt!r} must contain {{text}}, and ask for something after it")
        if self.summary_tokens < 1:
            raise InputError(f"mapreduce: summary_tokens={self.summary_tokens} must be 1 or more")

    def answer(self, model: Model, call: ModelCall, spec: Spec) -> MeasuredAnswer:
        summaries = [MeasuredAnswer.from_answer(call(self._summary_spec(spec, text))) for text in spec.documents]
        text = self.separator.join(summary.text for summary in summaries if summary.text)
        context = Chunk(text, model.encode(text), "the summaries")
        last = MeasuredAnswer.from_answer(call(replace(spec, documents=[context] if context.tokens else [])))
        total = _last_with_all_costs([*summaries, last])
        ttft_s = total.times.ttft_s + total.times.decode_s - last.times.decode_s
        return replace(total, image=None, times=replace(total.times, ttft_s=ttft_s, decode_s=last.times.decode_s))

    def _summary_spec(self, spec: Spec, document: Any) -> Spec:
        head, _, query = self.prompt.partition("{text}")
        return replace(
            spec, documents=[document], head=head, query=query, query_template="{query}", separator="",
            max_new_tokens=self.summary_tokens, sampling=replace(spec.sampling, stop=()),
        )  # fmt: skip


@dataclass(frozen=True)
class MapRerank(Method):
    """MapRerank (CacheBlend §7.1 [8], LangChain): an answer from every chunk by itself; the most confident one counts.

    LangChain has the model state a score. Small models state none that means anything, so the confidence here is the
    mean log-probability of the answer's tokens. No token is known to be the answer's before every answer is complete:
    the time to the first token is that of everything.

    Fields:
        prompt: asks {query} about {text}; the text before {text} is the head. Blank: the case's own prompt.
    """

    name: ClassVar[str] = "maprerank"
    reference: ClassVar[str] = "CacheBlend §7.1; LangChain, MapRerankDocumentsChain"
    plot: ClassVar[PlotStyle] = PlotStyle("d", _GREY)
    prompt: str = ""

    def __post_init__(self) -> None:
        if self.prompt and "{query}" not in self.prompt.partition("{text}")[2]:
            raise InputError(f"maprerank: prompt={self.prompt!r} must contain {{text}}, and {{query}} after it")

    def answer(self, model: Model, call: ModelCall, spec: Spec) -> MeasuredAnswer:
        if self.prompt:
            head, _, template = self.prompt.partition("{text}")
            spec = replace(spec, head=head, query_template=template, separator="")
        specs = [replace(spec, documents=[document]) for document in spec.documents] or [spec]
        answers = [MeasuredAnswer.from_answer(call(each)) for each in specs]
        best, total = max(answers, key=lambda answer: answer.confidence), _last_with_all_costs(answers)
        times = replace(total.times, ttft_s=total.times.ttft_s + total.times.decode_s, decode_s=0.0)
        return replace(best, image=None, rows=total.rows, bytes_read=total.bytes_read, times=times)


METHODS: Mapping[str, type[Method]] = {method.name: method for method in (MapReduce, MapRerank)}


def _last_with_all_costs(answers: Sequence[MeasuredAnswer]) -> MeasuredAnswer:
    """The last answer, with the costs of all."""
    columns = zip(*(vars(answer.times).values() for answer in answers), strict=True)
    return replace(
        answers[-1],
        rows=sum(answer.rows for answer in answers),
        bytes_read=sum(answer.bytes_read for answer in answers),
        times=Times(*map(sum, columns)),
    )
