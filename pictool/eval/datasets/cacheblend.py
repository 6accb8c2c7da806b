"""CacheBlend's question answering files (`musique_s.json`, `wikimqa_s.json`), with its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pictool.eval.datasets.base import Case, FileDataset
from pictool.eval.datasets.records import Record

HEAD = (
    "You will be asked a question after reading several passages. Please directly answer the question based on the "
    "given passages. Do NOT repeat the question. The answer should be within 5 words..\nPassages:\n"
)
TEMPLATE = (
    "\n\nAnswer the question directly based on the given passages. Do NOT repeat the question. The answer should be "
    "within 5 words. \nQuestion:{query}\nAnswer:"
)


@dataclass(frozen=True)
class CacheBlend(FileDataset):
    """Retrieved passages and a question (CacheBlend §7.1), put together as in the authors' `example/blend_musique.py`.

    A document is title, blank line, text, blank line, also where the title is empty. The question begins in lower case
    and ends with a question mark. The answer is one line of at most 32 tokens. The F1 here is over words; the authors'
    is over the tokens of their model.
    """

    name: ClassVar[str] = "cacheblend"
    reference: ClassVar[str] = "CacheBlend §7.1; github.com/YaoJiayi/CacheBlend, example/"
    marks: ClassVar[tuple[str, ...]] = ("ctxs", "question")

    def case(self, record: Record) -> Case:
        passages = [record.inner(name, value) for name, value in record.items("ctxs")]
        return Case(
            id=record.id("id"),
            documents=tuple(_document(passage) for passage in passages),
            query=_question(record.text("question")),
            answers=record.texts("answers"),
            head=HEAD,
            query_template=TEMPLATE,
            stop=("\n",),
            separator="",
        )


def _document(passage: Record) -> str:
    return f"{passage.text_or_none('title') or ''}\n\n{passage.text('text', allow_blank=True)}\n\n"


def _question(text: str) -> str:
    return text[0].lower() + text[1:] + ("" if text.endswith("?") else "?")
