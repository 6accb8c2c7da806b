"""Every reader: what it takes for its own, the places it names, and what is said of a file that it cannot read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import folders
import pytest
import reader_cases

from pictool.documents.readers import readers
from pictool.documents.reading import Document, FileReader
from pictool.errors import InputError


@pytest.fixture(scope="module")
def reader() -> Iterator[FileReader]:
    with FileReader(limit_s=30) as reader:
        yield reader


def read(reader: FileReader, data: bytes, name: str = "file") -> Document:
    path = Path(name)
    path.write_bytes(data)
    return reader.read(path)


def places(document: Document) -> dict[str, str]:
    assert not document.problem, document.problem
    return {section.place: section.text for section in document.sections}


GOOD = {
    "PDF": (folders.pdf(["One flag.", "Two flags."]), {"p. 1": "One flag.", "p. 2": "Two flags."}),
    "Word": (folders.word([("Flags", "One."), ("Rivers", "Two.")]), {"Flags": "Flags\nOne.", "Rivers": "Rivers\nTwo."}),
    "PowerPoint": (folders.slides(["One.", "Two."]), {"slide 1": "One.", "slide 2": "Two."}),
    "Excel": (folders.sheet([["flag", 1], [None, "x"]]), {"Sheet": "flag\t1\n\tx"}),
    "HTML": (folders.html([("Flags", "1 &amp; 2"), ("Rivers", "3")]), {"Flags": "Flags\n1 & 2", "Rivers": "Rivers\n3"}),
    "other": (reader_cases.open_document("text", "<text:p>One.</text:p>"), {"": "One."}),
    "notebook": (folders.notebook(["One.", "Two."]), {"cell 1": "One.", "cell 2": "Two."}),
    "text": (b"One.\r\n\r\n\r\n\r\nTwo.  \f", {"": "One.\n\nTwo."}),
}  # fmt: skip


@pytest.mark.parametrize("kind", GOOD)
def test_the_content_decides_who_reads_and_names_the_places(kind: str, reader: FileReader) -> None:
    data, expected = GOOD[kind]
    document = read(reader, data)  # the name says nothing
    assert document.reader == kind and places(document) == expected


def test_every_reader_is_tested() -> None:
    assert {one.name for one in readers()} == {*GOOD, "Markdown", "e-mail"}


def test_markdown_is_known_by_its_name_and_headings_in_code_are_none(reader: FileReader) -> None:
    text = b"Intro.\n\n# One #\ntext\n```\n# no heading\n```\n#### deep\n## Two\nmore"
    document = read(reader, text, "a.md")
    assert document.reader == "Markdown" and list(places(document)) == ["", "One", "Two"]
    assert "# no heading" in places(document)["One"] and read(reader, text, "a.py").reader == "text"


def test_a_message_has_its_head_its_text_and_the_names_of_its_attachments(reader: FileReader) -> None:
    document = read(reader, folders.mail("Flags", "Two flags.\n"))
    assert document.reader == "e-mail"
    (text,) = places(document).values()
    assert "Subject: Flags\n" in text and "Attachment: plan.pdf" in text and text.endswith("\nTwo flags.")
    box = b"".join(b"From x Thu\n" + folders.mail(name, "Text.\n") + b"\n" for name in "ab")
    assert [*places(read(reader, box))] == ["message 1", "message 2"]
    assert read(reader, b"Note: this is a text\nwith: colons\n").reader == "text"


@pytest.mark.parametrize("charset", ["unknown-8bit", "iso-8859-8-i"])
def test_a_charset_that_is_unknown_damages_no_mailbox(charset: str, reader: FileReader) -> None:
    mails = [folders.mail(name, text) for name, text in (("a", "One.\n"), ("b", SENTENCE), ("c", "\0\xff\n"))]
    odd = [mail.replace(b'charset="utf-8"', f'charset="{charset}"'.encode()) for mail in mails]
    found = places(read(reader, b"".join(b"From x Thu\n" + mail + b"\n" for mail in (mails[0], *odd, mails[0]))))
    assert [*found] == [f"message {number}" for number in range(1, 6)]
    assert SENTENCE.strip() in found["message 3"] and found["message 2"] == found["message 5"] == found["message 1"]


SENTENCE = "Größe, naïve Straße und schöne Füße: das ist ein Text über Köln.\n" * 4
RUSSIAN = "Привет, это текст на русском языке, и в нём есть слова.\n" * 4


@pytest.mark.parametrize(
    ("text", "encoding"),
    [(SENTENCE, "cp1252"), (SENTENCE, "utf-16"), (SENTENCE, "utf-32"), (SENTENCE, "utf-8-sig"), (RUSSIAN, "cp1251")],
)  # fmt: skip
def test_other_encodings_are_read(text: str, encoding: str, reader: FileReader) -> None:
    (found,) = places(read(reader, text.encode(encoding))).values()
    assert found == text.strip()


def test_long_texts_have_the_lines_of_their_blocks_and_lose_none(reader: FileReader) -> None:
    lines = [f"line {number} of a long text" for number in range(1, 2001)]
    document = read(reader, "\n".join(lines).encode())
    assert "\n".join(section.text for section in document.sections).splitlines() == lines
    for section in document.sections[1:]:
        assert section.text.startswith(f"line {section.place.removeprefix('l. ')} of")


def test_hyphens_at_line_ends_are_joined_in_pdfs(reader: FileReader) -> None:
    (text,) = places(read(reader, folders.pdf(["a com-\npiler and a well-\nKnown 3-\n4"]))).values()
    assert text == "a compiler and a well-\nKnown 3-\n4"


def test_a_pdf_that_only_its_owner_may_change_is_read(reader: FileReader) -> None:
    assert places(read(reader, folders.pdf(["Open."], "", "owner"))) == {"p. 1": "Open."}


@pytest.mark.parametrize("name", folders.BROKEN)
def test_what_cannot_be_read_is_named(name: str, reader: FileReader) -> None:
    make, said = folders.BROKEN[name]
    document = read(reader, make(), name)
    assert said in document.problem and "\n" not in document.problem
    assert str(document) == f"{name}: {document.problem}" and not document.sections


def test_a_missing_and_a_special_file_are_problems(reader: FileReader) -> None:
    assert "No such file" in reader.read(Path("nowhere")).problem
    assert "a device" in reader.read(Path("/dev/zero")).problem


def test_a_command_reads_what_no_reader_knows() -> None:
    Path("-a b.bin").write_bytes(b"GIF8one\x0ctwo")
    Path("good.txt").write_text("as it is")
    Path("empty").write_bytes(b"")
    with FileReader("sed s/one/page/ {}") as reader:
        document = reader.read(Path("-a b.bin"))
        assert places(document) == {"p. 1": "GIF8page", "p. 2": "two"} and document.reader == "sed"
        assert places(reader.read(Path("good.txt"))) == {"": "as it is"}
        assert reader.read(Path("empty")).problem == "is empty"
    with FileReader("false {}") as reader:
        assert reader.read(Path("-a b.bin")).problem.startswith("false exited with 1")
    with FileReader("no-such-program {}") as reader:
        assert "cannot be run" in reader.read(Path("-a b.bin")).problem
    for command in ("cat", "cat 'x {}"):
        with pytest.raises(InputError, match="--reader"):
            FileReader(command)
