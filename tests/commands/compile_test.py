"""`pic compile`: what is computed, what is not, what it writes, and what measures its tables."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import folders
import pytest

from commands.conftest import TEXT
from commands.run import flip, pic, write
from pictool.runtime.model import Model
from pictool.store.objects.format import ObjectFile

ANSWER = ("-q", "why?", "--max-new-tokens", 3, "--json")


def test_new_then_cached(model: Path, texts: tuple[Path, Path]) -> None:
    first, second = (pic("compile", *texts, "-m", model) for _ in range(2))
    assert [line.split()[3:] for line in first.out.splitlines()] == [["new", "a.txt"], ["new", "b.txt"]]
    assert [line.split()[3:] for line in second.out.splitlines()] == [["cached", "a.txt"], ["cached", "b.txt"]]
    assert first.err == "pic: 2 chunks, 2 compiled, 0 already in the store\n"
    assert second.err == "pic: 2 chunks, 0 compiled, 2 already in the store\n"


def test_the_second_time_loads_no_weights(
    model: Path, texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pic("compile", *texts, "-m", model).code == 0

    def module(_: Model) -> Any:
        raise AssertionError("the weights are loaded")

    monkeypatch.setattr(Model, "module", property(module))
    assert pic("compile", *texts, "-m", model, "--json").code == 0
    with pytest.raises(AssertionError, match="weights"):
        pic("compile", "a.txt", "-m", model, "--force")


def test_same_input_same_bytes(model: Path, texts: tuple[Path, Path]) -> None:
    for name in ("one", "two"):
        assert pic("compile", "a.txt", "-m", model, "--store", name, "-o", f"{name}.kvo").code == 0
    assert Path("one.kvo").read_bytes() == Path("two.kvo").read_bytes()


def test_contexts_and_dtype_are_other_objects(model: Path, texts: tuple[Path, Path]) -> None:
    options: list[tuple[Any, ...]] = [(), ("--after", "none"), ("--dtype", "bfloat16")]
    keys = {pic("compile", "a.txt", "-m", model, *more, "--json").json["objects"][0]["key"] for more in options}
    assert len(keys) == 3


def test_one_object_links(model: Path, texts: tuple[Path, Path]) -> None:
    assert pic("compile", "a.txt", "-o", "out/a.kvo", "-m", model).code == 0
    from_object = pic("link", "out/a.kvo", *ANSWER, "-m", model, "--store", "elsewhere").json
    assert from_object["answer"] == pic("link", "a.txt", *ANSWER, "-m", model).json["answer"]


def test_chunks_become_a_list_with_members_that_links(model: Path, texts: tuple[Path, Path]) -> None:
    done = pic("compile", "a.txt", "--chunk-tokens", 16, "-o", "out/a.kvo", "-m", model, "--json").json
    count = len(done["objects"])
    assert count >= 3 and all(one["tokens"] <= 16 for one in done["objects"])
    assert sorted(path.name for path in Path("out").iterdir()) == sorted(
        ["a.kvo", *(f"a.{index:04d}.kvo" for index in range(count))]
    )
    from_list = pic("link", "out/a.kvo", *ANSWER, "--algo", "legolink-2", "-m", model, "--store", "elsewhere").json
    from_text = pic("link", "a.txt", "--chunk-tokens", 16, *ANSWER, "--algo", "legolink-2", "-m", model).json
    assert from_list["tokens"] == from_text["tokens"] and from_list["answer"] == from_text["answer"]
    assert from_list["tokens"]["recomputed"] == 2 * count


def test_no_progress_noise_when_stderr_is_no_terminal(model: Path) -> None:
    names = [write(f"{i}.txt", f"The harbour was quiet {i} times.") for i in range(12)]
    assert pic("compile", *names, "-m", model).err == "pic: 12 chunks, 12 compiled, 0 already in the store\n"


def test_option_before_environment_before_pic_yaml(
    model: Path, texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("from-option", "from-environment", "from-yaml"):
        Path(name).symlink_to(model)
    write("pic.yaml", "{model: from-yaml, store: store-from-yaml, dtype: bfloat16}")

    def run(*options: object) -> tuple[str, str, str]:
        found = pic("compile", "a.txt", "--json", *options).json
        path = found["objects"][0]["path"]
        return found["model"], Path(path).parts[0], pic("inspect", path, "--json").json["dtype"]

    assert run() == ("from-yaml", "store-from-yaml", "bfloat16")
    monkeypatch.setenv("PIC_MODEL", "from-environment")
    monkeypatch.setenv("PIC_STORE", "store-from-environment")
    monkeypatch.setenv("PIC_DTYPE", "float16")
    assert run() == ("from-environment", "store-from-environment", "float16")
    options = ("-m", "from-option", "--store", "store-from-option", "--dtype", "float32")
    assert run(*options) == ("from-option", "store-from-option", "float32")


# What is compiled again, and what is not


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no model can be opened."""

    def fail(*_: object) -> NoReturn:
        raise AssertionError("a model was opened")

    monkeypatch.setattr("pictool.commands.compile.open_model", fail)


