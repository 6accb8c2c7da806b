"""The haystack: exact lengths, the needle whole at a sentence's border, all other chunks the same at every depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pictool.errors import InputError
from pictool.eval.datasets import open_dataset
from pictool.eval.datasets.needle import Needle
from pictool.eval.metrics import METRICS

SENTENCES = [f"Word{i} {'grows ' * (i % 7)}green{'.!?'[i % 3]}" for i in range(40)]
NEEDLE = "The magic number is 42."


@pytest.fixture(autouse=True)
def haystack(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for i in range(3):
        (tmp_path / "docs" / f"{i}.txt").write_text(" ".join(SENTENCES[i * 13 : i * 13 + 13]) + "\n")


def needle(**fields: Any) -> Needle:
    defaults: dict[str, Any] = {"files": ("docs/*.txt",), "needle": NEEDLE, "answer": "42", "chunk_words": 20}
    return Needle(**(defaults | fields))


def test_the_grid_is_length_by_depth() -> None:
    cases = list(needle(lengths=(50, 300), depths=(0.0, 33.5, 100.0)).cases())
    assert [case.id for case in cases] == [
        f"length={length},depth={depth}" for length in (50, 300) for depth in (0.0, 33.5, 100.0)
    ]
    assert [case.kind for case in cases[:3]] == ["depth 0%", "depth 33.5%", "depth 100%"]
    assert {case.metric for case in cases} == {"contains"} and {case.answers for case in cases} == {("42",)}


@pytest.mark.parametrize("length", [6, 25, 26, 100, 131, 1000])  # shorter than the text and, repeated, longer
@pytest.mark.parametrize("size", [1, 7, 20, 5000])
def test_lengths_are_exact_and_the_needle_is_whole(length: int, size: int) -> None:
    depths = (0.0, 10.0, 49.9, 50.0, 99.0, 100.0)
    whole = " ".join(" ".join(SENTENCES[i * 13 : i * 13 + 13]) for i in range(3)).split()
    for case in needle(lengths=(length,), depths=depths, chunk_words=size).cases():
        words = "".join(case.documents).split()
        assert len(words) == length
        (chosen,) = [document for document in case.documents if NEEDLE in document]
        left = "".join(document.replace(NEEDLE, "") for document in case.documents).split()
        assert left == (whole * (length // len(whole) + 1))[: length - 5]
        sizes = [len(document.replace(NEEDLE, "").split()) for document in case.documents]
        assert set(sizes[:-1]) <= {size} and 0 < sizes[-1] <= size
        assert len(chosen.split()) == sizes[case.documents.index(chosen)] + 5


def test_the_needle_stands_at_a_sentences_border_at_the_depth() -> None:
    for case in needle(lengths=(205,), depths=tuple(float(depth) for depth in range(0, 101, 5))).cases():
        before, _, _ = "".join(case.documents).partition(NEEDLE)
        depth = float(case.id.split("depth=")[1])
        assert depth == 100 or not before or before.rstrip()[-1] in ".!?"
        share = 100 * len(before.split()) / 200
        assert depth - 5 <= share <= depth  # no sentence here has 10 words
    assert "".join(case.documents).rstrip().endswith(NEEDLE)


def test_all_chunks_but_one_are_the_same_at_every_depth() -> None:
    cases = list(needle(lengths=(405,), depths=(0.0, 30.0, 60.0, 100.0)).cases())
    plain = [document.replace(f"{NEEDLE} ", "") for document in cases[0].documents]
    for case in cases:
        assert sum(document != other for document, other in zip(case.documents, plain, strict=True)) == 1


def test_a_text_without_sentences_is_cut_between_words(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("apple pear plum fig " * 100)
    case, near = needle(files=("list.txt",), lengths=(405,), depths=(50.0, 24.0), chunk_words=400).cases()
    assert len(case.documents[0].split(NEEDLE)[0].split()) == 200
    assert near.documents[0].startswith(NEEDLE)  # the beginning is a border, 96 words back


def test_paragraphs_quotes_and_other_scripts_end_sentences(tmp_path: Path) -> None:
    for text in ("one two\n\nthree four", "one two.” three four", "one 二。 three four", "one two.) three four"):
        (tmp_path / "a.txt").write_text(text)
        (case,) = needle(files=("a.txt",), lengths=(9,), depths=(75.0,)).cases()
        assert case.documents[0].split(NEEDLE)[1].split() == ["three", "four"]


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 100), st.integers(6, 400), st.integers(1, 50))
def test_any_depth_and_length(tmp_path_factory: pytest.TempPathFactory, depth: float, length: int, size: int) -> None:
    path = tmp_path_factory.getbasetemp() / "hay.txt"
    path.write_text(" ".join(SENTENCES))
    (case,) = needle(files=(str(path),), lengths=(length,), depths=(depth,), chunk_words=size).cases()
    assert len("".join(case.documents).split()) == length
    assert sum(document.count(NEEDLE) for document in case.documents) == 1
    assert len(case.documents) == -(-(length - 5) // size)


def test_files_are_in_order_and_each_once(tmp_path: Path) -> None:
    (tmp_path / "[x].txt").write_text("bracket.")
    fields = {"lengths": "120", "depths": "100", "chunk_words": "1000"}
    (case,) = open_dataset("needle", {"files": "[x].txt,docs/2.txt,docs/*.txt,**/2.txt", **fields}).cases()
    text = case.documents[0]
    assert text.startswith("bracket.\n\nWord26") and text.index("Word0") > text.index("Word38")
    again = list(open_dataset("needle", {"files": "[x].txt,docs/2.txt,docs/0.txt,docs/1.txt", **fields}).cases())
    assert again == [case]


def test_the_default_needle_answers_the_default_question() -> None:
    default = Needle(files=("docs/*.txt",))
    assert METRICS["contains"](default.needle, [default.answer]) == 1
    assert all(default.answer not in sentence for sentence in SENTENCES)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"files": ()}, "needle: files= must name at least one"),
        ({"lengths": ()}, "needle: lengths= must name at least one"),
        ({"lengths": (5,)}, "needle: lengths=5 must be 6 words or more"),
        ({"lengths": (50, 50)}, "needle: lengths=50 is named twice"),
        ({"depths": (50.0, 50.0)}, "needle: depths=50.0 is named twice"),
        ({"depths": (101.0,)}, "needle: depths=101 must be from 0 to 100 percent"),
        ({"depths": (-0.1,)}, "needle: depths=-0.1 must be from 0 to 100 percent"),
        ({"depths": (float("nan"),)}, "needle: depths=nan must be from 0 to 100 percent"),
        ({"chunk_words": 0}, "needle: chunk_words=0 must be 1 or more"),
        ({"needle": " "}, "needle: needle= is blank"),
        ({"question": ""}, "needle: question= is blank"),
        ({"answer": ""}, "needle: answer= is blank"),
        ({"files": ("gone.txt",)}, "gone.txt: no such file"),
        ({"files": ("docs/*.md",)}, "docs/*.md: no such file"),
        ({"files": ("docs",)}, "docs: is a directory"),
        ({"files": ("docs/latin.txt",)}, "docs/latin.txt: not UTF-8 at byte 3"),
        ({"files": ("docs/blank.txt",)}, "docs/blank.txt: has nothing but white space"),
        ({"files": ("docs/empty.txt",)}, "docs/empty.txt: is empty"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "docs" / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "docs" / "blank.txt").write_text(" \n")
    (tmp_path / "docs" / "empty.txt").touch()
    with pytest.raises(InputError) as caught:
        list(needle(**fields).cases())
    assert message in str(caught.value) and "\n" not in str(caught.value)
