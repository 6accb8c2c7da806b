"""Files on which public reports say that readers of documents fail, made on the spot, and what must be read of them."""

from __future__ import annotations

import base64
import io
import re
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import docx
import folders
import openpyxl
import pptx
import reportlab
from docx.oxml import parse_xml
from openpyxl.chart import BarChart, Reference
from openpyxl.comments import Comment
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE
from pptx.util import Inches
from reportlab.lib.utils import ImageReader
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.pdfgen.canvas import Canvas


@dataclass(frozen=True)
class Case:
    """A file, and what is right of its text.

    Fields:
        has: what its text has, in this order.
        lacks: what neither its text nor its notes have.
        places: of its sections, if that is asked for.
        notes: what its notes have.
        report: where the kind of file was reported.
    """

    make: Callable[[], bytes]
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    places: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    name: str = "file"
    report: str = ""
    problem: str = ""  # what is said of a file that is not read


# Word

_W = (
    'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" xmlns:v="urn:schemas-microsoft-com:vml" '
    'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math" '
    'xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing" '
    'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" '
    'xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
)


def _run(text: str) -> str:
    return f"<w:r><w:t>{text}</w:t></w:r>"


def _saved(document: Any) -> bytes:
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def word(*paragraphs: str) -> bytes:
    """A Word file of one heading and paragraphs of this XML."""
    document = docx.Document()
    document.add_heading("Harbour rules", 1)
    for inner in paragraphs:
        document.add_paragraph("first ")._p.append(parse_xml(inner))
    document.add_paragraph("The end.")
    return _saved(document)


def block(xml: str) -> bytes:
    document = docx.Document()
    document.add_heading("Harbour rules", 1)
    document.element.body.insert(1, parse_xml(xml))
    document.add_paragraph("The end.")
    return _saved(document)


_BOX = f"<w:txbxContent><w:p>{_run('a berth costs 41')}</w:p></w:txbxContent>"
_VML = f"<w:pict><v:shape><v:textbox>{_BOX}</v:textbox></v:shape></w:pict>"
_SHAPE = (
    '<w:drawing><wp:anchor><a:graphic><a:graphicData uri="http://schemas.microsoft.com/office/word/2010/wordprocessing'
    f'Shape"><wps:wsp><wps:txbx>{_BOX}</wps:txbx></wps:wsp></a:graphicData></a:graphic></wp:anchor></w:drawing>'
)


def nested_table() -> bytes:
    document = docx.Document()
    cell = document.add_table(rows=1, cols=1).cell(0, 0)
    cell.text = "outer"
    cell.add_table(rows=1, cols=1).cell(0, 0).text = "inner 41"
    return _saved(document)


def word_table() -> bytes:
    document = docx.Document()
    table = document.add_table(rows=2, cols=3)
    for at, text in enumerate(("berth", "fee", "depth", "north", "41", "9")):
        table.cell(at // 3, at % 3).text = text
    table.cell(0, 0).merge(table.cell(0, 1)).text = "WIDE"
    return _saved(document)


def word_with(change: Callable[[Any], object]) -> bytes:
    document = docx.Document()
    document.add_heading("Harbour rules", 1)
    document.add_paragraph("The first paragraph.")
    change(document)
    return _saved(document)


def footnotes(kind: str = "footnote") -> bytes:
    note = f'<w:{kind}s {_W}><w:{kind} w:id="2"><w:p>{_run("the fee is 41 crowns")}</w:p></w:{kind}></w:{kind}s>'
    data = word(f'<w:r {_W}><w:{kind}Reference w:id="2"/></w:r>')
    main = "application/vnd.openxmlformats-officedocument.wordprocessingml"
    return added(data, f"word/{kind}s.xml", note, "word/_rels/document.xml.rels", f"{kind}s", f"{main}.{kind}s+xml")


def added(archive: bytes, member: str, content: str, rels: str, kind: str, mime: str) -> bytes:
    """An Office file with one more part."""
    out, base = io.BytesIO(), "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            data = old.read(name).decode("latin-1")
            if name == rels:
                target = "/" + member
                data = data.replace(
                    "</Relationships>",
                    f'<Relationship Id="rIdX" Type="{base}/{kind}" Target="{target}"/></Relationships>',
                )
            if name == "[Content_Types].xml":
                data = data.replace("</Types>", f'<Override PartName="/{member}" ContentType="{mime}"/></Types>')
            new.writestr(name, data.encode("latin-1"))
        new.writestr(member, content)
    return out.getvalue()


def picture() -> io.BytesIO:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (80, 80), (40, 90, 200)).save(out, "png")
    out.seek(0)
    return out


# Excel


def sheets(
    change: Callable[[Any], object], rows: Sequence[Sequence[object]] = (("berth", "fee"), ("north", 41))
) -> bytes:
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(list(row))
    change(book)
    return _saved(book)


