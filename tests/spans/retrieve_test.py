"""Retrieval: which files, which fragments, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny

from pictool.errors import InputError
from pictool.runtime.model import Model, wrap_model
from pictool.spans.dsl import fragment, retrieve, user
from pictool.spans.operators import retrieve as module
from pictool.spans.operators.retrieve import Augment, Fragment, Retrieval, Retrieve, bm25, source_files

TEXTS = {
    "b.txt": "The river runs by the mill.\n", "a.txt": "A harbour, and a festival in the harbour.\n",
    "below/c.txt": "Nobody knows the festival.\n", ".hidden": "no", "below/.git/d.txt": "no",
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "docs" / name).write_text(text)
    (tmp_path / "docs" / "below" / "loop").symlink_to(tmp_path / "docs")
    (tmp_path / "secret").write_text("of another directory")
    (tmp_path / "docs" / "below" / "out").symlink_to(tmp_path / "secret")
    return tmp_path


def found(node: Retrieve | Augment, query: str, folder: Path, model: Model) -> Sequence[Fragment]:
    return Retrieval(folder, lambda: model).find(node, query)


def names(fragments: Sequence[Fragment]) -> list[str]:
    return [Path(each.source).name for each in fragments]


def test_files_of_a_folder_in_the_order_of_their_paths(folder: Path) -> None:
    found = source_files(("docs", "docs/b.txt"), folder)
    assert [str(path.relative_to(folder)) for path in found] == [
        "docs/a.txt", "docs/b.txt", "docs/below/c.txt", "docs/b.txt"
    ]  # fmt: skip


def test_all_fragments_or_the_best(folder: Path, model: Model) -> None:
    assert names(found(retrieve("q", "docs"), "q", folder, model)) == ["a.txt", "b.txt", "c.txt"]
    assert names(found(retrieve("q", "docs", k=1), "Which festival?", folder, model)) == ["c.txt"]
    assert names(found(retrieve("q", "docs", k=2), "by the river", folder, model))[0] == "b.txt"
    pieces = found(retrieve("q", "docs/a.txt", chunk_tokens=6), "q", folder, model)
    assert len(pieces) > 2 and "".join(piece.text or "" for piece in pieces) == TEXTS["a.txt"]
    given = Retrieval(folder, lambda: model, lambda query, fragments, k: list(reversed(fragments))[:k]).find(
        retrieve("q", "docs", k=2), "x"
    )
    assert names(given) == ["c.txt", "b.txt"]
    assert found(Augment(user("q"), "e", "n", "text"), "q", folder, model) == [Fragment("n", "text")]


def test_what_is_no_text_is_skipped_in_a_folder_and_refused_by_name(folder: Path, model: Model) -> None:
    (folder / "docs" / "paper.pdf").write_bytes(b"%PDF-1.7\n\0\xff")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.png").write_bytes(b"\x89PNG\0")
    skipped: list[InputError] = []
    taken = Retrieval(folder, lambda: model, on_skip=skipped.append).find(retrieve("q", "docs"), "q")
    assert names(taken) == ["a.txt", "b.txt", "c.txt"]
    assert [str(error).split(": ")[0] for error in skipped] == [str(folder / "docs" / "paper.pdf")]
    with pytest.raises(InputError, match=r"paper.pdf: "):
        Retrieval(folder, lambda: model, on_skip=skipped.append).find(retrieve("q", "docs/paper.pdf"), "q")
    with pytest.raises(InputError, match="pictures: "):
        found(retrieve("q", "pictures"), "q", folder, model)


def test_of_equal_scores_the_earlier_and_texts_without_words_are_no_trouble() -> None:
    same = [fragment("alpha", str(number)) for number in range(5)]
    assert [found.source for found in bm25("alpha", same, 3)] == ["0", "1", "2"]
    assert [found.source for found in bm25("unknown", same, 2)] == ["0", "1"]
    assert [found.source for found in bm25("?!", same, 2)] == ["0", "1"]
    assert [found.text for found in bm25("東京", [fragment("…"), fragment("in 東京 now")], 1)] == ["in 東京 now"]


@pytest.mark.parametrize(
    ("source", "message"),
    [("nowhere", "cannot be read (No such file"), ("empty", "the folder has no files to retrieve from")],
)
def test_sources_that_cannot_be_used(folder: Path, model: Model, source: str, message: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(InputError) as error:
        found(retrieve("q", source), "q", folder, model)
    assert str(error.value).startswith(f"{folder / source}: {message}")


def test_too_many_files_are_refused_before_all_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 2)
    with pytest.raises(InputError, match=r"^docs: .* 2 "):
        source_files(("docs",), folder)
