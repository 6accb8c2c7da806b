"""Answers that are not linked: other ways to prompt over documents, as baselines (CacheBlend §7.1). All recompute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pictool.core import Chunk
from pictool.errors import InputError
from pictool.eval.reply import Ask, Reply, Times

if TYPE_CHECKING:
    from pictool.linker.spec import Spec
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Method(ABC):
    """One way to answer by several calls of the model; its fields are its options."""

    name: ClassVar[str]
    reference: ClassVar[str]

    @property
    def params(self) -> dict[str, Any]:
        return asdict(self)

    @abstractmethod
    def answer(self, model: Model, ask: Ask, spec: Spec) -> Reply:
        """Answer a spec whose documents are chunks and whose policy is `full`; `ask` calls the model."""


@dataclass(frozen=True)
class MapReduce(Method):
    """MapReduce (CacheBlend §7.1 [7], LangChain): every chunk is summarised by itself; the summaries are the context.

    The summaries are made one after another, and the time to the first token counts all of that. The last call has the
    case's own head and query.

    Fields:
        prompt: asks for a summary of {text}; what stands before that is the head.
        summary_tokens: tokens of a summary, at most.
        separator: stands between the summaries.
    """

    name: ClassVar[str] = "mapreduce"
    reference: ClassVar[str] = "CacheBlend §7.1; LangChain, MapReduceDocumentsChain"
    prompt: str = 'Write a concise summary of the following:\n\n\n"{text}"\n\n\nCONCISE SUMMARY:'
    summary_tokens: int = 64
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        if "{text}" not in self.prompt or not self.prompt.partition("{text}")[2].strip():
            raise InputError(
                f"mapreduce: prompt={self.prompt!r} must contain {{text}}, and ask for something behind it"
            )
        if self.summary_tokens < 1:
            raise InputError(f"mapreduce: summary_tokens={self.summary_tokens} must be 1 or more")

    def answer(self, model: Model, ask: Ask, spec: Spec) -> Reply:
        summaries = [Reply.of(ask(self._map(spec, document))) for document in spec.documents]
        text = self.separator.join(one.text for one in summaries if one.text)
        context = Chunk(text, model.encode(text), "the summaries")
        last = Reply.of(ask(replace(spec, documents=[context] if context.tokens else [])))
        total = _sum([*summaries, last])
        ttft_s = total.times.ttft_s + total.times.decode_s - last.times.decode_s
        times = replace(total.times, ttft_s=ttft_s, decode_s=last.times.decode_s)
        return replace(last, logits=None, rows=total.rows, bytes_read=total.bytes_read, times=times)

    def _map(self, spec: Spec, document: Any) -> Spec:
        head, _, query = self.prompt.partition("{text}")
        return replace(
            spec, documents=[document], head=head, query=query, query_template="{query}",
            max_new_tokens=self.summary_tokens, sampling=replace(spec.sampling, stop=()),
        )  # fmt: skip


@dataclass(frozen=True)
class MapRerank(Method):
    """MapRerank (CacheBlend §7.1 [8], LangChain): an answer from every chunk by itself; the most confident one counts.

    LangChain has the model state a score. Small models state none that means anything, so the confidence here is the
    mean log-probability of the answer's tokens. No token is known to be the answer's before every answer is complete:
    the time to the first token is that of everything.

    Fields:
        prompt: asks {query} about {text}, what stands before {text} is the head; blank: the case's own prompt.
    """

    name: ClassVar[str] = "maprerank"
    reference: ClassVar[str] = "CacheBlend §7.1; LangChain, MapRerankDocumentsChain"
    prompt: str = ""

    def __post_init__(self) -> None:
        if self.prompt and "{query}" not in self.prompt.partition("{text}")[2]:
            raise InputError(f"maprerank: prompt={self.prompt!r} must contain {{text}}, and {{query}} behind it")

    def answer(self, model: Model, ask: Ask, spec: Spec) -> Reply:
        if self.prompt:
            head, _, template = self.prompt.partition("{text}")
            spec = replace(spec, head=head, query_template=template)
        prompts = [replace(spec, documents=[one]) for one in spec.documents] or [spec]
        replies = [Reply.of(ask(one)) for one in prompts]
        best, total = max(replies, key=lambda one: one.confidence), _sum(replies)
        times = replace(total.times, ttft_s=total.times.ttft_s + total.times.decode_s, decode_s=0.0)
        return replace(best, logits=None, rows=total.rows, bytes_read=total.bytes_read, times=times)


METHODS: Mapping[str, type[Method]] = {one.name: one for one in (MapReduce, MapRerank)}


def _sum(replies: Sequence[Reply]) -> Reply:
    """The last reply, with the costs of all."""
    times = [one.times for one in replies]
    return replace(
        replies[-1],
        rows=sum(one.rows for one in replies),
        bytes_read=sum(one.bytes_read for one in replies),
        times=Times(*(sum(column) for column in zip(*(vars(one).values() for one in times), strict=True))),
    )