def lying_dimension() -> bytes:
    data = sheets(lambda _: None)
    name = "xl/worksheets/sheet1.xml"
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        sheet = re.sub(rb'<dimension ref="[^"]*"', b'<dimension ref="A1:A1"', file.read(name))
    return folders.replaced(data, name, sheet)


def inline_strings() -> bytes:
    rows = "".join(f'<row r="{n}"><c r="A{n}" t="inlineStr"><is><t>cell {n}</t></is></c></row>' for n in (1, 2))
    space = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    sheet = f'<worksheet xmlns="{space}"><sheetData>{rows}</sheetData></worksheet>'
    return folders.replaced(sheets(lambda _: None), "xl/worksheets/sheet1.xml", sheet.encode())


def charted(book: Any) -> None:
    chart = BarChart()
    chart.title = "Fees of berths"
    chart.add_data(Reference(book.active, min_col=2, min_row=1, max_row=2), titles_from_data=True)
    book.active.add_chart(chart, "D5")


def _set(book: Any, **cells: object) -> None:
    for name, value in cells.items():
        book.active[name] = value


def _hidden(book: Any) -> None:
    other = book.create_sheet("Tariff")
    other["A1"], other.sheet_state = "the hidden fee is 52", "hidden"


def _named(book: Any) -> None:
    book.create_sheet("Zwei Höfe")["B3"] = "x"


def _merged(book: Any) -> None:
    book.active["A4"] = "over three"
    book.active.merge_cells("A4:C4")


def _remark(book: Any) -> None:
    book.active["B2"].comment = Comment("paid in crowns", "a")


# PowerPoint


def deck(*changes: Callable[[Any], object]) -> bytes:
    """A slide for each change."""
    slides = pptx.Presentation()
    for change in changes:
        slide = slides.slides.add_slide(slides.slide_layouts[5])
        slide.shapes.title.text = "Harbour"
        change(slide)
    return _saved(slides)


def _table(slide: Any) -> None:
    table = slide.shapes.add_table(2, 2, Inches(1), Inches(2), Inches(4), Inches(1)).table
    for at, text in enumerate(("berth", "fee", "north", "41")):
        table.cell(at // 2, at % 2).text = text


def _group(slide: Any) -> None:
    inner = slide.shapes.add_group_shape().shapes.add_group_shape()
    inner.shapes.add_textbox(Inches(1), Inches(2), Inches(2), Inches(1)).text_frame.text = "inside two groups"


def _notes(slide: Any) -> None:
    slide.notes_slide.notes_text_frame.text = "say that the fee is 41"


def _chart(slide: Any) -> None:
    data: Any = CategoryChartData()  # type: ignore[no-untyped-call]
    data.categories = ["north pier", "south pier"]
    data.add_series("fee in crowns", (41, 52))
    box = (Inches(1), Inches(2), Inches(4), Inches(3))
    slide.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, *box, data)


def _picture(slide: Any) -> None:
    slide.shapes.add_picture(picture(), Inches(1), Inches(2))


def smart_art() -> bytes:
    a = "http://schemas.openxmlformats.org/drawingml/2006/main"
    d = "http://schemas.openxmlformats.org/drawingml/2006/diagram"
    point = "<dgm:pt><dgm:t><a:p><a:r><a:t>moor first</a:t></a:r></a:p></dgm:t></dgm:pt>"
    model = f'<dgm:dataModel xmlns:dgm="{d}" xmlns:a="{a}"><dgm:ptLst>{point}</dgm:ptLst></dgm:dataModel>'
    frame = (
        f'<p:graphicFrame xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main" xmlns:a="{a}">'
        '<p:nvGraphicFramePr><p:cNvPr id="9" name="d"/><p:cNvGraphicFramePr/><p:nvPr/></p:nvGraphicFramePr>'
        f'<p:xfrm><a:off x="0" y="0"/><a:ext cx="99" cy="99"/></p:xfrm><a:graphic><a:graphicData uri="{d}">'
        f'<dgm:relIds xmlns:dgm="{d}" '
        'xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships" r:dm="rIdX"/></a:graphicData>'
        "</a:graphic></p:graphicFrame>"
    )

    data = deck(lambda slide: slide.shapes._spTree.append(pptx.oxml.parse_xml(frame)))
    mime = "application/vnd.openxmlformats-officedocument.drawingml.diagramData+xml"
    return added(data, "ppt/diagrams/data1.xml", model, "ppt/slides/_rels/slide1.xml.rels", "diagramData", mime)


# PDF


def pdf(*pages: Callable[[Canvas], object], **options: Any) -> bytes:
    out = io.BytesIO()
    canvas = Canvas(out, **options)
    for page in pages:
        page(canvas)
        canvas.showPage()
    canvas.save()
    return out.getvalue()


def says(*lines: str, x: int = 40) -> Callable[[Canvas], None]:
    def write(canvas: Canvas) -> None:
        for at, line in enumerate(lines):
            canvas.drawString(x, 800 - 14 * at, line)

    return write


