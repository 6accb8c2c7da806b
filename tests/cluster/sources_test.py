"""The documents of a bulk compile: where they are found, and what is wrong with some of them."""

from __future__ import annotations

import gzip
import json
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pytest
from pyarrow.parquet import write_table

from pictool.cluster.sources import Columns, SourceDocument, find_sources, read_documents
from pictool.errors import InputError


def read(*names: str, columns: Columns = Columns()) -> list[SourceDocument]:
    return [document for source in find_sources(names) for document in read_documents(source, columns)]


def texts(*names: str, columns: Columns = Columns()) -> dict[str, str | None]:
    return {document.id: document.text for document in read(*names, columns=columns)}


def errors(*names: str, columns: Columns = Columns()) -> dict[str, str]:
    return {part.id: part.error for part in read(*names, columns=columns) if part.error is not None}


def write_lines(path: Path, *records: object) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


@pytest.fixture(autouse=True)
def _files() -> None:
    for name in ("docs/a.txt", "docs/sub/b.txt", "docs/.hidden", "docs/.git/config", "c.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(f"text of {Path(name).name}")


def test_files_folders_and_globs_each_file_once(tmp_path: Path) -> None:
    assert texts("docs") == {"docs/a.txt": "text of a.txt", "docs/sub/b.txt": "text of b.txt"}
    assert list(texts("c.md", "docs/*.txt", "docs", "./c.md")) == ["c.md", "docs/a.txt", "docs/sub/b.txt"]
    assert list(texts(str(tmp_path / "docs" / "a.txt"))) == [str(tmp_path / "docs" / "a.txt")]
    assert list(texts(f"file://{tmp_path}/docs/**/*.txt")) == [
        f"{tmp_path}/docs/a.txt", f"{tmp_path}/docs/sub/b.txt"
    ]  # fmt: skip


def test_files_at_a_url(request: pytest.FixtureRequest) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    request.addfinalizer(files.store.clear)
    files.pipe({"/far/x.txt": b"far text", "/far/y.jsonl": b'{"text": "far line"}\n', "/far/z.txt": b"\xff"})
    assert texts("memory://far") == {
        "memory:///far/x.txt": "far text", "memory:///far/y.jsonl#0": "far line", "memory:///far/z.txt": None
    }  # fmt: skip
    assert "not UTF-8" in errors("memory://far")["memory:///far/z.txt"]


def test_no_name_and_no_error_shows_the_password_of_a_url() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        there = f"127.0.0.1:{server.server_port}/c.md"
        (document,) = read(f"http://user:secret@{there}")
        server.shutdown()
    assert document == SourceDocument(f"http://{there}", "text of c.md", None, len("text of c.md"))
    for name in ("memory://user:secret@none", "none://user:secret@far", "http://user:secret@127.0.0.1:1/x.txt"):
        with pytest.raises(InputError) as error:
            find_sources([name])
        assert "secret" not in str(error.value)


def test_lines_of_jsonl_and_rows_of_parquet() -> None:
    records = [{"text": "one", "name": "first", "n": 1}, {"text": "two", "name": "second", "n": 2}]
    write_lines(Path("lines.jsonl"), *records)
    Path("lines.jsonl.gz").write_bytes(gzip.compress(Path("lines.jsonl").read_bytes()))
    write_table(pa.Table.from_pylist(records), "rows.parquet")
    for name in ("lines.jsonl", "lines.jsonl.gz", "rows.parquet"):
        assert texts(name) == {f"{name}#0": "one", f"{name}#1": "two"}
        assert texts(name, columns=Columns(id="name")) == {"first": "one", "second": "two"}
        assert texts(name, columns=Columns(text="name", id="n")) == {"1": "first", "2": "second"}


def test_a_bad_record_is_an_error_and_stops_no_other() -> None:
    lines = [b'{"text": "good"}', b"{", b"[1]", b'{"text": 5}', b'{"other": 1}', b'{"text": "\\ud800"}', b"\xff", b"",
             b"[" * 100_000, b'{"text": NaN}', b'{"text": "last"}']  # fmt: skip
    Path("bad.jsonl").write_bytes(b"\n".join(lines))
    found = read("bad.jsonl")
    assert [part.text for part in found if part.error is None] == ["good", "last"]
    assert [part.id for part in found] == [f"bad.jsonl#{number}" for number in (0, 1, 2, 3, 4, 5, 6, 8, 9, 10)]
    assert all(len(part.error or "") < 400 for part in found)
    assert sum(part.num_bytes for part in found) <= Path("bad.jsonl").stat().st_size
    assert errors("bad.jsonl", columns=Columns(id="id"))["bad.jsonl#0"].startswith("bad.jsonl#0: id must be")


def test_a_line_that_never_ends_is_an_error_and_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pictool.cluster.sources.MAX_FILE_BYTES", 100)
    Path("long.jsonl").write_bytes(b'{"text": "' + b"x" * 1000 + b'"}\n{"text": "short"}\n')
    assert texts("long.jsonl") == {"long.jsonl#0": None, "long.jsonl#1": "short"}


def test_a_bad_file_is_an_error_and_stops_no_other() -> None:
    Path("bad.parquet").write_bytes(b"PAR1 and nothing else")
    Path("empty.txt").write_bytes(b"")
    Path("binary.txt").write_bytes(b"\0\1")
    write_table(pa.table({"body": ["x"]}), "other.parquet")
    found = errors("bad.parquet", "empty.txt", "binary.txt", "other.parquet", "c.md")
    assert list(found) == ["bad.parquet", "empty.txt", "binary.txt", "other.parquet"]
    assert "has no column text; it has body" in found["other.parquet"]
    assert all(error.startswith(name) for name, error in found.items())


def test_a_file_that_goes_away_or_may_not_be_read_is_an_error() -> None:
    sources = find_sources(["docs"])
    Path("docs/a.txt").unlink()
    assert [part.error is None for source in sources for part in read_documents(source, Columns())] == [False, True]


@pytest.mark.parametrize("name", ["absent.txt", "docs/*.pdf", "empty", "nowhere://x/y", "s3x://bucket"])
def test_what_names_no_file_is_refused(name: str) -> None:
    Path("empty").mkdir()
    with pytest.raises(InputError, match=name.replace("*", r"\*")):
        find_sources([name])
