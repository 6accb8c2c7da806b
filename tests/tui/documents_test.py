"""The documents field: globs and `~` as in a shell, and what each document is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from pictool.tui.documents import describe_documents, split_documents


@pytest.fixture(autouse=True)
def _files(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("docs/deep").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "c d.txt", "[x].txt", "deep/e.txt"):
        (Path("docs") / name).write_text(name)
    monkeypatch.setenv("HOME", str(Path("docs").absolute()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("docs/[ab].txt", ["docs/a.txt", "docs/b.txt"]),
        ("docs/b.txt docs/a*", ["docs/b.txt", "docs/a.txt"]),
        ("docs/**/e.txt", ["docs/deep/e.txt"]),
        ("'docs/c d.txt'", ["docs/c d.txt"]),
        ("docs/[x].txt", ["docs/[x].txt"]),  # a file's own name is no glob
        ("docs/d*", None),  # a directory is no document
        ("gone.txt 0123abcd", ["gone.txt", "0123abcd"]),
        ("a\0*", ["a\0*"]),
        ("", []),
    ],
)
def test_words_are_expanded(text: str, expected: list[str] | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="no file matches"):
            split_documents(text)
    else:
        assert split_documents(text) == expected


def test_the_home_directory() -> None:
    assert split_documents("~/a.txt ~/[b].txt") == [
        str(Path("docs/a.txt").absolute()),
        str(Path("docs/b.txt").absolute()),
    ]


def test_what_each_document_is() -> None:
    names = {"0123abcd": "«The harbour»"}
    documents = ["docs/a.txt", "docs", "0123abcd", "beef", "a\0"]
    assert describe_documents(documents, names.get, 5) == [
        "  1  docs/a.txt", "  2  docs: is no file", "  3  0123abcd  «The harbour»",
        "  4  beef: neither a file nor an object here", "  5  a\0: neither a file nor an object here",
    ]  # fmt: skip
    assert describe_documents(documents, names.get, 3)[2] == "     and 3 more, a\0 the last"
