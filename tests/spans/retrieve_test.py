"""Retrieval: which files, which fragments, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from pictool.errors import InputError
from pictool.runtime.model import Model, wrap_model
from pictool.spans import retrieve as module
from pictool.spans.dsl import fragment, retrieve, user
from pictool.spans.query import Augment, Fragment
from pictool.spans.retrieve import bm25, find_fragments, source_files

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


def names(fragments: list[Fragment]) -> list[str]:
    return [Path(found.source).name for found in fragments]


def test_files_of_a_folder_in_the_order_of_their_paths(folder: Path) -> None:
    found = source_files(("docs", "docs/b.txt"), folder)
    assert [str(path.relative_to(folder)) for path in found] == [
        "docs/a.txt", "docs/b.txt", "docs/below/c.txt", "docs/b.txt"
    ]  # fmt: skip


def test_all_fragments_or_the_best(folder: Path, model: Model) -> None:
    assert names(find_fragments(retrieve("q", "docs"), "q", folder, model)) == ["a.txt", "b.txt", "c.txt"]
    assert names(find_fragments(retrieve("q", "docs", k=1), "Which festival?", folder, model)) == ["c.txt"]
    assert names(find_fragments(retrieve("q", "docs", k=2), "by the river", folder, model))[0] == "b.txt"
    pieces = find_fragments(retrieve("q", "docs/a.txt", chunk_tokens=6), "q", folder, model)
    assert len(pieces) > 2 and "".join(piece.text or "" for piece in pieces) == TEXTS["a.txt"]
    given = find_fragments(
        retrieve("q", "docs", k=2), "x", folder, model, lambda query, fragments, k: list(reversed(fragments))[:k]
    )
    assert names(given) == ["c.txt", "b.txt"]
    assert find_fragments(Augment(user("q"), "e", "n", "text"), "q", folder, model) == [Fragment("n", "text")]


def test_what_is_no_text_is_skipped_in_a_folder_and_refused_by_name(folder: Path, model: Model) -> None:
    (folder / "docs" / "paper.pdf").write_bytes(b"%PDF-1.7\n\0\xff")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.png").write_bytes(b"\x89PNG\0")
    skipped: list[InputError] = []
    found = find_fragments(retrieve("q", "docs"), "q", folder, model, on_skip=skipped.append)
    assert names(found) == ["a.txt", "b.txt", "c.txt"]
    assert [str(error).split(": ")[0] for error in skipped] == [str(folder / "docs" / "paper.pdf")]
    with pytest.raises(InputError, match=r"paper.pdf: "):
        find_fragments(retrieve("q", "docs/paper.pdf"), "q", folder, model, on_skip=skipped.append)
    with pytest.raises(InputError, match="pictures: "):
        find_fragments(retrieve("q", "pictures"), "q", folder, model)


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
        find_fragments(retrieve("q", source), "q", folder, model)
    assert str(error.value).startswith(f"{folder / source}: {message}")


def test_too_many_files_are_refused_before_all_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 2)
    with pytest.raises(InputError, match=r"^docs: .* 2 "):
        source_files(("docs",), folder)
