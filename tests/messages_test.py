"""The sentences of errors that users often see are here alone: other tests assert an error's type and its subject."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from commands.run import pic, write
from sentences import FILE, sentences

TESTS = Path(__file__).parent
GOLDEN = TESTS / "messages.txt"  # blocks of a command line, and of what it says
BLOCKS = [block.split("\n", 1) for block in GOLDEN.read_text(encoding="utf-8").strip().split("\n\n")]
PROSE = re.compile(r"\b[a-z]+(?: [a-z]+){2}\b(?!\\?\.\w)")  # three words in a row, none of which is a name


@pytest.mark.parametrize(("line", "says"), BLOCKS, ids=[line for line, _ in BLOCKS])
def test_an_error_says_what_is_wrong_and_what_to_do(line: str, says: str) -> None:
    write("a.txt", "Some text."), write("damaged.kvo", bytes(100)), write("data.jsonl", "{}\n")
    write("q.json", '{"g": {"model": "default", "input": {"user": "x"}}}')
    done = pic(*line.removeprefix("$ pic ").split())
    assert done.code in (1, 2) and done.out == ""
    assert done.err.rstrip("\n") == says


def prose_in(source: str) -> list[str]:
    """The sentences that a file's tests match errors with."""
    matches = [
        node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.keyword) and node.arg == "match"
    ]
    parts = [part for match in matches for part in ast.walk(match) if isinstance(part, ast.Constant)]
    return [part.value for part in parts if isinstance(part.value, str) and PROSE.search(part.value)]


def test_no_test_matches_a_sentence() -> None:
    assert prose_in('raises(InputError, match=rf"^{path}: must be a number")') == [": must be a number"]
    files = [path for path in sorted(TESTS.rglob("*_test.py")) if "node_modules" not in path.parts]
    found = {path.relative_to(TESTS).as_posix(): prose_in(path.read_text(encoding="utf-8")) for path in files}
    assert {name: sentences for name, sentences in found.items() if sentences} == {}


def test_the_list_of_sentences_is_up_to_date() -> None:
    """A change of words is read in the diff of tests/sentences.txt."""
    assert FILE.read_text(encoding="utf-8") == sentences(), "run make reference, and read the diff"
