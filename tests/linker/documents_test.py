"""What a document may be in Python: one or several; files, objects, keys, chunks, texts in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from alone import compile, link
from subjects import HEAD, TAIL, subject

import pictool
from pictool.core import Text
from pictool.errors import InputError
from pictool.linker.policies import make_policy
from pictool.linker.spec import Spec
from pictool.store.store import Store

WORDS = "The harbour was quiet. It holds a festival.\n"
NAIVE = make_policy("naive")


def test_one_text_is_one_document(tmp_path: Path) -> None:
    model, store = subject("llama").model, Store(tmp_path / "st")
    (one,) = compile(model, store, WORDS)
    (same,) = compile(model, store, Text(WORDS, "a.txt"))
    assert one.chunk.text == WORDS and (same.key, same.is_new, same.chunk.source) == (one.key, False, "a.txt")


def test_a_document_that_stands_alone_is_no_list_of_letters(tmp_path: Path) -> None:
    model, store, path = subject("llama").model, Store(tmp_path / "st"), tmp_path / "a.txt"
    path.write_text(WORDS)
    spec = Spec("q", str(path))
    assert spec.documents == (str(path),)
    texts = [link(model, store, one, TAIL, NAIVE, head=HEAD).texts for one in (str(path), [path], [Text(WORDS)])]  # type: ignore[arg-type]
    assert texts[0] == texts[1] == texts[2] and WORDS in texts[0]


@pytest.mark.parametrize("text", [WORDS, WORDS * 1000, f"{WORDS}\0"], ids=["short", "longer than a name", "NUL"])
def test_a_text_that_is_no_file_gets_a_hint(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"pictool\.Text"):
        link(subject("llama").model, Store(tmp_path), [text], TAIL, NAIVE)


def test_what_is_shown_of_store_model_and_answer_is_short(tmp_path: Path) -> None:
    model = subject("llama").model
    answer = pictool.answer(model, Store(tmp_path / "st"), Spec.raw([Text(WORDS)], TAIL, NAIVE))
    assert repr(Store("x")) == "Store('x')" and repr(model).startswith("Model('")
    assert repr(answer).startswith("Answer('") and len(repr(answer)) < 400 and "naive, " in repr(answer)