def _field(canvas: Canvas) -> None:
    canvas.acroForm.textfield(name="ship", value="Silver Heron", x=40, y=760, width=300, height=20)


def _form(canvas: Canvas) -> None:
    canvas.drawString(40, 800, "Name of the ship:")
    _field(canvas)


def _checked(canvas: Canvas) -> None:
    canvas.drawString(40, 800, "Berth application")
    canvas.acroForm.checkbox(name="insured", checked=True, x=40, y=700)
    canvas.acroForm.choice(name="pier", value="north", options=["north", "south"], x=40, y=600)


def _columns(canvas: Canvas) -> None:
    for at in range(30):
        canvas.drawString(40, 800 - 14 * at, f"left line number {at} of the column")
        canvas.drawString(320, 800 - 14 * at, f"right line number {at} of the column")


def _rotated(canvas: Canvas) -> None:
    canvas.drawString(40, 800, "upright words")
    canvas.translate(300, 300)
    canvas.rotate(90)
    canvas.drawString(0, 0, "sideways words")


def _image(canvas: Canvas) -> None:
    canvas.drawImage(ImageReader(picture()), 0, 0, 595, 842)


def ligatures() -> bytes:
    pdfmetrics.registerFont(TTFont("Vera", str(Path(reportlab.__file__).parent / "fonts" / "Vera.ttf")))

    def page(canvas: Canvas) -> None:
        canvas.setFont("Vera", 12)
        canvas.drawString(40, 800, "the of\ufb01ce is af\ufb02uent")

    return pdf(page)


