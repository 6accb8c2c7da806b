"""Files of answers: what is kept, what is asked again, and one writer at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pictool.engines.answer_file import AnswerFile, Contents, digest_of
from pictool.errors import InputError
from pictool.spans.bulk import BulkQuery
from pictool.spans.dsl import g

QUERIES = [BulkQuery(number, g(str(number))) for number in (1, 2, 3)]


def made_of(query: BulkQuery) -> str:
    return f"made of {query.line}"


def lines(path: Path) -> list[int]:
    return [json.loads(line)["line"] for line in path.read_bytes().splitlines()]


def test_answers_are_kept_and_what_failed_or_was_cut_off_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt), AnswerFile(path, QUERIES) as answers:
        assert answers.answered(made_of) == ({}, 0)
        answers.append(QUERIES[0], {"answer": "é"})
        answers.append(QUERIES[1], {"error": "no"})
        raise KeyboardInterrupt
    with path.open("ab") as out:
        out.write(b'{"line": 3, "qu')
    with AnswerFile(path, QUERIES) as again:
        assert again.answered(made_of) == ({1: {"answer": "é"}}, 0)
        again.append(QUERIES[2], {"answer": "c"})
        again.append(QUERIES[1], {"answer": "b"})
        assert lines(path) == [1, 2, 3, 2]
    assert lines(path) == [1, 2, 3]  # once a run has ended, each line once


def test_answers_to_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with AnswerFile(path, QUERIES) as answers:
        answers.append(QUERIES[0], {"answer": "a"})
    with pytest.raises(InputError, match=f"^{path}:1: "):
        AnswerFile(path, [BulkQuery(1, g("other"))])
    path.write_text("nonsense\n")
    with pytest.raises(InputError, match=f"^{path}:1: "):
        AnswerFile(path, QUERIES)
    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path)):
        with pytest.raises(InputError, match=f"^{name}: "):
            AnswerFile(Path(name), QUERIES)


def test_an_answer_that_follows_from_something_else_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with AnswerFile(path, QUERIES) as answers:
        answers.answered(made_of)
        for query in QUERIES:
            answers.append(query, {"answer": "a"})
    with AnswerFile(path, QUERIES) as again:
        found, num_stale = again.answered(lambda query: "another" if query.line == 2 else made_of(query))
        assert (sorted(found), num_stale) == ([1, 3], 1)
    with AnswerFile(path, QUERIES) as again:
        assert again.answered(lambda query: None) == ({}, 3)  # files that cannot be read


def test_answers_of_the_last_release_are_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"line": n, "query": "its digest", "answer": "a"}) + "\n" for n in (1, 2)))
    with AnswerFile(path, QUERIES) as again:
        assert again.answered(made_of) == ({}, 2)
        for query in QUERIES:
            again.append(query, {"answer": "b"})
    assert lines(path) == [1, 2, 3] and path.read_text().count('"answer": "b"') == 3


def test_what_changed_while_it_was_read_is_asked_again(tmp_path: Path) -> None:
    path, now = tmp_path / "answers.jsonl", ["before"]
    with AnswerFile(path, QUERIES) as answers:
        answers.answered(lambda query: now[0])
        answers.append(QUERIES[0], {"answer": "a"})
        now[0] = "after"
        answers.append(QUERIES[1], {"answer": "b"})
    with AnswerFile(path, QUERIES) as again:
        assert again.answered(lambda query: "before")[0].keys() == {1}
        assert not again.answered(lambda query: "after")[0]


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with (
        AnswerFile(path, QUERIES),
        pytest.raises(InputError, match=f"^{path}: "),
    ):
        AnswerFile(path, QUERIES)
    with AnswerFile(path, QUERIES):
        pass


def test_digests_follow_content_and_salt(tmp_path: Path) -> None:
    path, contents = tmp_path / "a.txt", Contents()
    path.write_text("one")
    one = contents.of(path)
    os.utime(path, ns=(0, 0))
    assert contents.of(path) == one
    path.write_text("two")
    assert contents.of(path) != one
    assert digest_of(lambda: [one], "salt") == digest_of(lambda: [one], "salt") != digest_of(lambda: [one], "")
    assert digest_of(lambda: [contents.of(tmp_path / "none")], "") is None