def test_unchanged_files_cost_no_model(
    model: Path, texts: tuple[Path, Path], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pictool.reading._COARSE_NS", -1)  # as if the model had been copied long ago
    arguments = ("compile", "a.txt", "b.txt", "-m", model, "--chunk-tokens", 15)
    first = pic(*arguments, "--json").json
    request.getfixturevalue("no_model")
    again = pic(*arguments, "--json").json
    assert again == first | {"objects": [row | {"new": False} for row in first["objects"]]}
    assert "already in the store" in pic(*arguments).err
    with pytest.raises(AssertionError, match="opened"):
        pic(*arguments, "--force")


@pytest.mark.parametrize("change", ["text", "model", "option", "salt", "store", "database"])
def test_what_changed_is_compiled_by_the_model(
    model: Path, texts: tuple[Path, Path], change: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(shutil.copytree(model, "own"))
    monkeypatch.setattr("pictool.reading._COARSE_NS", -1)  # as if it had been copied long ago
    arguments: tuple[Any, ...] = ("compile", "a.txt", "-m", own)
    assert pic(*arguments).code == 0
    if change == "text":
        write("a.txt", TEXT + "!")
    elif change == "model":
        write(own / "tokenizer_config.json", (own / "tokenizer_config.json").read_text() + " ")
    elif change == "option":
        arguments += ("--after", "none")
    elif change == "salt":
        arguments += ("--salt", "x" * 40)
    elif change == "store":
        next(Path(".pic").rglob("*.kvo")).unlink()
    else:
        (database,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("compiled.sqlite3")
        database.write_bytes(b"no database" * 1000)
    request.getfixturevalue("no_model")
    with pytest.raises(AssertionError, match="opened"):
        pic(*arguments)


def test_a_damaged_object_of_an_unchanged_file_is_compiled_again(model: Path, texts: tuple[Path, Path]) -> None:
    pic("compile", "a.txt", "-m", model)
    flip(next(Path(".pic").rglob("*.kvo")))
    outcome = pic("compile", "a.txt", "-m", model)
    assert "  new  a.txt" in outcome.out and "its text is compiled again" in outcome.err


# Where texts come from


def test_stdin_is_a_file(model: Path, texts: tuple[Path, Path]) -> None:
    named = pic("compile", "a.txt", "-m", model, "--json").json["objects"]
    (row,) = pic("compile", "-", "-m", model, "--json", stdin=TEXT).json["objects"]
    assert (row["key"], row["source"], row["new"]) == (named[0]["key"], "stdin", False)


def test_a_directory_is_compiled(model: Path, texts: tuple[Path, Path]) -> None:
    files = {"d/b.txt": TEXT, "d/e/a.txt": TEXT + "?", "d/.git/x": "x", "d/empty": "", "d/p.bin": "\0"}
    for path, content in files.items():
        write(path, content)
    outcome = pic("compile", "d", "-m", model, "--json")
    assert [row["source"] for row in outcome.json["objects"]] == ["d/b.txt", "d/e/a.txt"]
    notes = [line for line in outcome.err.splitlines() if "skipped: " in line]
    assert len(notes) == 2 and "d/empty" in notes[0] and "d/p.bin" in notes[1]


def test_a_link_out_of_a_directory_is_not_followed(model: Path, texts: tuple[Path, Path]) -> None:
    write("secret", TEXT + "!")
    write("d/b.txt", TEXT)
    Path("d/in").symlink_to("b.txt")
    Path("d/out").symlink_to(Path("secret").absolute())
    outcome = pic("compile", "d", "-m", model, "--json")
    assert [row["source"] for row in outcome.json["objects"]] == ["d/b.txt", "d/in"]
    assert " d/out: " in outcome.err


def test_a_directory_without_texts_is_said(model: Path) -> None:
    Path("none").mkdir()
    assert pic("compile", "none", "-m", model).err.startswith("pic: error: none: ")


def test_chunks_overlap(model: Path, texts: tuple[Path, Path]) -> None:
    def chunks(*more: object) -> list[str]:
        rows = pic("compile", "a.txt", "-m", model, "--chunk-tokens", 12, *more, "--json").json["objects"]
        return [ObjectFile(Path(row["path"])).text() for row in rows]

    plain, overlapping = chunks(), chunks("--overlap", 4)
    assert "".join(plain) == TEXT and len(overlapping) > len(plain)
    joined = overlapping[0]
    for before, piece in itertools.pairwise(overlapping):
        shared = next(count for count in range(len(piece), -1, -1) if before.endswith(piece[:count]))
        assert shared > 0
        joined += piece[shared:]
    assert joined == TEXT
    assert pic("compile", "a.txt", "-m", model, "--overlap", 4).code == 2
    assert pic("compile", "a.txt", "-m", model, "--chunk-tokens", 4, "--overlap", 4).code == 2


def test_the_first_text_that_cannot_be_read_is_named(model: Path) -> None:
    write("a.txt", TEXT), write("b.pdf", b"%PDF-1.7 x"), write("blank.txt", " \n\t\n")
    for name in ("b.pdf", "blank.txt", "none.txt"):
        refused = pic("compile", "a.txt", name, "-m", model)
        assert (refused.code, refused.out) == (1, "") and f"{name}: " in refused.err


@pytest.mark.parametrize("wrong", ['{"id": "b", "text": ""}', "{bad", '{"id": "c", "text": 5}'])
def test_a_record_that_is_wrong_is_named(model: Path, wrong: str) -> None:
    write("r.jsonl", '{"id": "a", "text": "The mill."}\n' + wrong)
    refused = pic("compile", "r.jsonl", "-m", model)
    assert (refused.code, refused.out) == (1, "") and "r.jsonl" in refused.err


def test_files_of_other_kinds_are_read_as_ask_reads_them(model: Path) -> None:
    write("a.html", "<!DOCTYPE html><title>T</title><p>Who knows?</p>"), write("d/a.pdf", folders.pdf(["One.", "Two."]))
    write("d/a.docx", folders.word([("Flags", "Three.")])), write("d/photo.png", b"\x89PNG\r\n\x1a\n\0")
    outcome = pic("compile", "a.html", "d", "-m", model, "--json")
    assert outcome.code == 0 and "photo.png" in outcome.err
    sources = {row["source"]: row["tokens"] for row in outcome.json["objects"]}
    assert sources.keys() == {"a.html", "d/a.pdf", "d/a.docx"}
    linked = pic("link", "d/a.pdf", "a.html", "-q", "Who?", "-m", model, "--json", "--max-new-tokens", 2)
    assert linked.code == 0 and "compiled d/a.pdf" not in linked.err and "compiled a.html" not in linked.err


def test_a_page_from_stdin_keeps_its_tags_and_texts_are_as_they_were(model: Path) -> None:
    page = "<!DOCTYPE html><p>Who knows?</p>"
    write("page.txt", "A page: " + page)
    assert pic("compile", "-", "page.txt", "-m", model, "--store", "st", stdin=page).code == 0
    texts = {ObjectFile(path).text() for path in Path("st/objects").rglob("*.kvo")}
    assert texts == {page, "A page: " + page}