def broken_page(stream: bytes, is_deflated: bool) -> bytes:
    """A PDF of three pages, whose second has this content."""
    from pypdf import PdfReader, PdfWriter
    from pypdf.generic import DecodedStreamObject, NameObject, StreamObject

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf(*(says(f"fee 4{number}") for number in (1, 2, 3))))))
    content: StreamObject = StreamObject() if is_deflated else DecodedStreamObject()
    if is_deflated:
        content._data = stream
        content[NameObject("/Filter")] = NameObject("/FlateDecode")
    else:
        content.set_data(stream)
    writer.pages[1][NameObject("/Contents")] = writer._add_object(content)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def annotated() -> bytes:
    from pypdf import PdfReader, PdfWriter
    from pypdf.annotations import FreeText

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf(says("The fee.")))))
    writer.add_annotation(0, FreeText(text="is 41 crowns", rect=(50, 550, 200, 650)))
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def locked_256() -> bytes:
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf(says("The fee is 41.")))))
    writer.encrypt("", "owner", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


# HTML

PAGE = (
    "<!DOCTYPE html><html><head><style>.x{}</style></head><body><script>var hidden = 1;</script>"
    "<p>The fee is 41 &amp; more.</p></body></html>"
)
FEE, MARKUP = ("The fee is 41 & more.",), ("hidden", "<p>", "amp;", ".x{}")


def html(body: str, head: str = "", charset: str = "utf-8") -> Callable[[], bytes]:
    page = f"<!doctype html><html><head>{head}<title>T</title></head><body>{body}</body></html>"
    return lambda: page.encode(charset)


# Mail

HEAD = "From: a@example.org\nTo: b@example.org\nSubject: Fees\nMIME-Version: 1.0\n"
MIXED = HEAD + "Content-Type: multipart/mixed; boundary=zz\n\n"
_PLAIN, _HTML = "Content-Type: text/plain; charset=utf-8\n\n", "Content-Type: text/html; charset=utf-8\n\n"


def mail(text: str, charset: str = "utf-8") -> Callable[[], bytes]:
    return lambda: text.encode(charset)


def mailbox(*charsets: str) -> bytes:
    return "".join(
        f"From a Thu\n{HEAD}Content-Type: text/plain; charset={charset}\n\nThe fee is 4{number}.\n\n"
        for number, charset in enumerate(charsets, 1)
    ).encode()


# Text

GERMAN = "Die Größe des Hafens beträgt fünf Höfe. Straße und Brücke gehören zur Stadt Köln.\n"
RUSSIAN = "Привет, это текст на русском языке, и в нём есть слова о гавани.\n"
JAPANESE = "港の料金は四十一クローネです。船は北の桟橋に停泊してください。\n"
CHINESE = "港口的费用是四十一克朗。船只必须停泊在北码头。\n"


# Others


def open_document(kind: str, content: str) -> bytes:
    """A file of OpenDocument: `kind` is text, spreadsheet or presentation."""
    spaces = "".join(
        f' xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name if name != "draw" else "drawing"}:1.0"'
        for name in ("office", "text", "table", "draw")
    )
    mime = f"application/vnd.oasis.opendocument.{kind}"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("mimetype", mime)
        archive.writestr(
            "META-INF/manifest.xml",
            '<manifest:manifest xmlns:manifest="urn:oasis:names:tc:opendocument:xmlns:manifest:1.0">'
            f'<manifest:file-entry manifest:full-path="/" manifest:media-type="{mime}"/></manifest:manifest>',
        )
        archive.writestr(
            "content.xml",
            f'<?xml version="1.0"?><office:document-content{spaces}><office:body><office:{kind}>{content}'
            f"</office:{kind}></office:body></office:document-content>",
        )
    return out.getvalue()


def epub() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("mimetype", "application/epub+zip")
        archive.writestr(
            "META-INF/container.xml",
            '<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles><rootfile '
            'full-path="book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>',
        )
        items = "".join(f'<item id="c{n}" href="c{n}.xhtml" media-type="application/xhtml+xml"/>' for n in (1, 2))
        archive.writestr(
            "book.opf",
            '<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="i"><metadata '
            'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>Harbours</dc:title><dc:identifier id="i">x'
            f"</dc:identifier><dc:language>en</dc:language></metadata><manifest>{items}</manifest><spine>"
            '<itemref idref="c1"/><itemref idref="c2"/></spine></package>',
        )
        for number, name in ((1, "North"), (2, "South")):
            archive.writestr(
                f"c{number}.xhtml",
                f'<html xmlns="http://www.w3.org/1999/xhtml"><head><title>x</title></head><body><h1>{name}</h1>'
                f"<p>The fee is 4{number}.</p></body></html>",
            )
    return out.getvalue()


def compound(streams: dict[str, bytes]) -> bytes:
    """A compound file, as Office wrote them before 2007: sectors of 512 bytes, each stream of 4 KiB at least."""
    free, end, size = 0xFFFFFFFF, 0xFFFFFFFE, 512
    padded = {name: data.ljust(max(4096, -(-len(data) // size) * size), b"\0") for name, data in streams.items()}
    num_directory = -(-(len(streams) + 1) * 128 // size)
    table = [0xFFFFFFFD, *range(2, 1 + num_directory), end]
    order = sorted(padded, key=lambda name: (len(name), name.upper()))
    entries, body = [("Root Entry", 5, end, 0, 1 if order else free, free)], b""
    for number, name in enumerate(order, 2):
        start, count = len(table), len(padded[name]) // size
        table += [*range(start + 1, start + count), end]
        entries.append((name, 2, start, len(padded[name]), free, number if number <= len(order) else free))
        body += padded[name]
    entries += [("", 0, 0, 0, free, free)] * (num_directory * 4 - len(entries))
    directory = b"".join(
        struct.pack(
            "<64sHBBIII36sIQ", name.encode("utf-16-le"), 2 * len(name) + 2 * bool(name), kind, 1, free, right, child,
            bytes(36), start, length,
        )
        for name, kind, start, length, child, right in entries
    )  # fmt: skip
    fields = (0x3E, 3, 0xFFFE, 9, 6, bytes(6), 0, 1, 1, 0, 4096, end, 0, end, 0, 0)
    head = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(16) + struct.pack("<5H6s10I", *fields) + b"\xff" * 432
    table += [free] * (128 - len(table))
    return head + struct.pack("<128I", *table) + directory + body


def old_excel() -> bytes:
    def record(kind: int, data: bytes) -> bytes:
        return struct.pack("<HH", kind, len(data)) + data

    def begin(kind: int) -> bytes:
        return record(0x809, struct.pack("<4H2I", 0x600, kind, 0, 0, 0, 0))

    label = record(0x204, struct.pack("<4HB", 0, 0, 0, 5, 0) + b"north")
    cells = label + record(0x203, struct.pack("<3Hd", 0, 1, 0, 41.0))
    offset = len(begin(5)) + 16 + 4
    names = record(0x85, struct.pack("<IHBB", offset, 0, 4, 0) + b"Fees")
    return compound({"Workbook": begin(5) + names + record(0x0A, b"") + begin(0x10) + cells + record(0x0A, b"")})


def outlook() -> bytes:
    texts = {0x37: "Fees", 0x1000: "The fee is 41.", 0x0C1A: "Nava", 0x1A: "IPM.Note"}
    properties = bytes(32) + b"".join(
        struct.pack("<HHIII", 0x1F, tag, 6, 2 * len(text) + 2, 0) for tag, text in texts.items()
    )
    streams = {f"__substg1.0_{tag:04X}001F": text.encode("utf-16-le") for tag, text in texts.items()}
    return compound(streams | {"__properties_version1.0": properties})


RTF = (
    rb"{\rtf1\ansi\ansicpg1252{\fonttbl{\f0 Arial;}}\f0 Die Gr\'f6\'dfe: \b 41\b0  crowns\u8364?.\par Second line.\par}"
)

CASES: dict[str, Case] = {
    # of bugs that were reported of this program
    "Word: content control": Case(
        lambda: block(f"<w:sdt {_W}><w:sdtContent><w:p>{_run('mooring fee 41')}</w:p></w:sdtContent></w:sdt>"),
        ("Harbour rules", "mooring fee 41", "The end."),
        report="python-docx-ng#70",
    ),
    "Word: inline content control": Case(
        lambda: word(f"<w:sdt {_W}><w:sdtContent>{_run('fee 41')}</w:sdtContent></w:sdt>"),
        ("first fee 41",),
        report="langgenius/dify#42414",
    ),
    "Word: tracked insertion": Case(
        lambda: word(f'<w:ins {_W} w:id="1" w:author="a">{_run("fee 41")}</w:ins>'),
        ("first fee 41",),
        report="python-docx#803",
    ),
    "Word: smart tag": Case(
        lambda: word(f'<w:smartTag {_W} w:element="place">{_run("Köln")}</w:smartTag>'),
        ("first Köln",),
    ),
    "Word: text box": Case(
        lambda: word(f"<w:r {_W}>{_VML}</w:r>"), ("first", "a berth costs 41", "The end."), report="docling#1529"
    ),
    "Word: equation": Case(lambda: word(f"<m:oMath {_W}><m:r><m:t>E=41</m:t></m:r></m:oMath>"), ("first E=41",)),
    "Word: nested table": Case(nested_table, ("outer", "inner 41")),
    "Word: header": Case(
        lambda: word_with(lambda d: setattr(d.sections[0].header.paragraphs[0], "text", "Port of Köln")),
        ("Port of Köln",),
    ),
    "Excel: lying dimension": Case(
        lying_dimension, ("berth\tfee\nnorth\t41",), places=("Sheet",), report="langgenius/dify#1039"
    ),
    "HTML: byte order mark": Case(lambda: b"\xef\xbb\xbf" + PAGE.encode(), FEE, MARKUP, report="mimetype#267"),
    "HTML: fragment": Case(
        lambda: b"<div><script>var hidden = 1;</script><p>The fee is 41 &amp; more.</p></div>",
        FEE,
        MARKUP,
        name="a.html",
        report="golang/go#20912",
    ),
    "HTML: meta first": Case(
        lambda: b"<meta charset=utf-8><title>T</title><script>var hidden=1;</script><p>The fee is 41 &amp; more.</p>",
        FEE,
        MARKUP,
        report="google/magika#1242",
    ),
    "HTML: long comment first": Case(lambda: b"<!-- " + b"licence " * 600 + b"-->" + PAGE.encode(), FEE, MARKUP),
    "mail: unknown charset": Case(
        mail(HEAD + "Content-Type: text/plain; charset=iso-8859-8-i\n\nThe fee is 41.\n"),
        ("Subject: Fees", "is 41."),
        report="unstructured#801",
    ),
    "mailbox: unknown charset": Case(
        lambda: mailbox("utf-8", "unknown-8bit", "utf-8"),
        ("fee is 41", "fee is 42", "fee is 43"),
        places=("message 1", "message 2", "message 3"),
    ),
    "mail: no boundary": Case(
        mail(MIXED + "The fee is 41.\n"), ("Subject: Fees", "The fee is 41."), report="fast_mail_parser#150"
    ),
    "mail: forwarded": Case(
        mail(
            MIXED
            + f"--zz\n{_PLAIN}see below\n--zz\nContent-Type: message/rfc822\n\n"
            + HEAD.replace("Fees", "Inner")
            + "\nThe fee is 41.\n--zz--\n"
        ),
        ("see below", "Subject: Inner", "The fee is 41."),
        report="greenmail#1036",
    ),
    "text: UTF-8 cut in a character": Case(
        lambda: (GERMAN * 20).encode()[: GERMAN.encode().index("ü".encode()) + 1],
        ("Größe des Hafens beträgt f",),
        ("Ă",),
        notes=("UTF-8",),
        report="docling#4202",
    ),
    "text: long UTF-8 that is cut": Case(
        lambda: (GERMAN * 20).encode()[: (GERMAN * 20).encode().rindex("ö".encode()) + 1],
        ("Größe", "Straße"),
        ("Ă",),
        notes=("UTF-8",),
    ),
    "text: one damaged byte": Case(
        lambda: (GERMAN * 9).encode()[:400] + b"\xff" + (GERMAN * 9).encode()[400:],
        ("Größe", "Brücke"),
        ("Ă",),
        notes=("UTF-8",),
        report="unstructured#4466",
    ),
    "PDF: filled form": Case(
        lambda: pdf(_form),
        ("Name of the ship:", "ship: Silver Heron"),
        places=("p. 1",),
        report="docling#2677",
    ),
    "PDF: form only": Case(lambda: pdf(_field), ("ship: Silver Heron",), ("OCR",), report="pdfminer.six#240"),
    "PDF: page that does not inflate": Case(
        lambda: broken_page(b"not deflate", True),
        ("fee 41", "fee 43"),
        places=("p. 1", "p. 3"),
        notes=("p. 2",),
        report="pypdf#3579",
    ),
    "PDF: page that cannot be parsed": Case(
        lambda: broken_page(b"BT /F1 12 Tf 40 800 Td [ (abc ] TJ ( ET", False),
        ("fee 41", "fee 43"),
        places=("p. 1", "p. 3"),
        notes=("p. 2",),
        report="langchain#6253",
    ),
    # of other programs' reports
    "Word: tracked deletion": Case(
        lambda: word(f'<w:del {_W} w:id="1" w:author="a"><w:r><w:delText>old fee</w:delText></w:r></w:del>'),
        ("The end.",),
        ("old fee",),
    ),
    "Word: footnote": Case(footnotes, ("The end.", "the fee is 41 crowns")),
    "Word: endnote": Case(lambda: footnotes("endnote"), ("The end.", "the fee is 41 crowns")),
    "Word: comment": Case(
        lambda: word_with(lambda d: d.add_comment(d.paragraphs[1].runs[0], text="fee is 41", author="a")),
        ("The first paragraph.", "fee is 41"),
    ),
    "Word: footer": Case(
        lambda: word_with(lambda d: setattr(d.sections[0].footer.paragraphs[0], "text", "fees of 1941")),
        ("fees of 1941",),
    ),
    "Word: shape with its fallback": Case(
        lambda: word(
            f'<w:r {_W}><mc:AlternateContent><mc:Choice Requires="wps">{_SHAPE}</mc:Choice><mc:Fallback>{_VML}'
            "</mc:Fallback></mc:AlternateContent></w:r>"
        ),
        ("first", "a berth costs 41", "The end."),
        report="docling#2668",
    ),
    "Word: hyperlink": Case(
        lambda: word(f'<w:hyperlink {_W} w:anchor="x">{_run("fee 41")}</w:hyperlink>'), ("first fee 41",)
    ),
    "Word: field": Case(
        lambda: word(f'<w:fldSimple {_W} w:instr=" DATE ">{_run("1 May")}</w:fldSimple>'), ("first 1 May",), ("DATE",)
    ),
    "Word: line break and tab": Case(
        lambda: word(f"<w:r {_W}><w:t>a</w:t><w:br/><w:t>b</w:t><w:tab/><w:t>c</w:t></w:r>"), ("a\nb\tc",)
    ),
    "Word: merged cells": Case(word_table, ("WIDE", "depth", "north\t41\t9")),
    "Word: heading in a table": Case(
        lambda: word_with(lambda d: d.add_table(1, 2).cell(0, 0).paragraphs[0].__setattr__("style", "Heading 2")),
        ("Harbour rules", "The first paragraph."),
        places=("Harbour rules",),
    ),
    "Word: list": Case(
        lambda: word_with(lambda d: d.add_paragraph("moor first", style="List Bullet")), ("moor first",)
    ),
    "Word: picture": Case(
        lambda: word_with(lambda d: d.add_picture(picture())), ("The first paragraph.",), notes=("picture",)
    ),
    "Word: headings": Case(
        lambda: folders.word([("Flags", "One."), ("Rivers", "Two.")]),
        ("Flags\nOne.", "Rivers\nTwo."),
        places=("Flags", "Rivers"),
    ),
    "Excel: merged cells": Case(lambda: sheets(_merged), ("north\t41", "over three")),
    "Excel: formula without a value": Case(
        lambda: sheets(lambda b: _set(b, C1="sum", C2="=B2+1")), ("berth\tfee\tsum", "north\t41"), notes=("formula",)
    ),
    "Excel: dates": Case(lambda: sheets(lambda b: _set(b, C2=date(2026, 5, 1))), ("2026-05-01",)),
    "Excel: hidden sheet": Case(lambda: sheets(_hidden), ("the hidden fee is 52",), places=("Sheet", "Tariff")),
    "Excel: names of sheets": Case(lambda: sheets(_named), ("north\t41", "x"), places=("Sheet", "Zwei Höfe")),
    "Excel: chart": Case(lambda: sheets(charted), ("north\t41", "Fees of berths")),
    "Excel: stray cell": Case(lambda: sheets(lambda b: _set(b, XFD1048576="far")), ("north\t41", "far")),
    "Excel: empty cells": Case(lambda: sheets(lambda b: _set(b, C5="x")), ("north\t41\n", "\t\tx")),
    "Excel: inline strings": Case(inline_strings, ("cell 1\ncell 2",)),
    "Excel: comment": Case(lambda: sheets(_remark), ("north\t41", "paid in crowns")),
    "Excel: truth and numbers": Case(
        lambda: sheets(lambda b: _set(b, A3=True, B3=0.5, C3=12345678901)), ("0.5\t12345678901",)
    ),
    "PowerPoint: table": Case(lambda: deck(_table), ("Harbour", "berth\tfee\nnorth\t41"), places=("slide 1",)),
    "PowerPoint: groups": Case(lambda: deck(_group), ("inside two groups",)),
    "PowerPoint: notes": Case(
        lambda: deck(lambda s: None, _notes), ("say that the fee is 41",), places=("slide 1", "slide 2")
    ),
    "PowerPoint: SmartArt": Case(smart_art, ("Harbour", "moor first")),
    "PowerPoint: chart": Case(lambda: deck(_chart), ("Harbour", "fee in crowns", "north pier\tsouth pier", "41\t52")),
    "PowerPoint: picture": Case(lambda: deck(_picture), ("Harbour",), notes=("picture",)),
    "HTML: preformatted": Case(html("<pre>a  b\n    c</pre>"), ("a  b\n    c",)),
    "HTML: entities": Case(html("<p>&lt;fee&gt; 41&nbsp;&euro; &#x4e2d;</p>"), ("<fee> 41", "€ 中")),
    "HTML: navigation": Case(html("<nav>Skip me</nav><main><p>The fee.</p></main>"), ("The fee.",), ("Skip me",)),
    "HTML: table": Case(
        html("<table><tr><th>berth</th><th>fee</th></tr><tr><td>north</td><td>41</td></tr></table>"),
        ("berth\tfee", "north\t41"),
    ),
    "HTML: headings": Case(
        html("<p>Intro</p><h1>One</h1><p>a</p><h2>Two</h2><p>b</p>"),
        ("Intro", "One\na", "Two\nb"),
        places=("", "One", "Two"),
    ),
    "HTML: nested lists": Case(html("<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"), ("a", "b", "c")),
    "HTML: line breaks": Case(html("<p>one<br>two</p>"), ("one\ntwo",)),
    "HTML: inline markup": Case(html("<p>the <b>fee</b>s_of_<i>berth</i> * 41</p>"), ("the fees_of_berth * 41",)),
    "HTML: form": Case(html("<form><label>Ship</label><p>The fee.</p></form>"), ("Ship", "The fee.")),
    "HTML: header and footer": Case(html("<header><p>Port</p></header><p>a</p><footer><p>b</p></footer>"), ("a",)),
    "HTML: UTF-16": Case(html("<p>Größe</p>", charset="utf-16"), ("Größe",)),
    "HTML: Latin-1 by its meta": Case(html("<p>Größe</p>", "<meta charset=latin-1>", "latin-1"), ("Größe",)),
    "HTML: Shift-JIS by its meta": Case(html(JAPANESE, "<meta charset=shift_jis>", "shift_jis"), (JAPANESE.strip(),)),
    "HTML: XHTML": Case(
        lambda: b'<?xml version="1.0"?>\n<html xmlns="http://www.w3.org/1999/xhtml"><body><p>a<br/>b</p></body></html>',
        ("a\nb",),
        ("xml",),
    ),
    "HTML: no paragraphs": Case(html("<div>one</div><div>two<span> three</span></div>"), ("one\ntwo three",)),
    "HTML: deep": Case(html("<div>" * 300 + "deep" + "</div>" * 300), ("deep",)),
    "PDF: two columns": Case(
        lambda: pdf(_columns), ("left line number 29 of", "right line number 29 of"), report="pymupdf#2908"
    ),
    "PDF: ligatures": Case(ligatures, ("the office is affluent",)),
    "PDF: hyphens": Case(
        lambda: pdf(says("a com-", "piler and a well-", "Known 3-", "4")), ("a compiler and a well-\nKnown 3-\n4",)
    ),
    "PDF: rotated text": Case(lambda: pdf(_rotated), ("upright words", "sideways words")),
    "PDF: empty page": Case(
        lambda: pdf(says("one"), lambda c: None, says("three")),
        ("one", "three"),
        places=("p. 1", "p. 3"),
        notes=("p. 2",),
    ),
    "PDF: one scanned page": Case(lambda: pdf(says("one"), _image), ("one",), places=("p. 1",), notes=("p. 2", "OCR")),
    "PDF: encrypted without a password": Case(
        lambda: folders.pdf(["The fee is 41."], "", "owner"), ("The fee is 41.",)
    ),
    "PDF: encrypted by another program": Case(locked_256, ("The fee is 41.",)),
    "PDF: check box and choice": Case(lambda: pdf(_checked), ("Berth application", "insured: Yes", "pier: north")),
    "PDF: text annotation": Case(annotated, ("The fee.", "is 41 crowns")),
    "PDF: wide table": Case(lambda: pdf(says("berth      fee", "north      41")), ("berth", "fee", "north", "41")),
    "mail: HTML only": Case(
        mail(HEAD + _HTML + "<style>x</style><p>The fee is <b>41</b>.</p>"), ("The fee is 41.",), ("<p>",)
    ),
    "mail: table and list in HTML": Case(
        mail(HEAD + _HTML + "<table><tr><td>north</td><td>41</td></tr></table><ul><li>a</li><li>b</li></ul>x<br>y"),
        ("north\t41\na\nb\nx\ny",),
    ),
    "mail: alternative": Case(
        mail(
            HEAD + f"Content-Type: multipart/alternative; boundary=zz\n\n--zz\n{_PLAIN}The fee is 41.\n--zz\n{_HTML}"
            "<p>The fee is 41.</p>\n--zz--\n"
        ),
        ("The fee is 41.",),
        ("<p>",),
    ),
    "mail: two texts": Case(mail(MIXED + f"--zz\n{_PLAIN}first\n--zz\n{_PLAIN}second\n--zz--\n"), ("first", "second")),
    "mail: attachment": Case(lambda: folders.mail("Flags", "Two.\n"), ("Two.",), notes=("plan.pdf",)),
    "mail: encoded subject": Case(
        mail(HEAD.replace("Fees", "=?utf-8?b?" + base64.b64encode("Gebühr".encode()).decode() + "?=") + "\na\n"),
        ("Subject: Gebühr",),
    ),
    "mail: quoted printable": Case(
        mail(
            HEAD
            + "Content-Type: text/plain; charset=latin-1\nContent-Transfer-Encoding: quoted-printable\n\nGr=F6=DFe\n"
        ),
        ("Größe",),
    ),
    "mailbox: From in a text": Case(
        lambda: mailbox("utf-8", "utf-8").replace(b"The fee", b"Hello,\nFrom here the fee"),
        ("fee is 41", "fee is 42"),
        places=("message 1", "message 2"),
    ),
    "text: UTF-16 without a mark": Case(lambda: (GERMAN * 3).encode("utf-16-le"), (GERMAN.strip(),)),
    "text: UTF-16 BE without a mark": Case(lambda: (GERMAN * 3).encode("utf-16-be"), (GERMAN.strip(),)),
    "text: Latin-1": Case(lambda: (GERMAN * 3).encode("latin-1"), (GERMAN.strip(),)),
    "text: short Latin-1": Case(lambda: "Größe: fünf".encode("latin-1"), ("Größe: fünf",)),
    "text: Windows-1252": Case(lambda: ("“41” €, " + GERMAN).encode("cp1252"), ("“41” €, " + GERMAN.strip(),)),
    "text: Windows-1251": Case(lambda: (RUSSIAN * 4).encode("cp1251"), (RUSSIAN.strip(),)),
    "text: KOI8-R": Case(lambda: (RUSSIAN * 4).encode("koi8-r"), (RUSSIAN.strip(),)),
    "text: Shift-JIS": Case(lambda: (JAPANESE * 4).encode("shift_jis"), (JAPANESE.strip(),)),
    "text: EUC-JP": Case(lambda: (JAPANESE * 4).encode("euc_jp"), (JAPANESE.strip(),)),
    "text: GB 18030": Case(lambda: (CHINESE * 4).encode("gb18030"), (CHINESE.strip(),)),
    "text: one NUL": Case(lambda: b"a log\nthe fee \x00is 41\n" * 9, ("the fee is 41",)),
    "CSV": Case(lambda: b"berth,fee\nnorth,41\n", ("berth,fee\nnorth,41",), name="a.csv"),
    "Markdown: fence in a fence": Case(
        lambda: b"# One\n````\n```\n# no heading\n````\n# Two\nb\n",
        ("# no heading",),
        places=("One", "Two"),
        name="a.md",
    ),
    "Markdown: indented fence": Case(
        lambda: b"# One\n~~~\n```\n# no heading\n~~~\n# Two\nb\n", ("# no heading",), places=("One", "Two"), name="a.md"
    ),
    "OpenDocument text": Case(
        lambda: open_document("text", '<text:h text:outline-level="1">Harbour</text:h><text:p>The fee is 41.</text:p>'),
        ("Harbour", "The fee is 41."),
        places=("Harbour",),
    ),
    "OpenDocument sheet": Case(
        lambda: open_document(
            "spreadsheet",
            '<table:table table:name="Fees"><table:table-row><table:table-cell office:value-type="string"><text:p>north'
            '</text:p></table:table-cell><table:table-cell office:value-type="float" office:value="41">'
            "<text:p>41</text:p></table:table-cell></table:table-row></table:table>",
        ),
        ("north\t41",),
        places=("Fees",),
    ),
    "OpenDocument slides": Case(lambda: open_document("presentation", "<text:p>a</text:p>"), problem="is an archive"),
    "EPUB": Case(epub, ("The fee is 41.", "The fee is 42."), places=("North", "South")),
    "Excel before 2007": Case(old_excel, ("Fees", "north\t41"), places=("Fees",)),
    "Outlook": Case(outlook, ("Subject: Fees", "The fee is 41.")),
    "Office with a password": Case(lambda: compound({"EncryptedPackage": b"x"}), problem="encrypted"),
    "RTF": Case(lambda: RTF, ("Die Größe: 41 crowns€.", "Second line."), ("Arial",)),
}
