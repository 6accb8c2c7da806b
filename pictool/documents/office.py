"""Office files: zip archives of XML parts that refer to each other, whose inflated size is bounded before anything is.

A part's text is all of it, whatever holds it: content controls, tracked insertions, text boxes, groups, formulas.
"""

from __future__ import annotations

import io
import posixpath
import re
import zipfile
from collections.abc import Collection, Iterator
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from pictool.documents.base import HEADING, HEADING_END, MAX_INFLATED_BYTES, Note, UnreadableError

_MAX_MEMBERS = 20_000
_TYPES = "[Content_Types].xml"
_SKIPPED = {"del", "moveFrom", "instrText", "fld"}  # what was deleted, a field's code, a slide's number
_MARKS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
_BEFORE = {"den": "/", "sup": "^", "sub": "_"}  # of formulas
_LINES = {"ser", "tx", "cat", "val", "xVal", "yVal", "comment", "cm"}  # of charts and comments
# The parts that others refer to and whose text is read, by the kind of the reference, with its name for people.
_READ = {
    "header": "header", "footer": "footer", "footnotes": "footnotes", "endnotes": "endnotes", "comments": "comments",
    "chart": "chart", "diagramData": "diagram", "notesSlide": "notes",
}  # fmt: skip


def members(data: bytes) -> Collection[str]:
    """The names in a zip archive; none if it is no sound one."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError):
        return ()


def is_office(data: bytes, folder: str) -> bool:
    """Whether data is an Office file whose parts are in this folder: `word`, `ppt` or `xl`."""
    names = members(data) if data.startswith(b"PK") else ()
    return _TYPES in names and any(name.startswith(f"{folder}/") for name in names)


def open_zip(data: bytes) -> zipfile.ZipFile:
    """A sound archive, to be read.

    `zipfile` inflates at most the size that the directory names, so the sum of these bounds what is inflated.

    Raises:
        UnreadableError: encrypted, or larger than `MAX_INFLATED_BYTES` when it is inflated.
    """
    archive = zipfile.ZipFile(io.BytesIO(data))
    found = archive.infolist()
    if len(found) > _MAX_MEMBERS or sum(member.file_size for member in found) > MAX_INFLATED_BYTES:
        raise UnreadableError(f"expands to more than {MAX_INFLATED_BYTES >> 20} MiB")
    if any(member.flag_bits & 1 for member in found):
        raise UnreadableError("is encrypted; save it without a password")
    return archive


class Package:
    """The parts of an Office file; `main` is the name of its document, workbook or presentation.

    Raises:
        UnreadableError: as `open_zip`.
    """

    def __init__(self, data: bytes) -> None:
        self._archive, self._num_pictures = open_zip(data), 0
        self._names = set(self._archive.namelist())
        self.main = next(name for kind, name in self.related("").values() if kind == "officeDocument")

    def read(self, part: str) -> bytes:
        return self._archive.read(part)

    def root(self, part: str) -> Element:
        return ElementTree.fromstring(self.read(part))

    def related(self, part: str) -> dict[str, tuple[str, str]]:
        """The parts that one refers to: id → kind and name."""
        folder, name = posixpath.split(part)
        rels = posixpath.join(folder, "_rels", f"{name}.rels")
        found = self.root(rels) if rels in self._names else ()
        return {
            rel.get("Id", ""): (rel.get("Type", "").rpartition("/")[2], target)
            for rel in found
            if (target := posixpath.normpath(posixpath.join("/", folder, rel.get("Target", "")))[1:]) in self._names
        }

    def text(self, part: str, headings: Collection[str] = ()) -> str:
        """The text of a part: a line for each paragraph and row, tabs between cells.

        Args:
            headings: the ids of styles whose paragraphs are headings, which the text marks (`marked_sections`); where
                there are none, nothing is.
        """
        out = list[str]()
        self._write(self.root(part), out, headings)
        return "".join(out)

    def attached(self, part: str) -> Iterator[tuple[str, str]]:
        """Names and texts of what a part refers to: headers, notes, comments, charts, diagrams."""
        for kind, name in self.related(part).values():
            if kind in _READ:
                yield _READ[kind], self.text(name)
            elif kind == "drawing":  # of a sheet
                self.text(name)  # counts its pictures
                yield from self.attached(name)

    def notes(self) -> Iterator[Note]:
        """What of the parts that were read is no text."""
        if self._num_pictures:
            yield Note(f"{self._num_pictures:,d} picture{'s' * (self._num_pictures > 1)} not read")

    def _write(self, parent: Element, out: list[str], headings: Collection[str]) -> None:
        for element in parent:
            tag = element.tag.rpartition("}")[2]
            self._num_pictures += tag in ("blip", "imagedata")
            if tag in _SKIPPED or tag.endswith("Pr"):  # properties
                continue
            if tag in ("t", "text", "v"):
                out.append((element.text or "") + "\t" * (tag == "v"))
            out.append(_MARKS.get(tag) or _BEFORE.get(tag, ""))
            if tag == "p":
                self._write_paragraph(element, out, headings)
            elif tag == "tc":
                self._write_cell(element, out)
            elif tag == "AlternateContent":  # the same in several forms, the best one first
                self._write(next(iter(element), element), out, headings)
            else:
                self._write(element, out, headings)
            out.append("\n" * (tag == "tr" or tag in _LINES))

    def _write_paragraph(self, element: Element, out: list[str], headings: Collection[str]) -> None:
        style, level = (element.find(f"{{*}}pPr/{{*}}{name}") for name in ("pStyle", "outlineLvl"))
        is_heading = bool(headings) and (value(style) in headings or value(level) in set("012345678"))
        is_in_line = any(out) and not next(text for text in reversed(out) if text).endswith(("\n", "\t"))
        out += ["\n" * is_in_line, HEADING * is_heading]
        self._write(element, out, headings)
        out += [HEADING_END * is_heading, "\n"]

    def _write_cell(self, element: Element, out: list[str]) -> None:
        inner = list[str]()
        self._write(element, inner, ())
        span = value(element.find("{*}tcPr/{*}gridSpan")) or "1"
        out.append(" ".join("".join(inner).split()) + "\t" * min(int(span), 64))


def value(element: Element | None) -> str:
    """The only attribute of an element; empty if there is none."""
    return "" if element is None else next(iter(element.attrib.values()), "")


def heading_styles(package: Package) -> set[str]:
    """The ids of Word's styles of headings and titles, and of those that are based on one."""
    found = set[str]()
    for part in (name for kind, name in package.related(package.main).values() if kind == "styles"):
        for style in package.root(part).iterfind("{*}style"):
            name, base = value(style.find("{*}name")), value(style.find("{*}basedOn"))
            if re.match("heading|title", name, re.IGNORECASE) or base in found:
                found.add(next(text for key, text in style.items() if key.endswith("styleId")))
    return found
