"""A worker of a bulk compile, without Ray: what it writes to a remote, and the rows that it returns."""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from pyarrow.parquet import read_table

from pictool.cluster.loading import ModelSpec
from pictool.cluster.manifest import ManifestRow, sign_computed, to_table, write_manifest
from pictool.cluster.sources import SourceDocument
from pictool.cluster.worker import BulkSpec, CompileWorker, compile_counted
from pictool.compiler.chunking import make_chunks
from pictool.compiler.compile import compile_chunks
from pictool.core import CompileOptions
from pictool.errors import InputError, ModelError
from pictool.store.objects.format import CompiledChunk, EncodedObject, encode_object
from pictool.store.remote.remote import Remote, Retry
from pictool.store.signatures import Signers, SigningKey, Trust, require_signed_file
from pictool.store.store import Store

QUICK = Retry(attempts=2, first_s=0.001, most_s=0.002)
DOCUMENTS = [SourceDocument(f"d{number}", f"text of document {number}. It is short. " * (1 + number % 3), None, 40)
             for number in range(12)]  # fmt: skip


class Faulty(Remote):
    """A directory that may refuse to be written."""

    fault: Callable[[Path], OSError | None] = staticmethod(lambda path: None)

    def _put(self, source: os.PathLike[str] | EncodedObject | bytes, target: str) -> bool:
        error = self.fault(Path(target))
        if error is not None:
            raise error
        return super()._put(source, target)


@pytest.fixture
def remote(tmp_path: Path) -> Faulty:
    return Faulty(str(tmp_path / "remote"), QUICK)


@pytest.fixture
def spec(model_dir: Path, remote: Remote) -> BulkSpec:
    return BulkSpec(ModelSpec(str(model_dir), "cpu"), remote, chunk_tokens=24)


def run(spec: BulkSpec, documents: list[SourceDocument] = DOCUMENTS) -> list[ManifestRow]:
    worker = CompileWorker(spec)
    try:
        return worker.compile(documents)
    finally:
        worker.close()


def count_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of chunks of each forward that follows."""
    from pictool.runtime import prefill

    computed, original = list[int](), prefill.prefill_chunks

    def counting(model: object, chunks: list[object], *more: object) -> object:
        computed.append(len(chunks))
        return original(model, chunks, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(prefill, "prefill_chunks", counting)
    return computed


def test_rows_and_objects_are_those_of_a_serial_compile(spec: BulkSpec, tmp_path: Path) -> None:
    rows = run(spec)
    model, serial = spec.model.load(), Store(tmp_path / "serial")
    expected = []
    for document in DOCUMENTS:
        chunks = make_chunks(model, document.text or "", document.id, spec.chunk_tokens)
        for number, done in enumerate(compile_chunks(model, serial, chunks)):
            expected.append((document.id, number, done.key, len(done.chunk), done.path.stat().st_size))
    assert [(row.id, row.chunk, row.key, row.tokens, row.bytes) for row in rows] == expected
    there = Store(tmp_path / "remote")
    assert there.keys() == serial.keys() == sorted({row.key for row in rows if row.key})
    assert not any(row.error for row in rows) and sum(row.is_new for row in rows) == len(serial.keys())
    for key in there.keys():
        with there.peek(key) as one, serial.peek(key) as other:
            one.verify()
            assert (one.meta, one.text()) == (other.meta, other.text())


def test_what_the_remote_has_is_not_computed_again(spec: BulkSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(spec, DOCUMENTS[:8])
    computed = count_computed(monkeypatch)
    again = run(spec, DOCUMENTS[:8])
    assert computed == [] and not any(row.is_new for row in again)
    assert [(row.key, row.bytes) for row in again] == [(row.key, row.bytes) for row in first]
    more = run(spec)
    assert (
        computed == [sum(row.is_new for row in more)] == [len({row.key for row in more} - {row.key for row in first})]
    )


def test_a_truncated_object_at_the_remote_is_computed_again(spec: BulkSpec, tmp_path: Path) -> None:
    (row, *_) = run(spec, DOCUMENTS[:1])
    path = Store(tmp_path / "remote").path(row.key or "")
    path.write_bytes(path.read_bytes()[:-1])
    (again, *_) = run(spec, DOCUMENTS[:1])
    assert again.is_new and path.stat().st_size == row.bytes


def test_a_bad_document_is_a_row_and_stops_no_other(spec: BulkSpec) -> None:
    long = SourceDocument("long", "word " * 2000, None, 10_000)
    bad = [SourceDocument("unread", None, "unread: cannot be read"), SourceDocument("empty", "", None), *DOCUMENTS[:2]]
    whole = BulkSpec(spec.model, spec.remote)
    rows = run(whole, [*bad, long])
    assert {row.id: row.error is None for row in rows} == {
        "unread": False, "empty": False, "d0": True, "d1": True, "long": False
    }  # fmt: skip
    assert all(row.chunk is None and row.key is None for row in rows if row.error)


def test_a_chunk_that_cannot_be_computed_is_a_row_and_stops_no_other(
    spec: BulkSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pictool.runtime import tensors

    original = tensors.require_finite

    def refuse(name: str, *more: object) -> None:
        if name.startswith("d3"):
            raise ModelError(f"{name}: overflows")
        original(name, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(tensors, "require_finite", refuse)
    rows = run(spec)
    assert {row.id for row in rows if row.error} == {"d3"}
    assert all(row.bytes for row in rows if row.id != "d3")


def test_equal_documents_are_computed_once(spec: BulkSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = count_computed(monkeypatch)
    rows = run(spec, [SourceDocument(f"copy-{number}", "the same text", None) for number in range(5)])
    assert computed == [1] and len({row.key for row in rows}) == 1 and len(rows) == 5


def test_a_write_that_fails_for_good_is_a_row_and_the_next_run_writes_it(spec: BulkSpec, remote: Faulty) -> None:
    remote.fault = lambda path: OSError(errno.ENOSPC, "No space left on device") if path.stem[0] in "01234567" else None
    rows = run(spec)
    failed = [row for row in rows if row.error]
    assert failed and len(failed) < len(rows)
    assert all((row.key or "")[0] in "01234567" and "No space left" in (row.error or "") for row in failed)
    remote.fault = lambda path: None
    again = run(spec)
    assert [row.key for row in again] == [row.key for row in rows] and not any(row.error for row in again)
    assert {row.key for row in again if row.is_new} == {row.key for row in failed}


def test_a_write_that_fails_once_is_tried_again(spec: BulkSpec, remote: Faulty) -> None:
    tried = set[str]()

    def fault(path: Path) -> OSError | None:
        if path.stem in tried:
            return None
        tried.add(path.stem)
        return ConnectionResetError("reset")

    remote.fault = fault
    assert not any(row.error for row in run(spec))


def test_an_object_that_is_another_at_the_remote_is_a_row(spec: BulkSpec, tmp_path: Path) -> None:
    class Damaging(Remote):
        def _put(self, source: os.PathLike[str] | EncodedObject | bytes, target: str) -> bool:
            assert isinstance(source, EncodedObject)
            data = bytearray(source.read(0, source.num_bytes))
            data[len(data) // 2] ^= 1
            return super()._put(replace(source, parts=(data,)), target)

    remote = Damaging(str(tmp_path / "damaging"), QUICK)
    rows = run(replace(spec, remote=remote), DOCUMENTS[:2])
    assert rows and all(row.bytes is None and not row.is_new for row in rows)
    assert all((row.error or "").startswith(f"{remote.name(row.key or '')}: another object") for row in rows)


def test_an_object_that_another_worker_wrote_meanwhile_counts(spec: BulkSpec, tmp_path: Path) -> None:
    encoded: list[CompiledChunk] = []

    class Overtaken(Remote):
        def _put(self, source: os.PathLike[str] | EncodedObject | bytes, target: str) -> bool:
            own = next(one for one in encoded if one.meta.key == Path(target).stem)
            other = replace(own, layers=[(value, key) for key, value in own.layers])
            return super()._put(encode_object(other), target)

    def keep(chunk: CompiledChunk) -> EncodedObject:
        encoded.append(chunk)
        return encode_object(chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pictool.cluster.worker.encode_object", keep)
        rows = run(replace(spec, remote=Overtaken(str(tmp_path / "overtaken"), QUICK)), DOCUMENTS[:2])
    assert rows and all(row.bytes and not row.error for row in rows)


def test_computing_waits_for_a_slow_remote(spec: BulkSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, peaks = list[str](), list[int]()

    class Slow(Remote):
        def _put(self, source: os.PathLike[str] | EncodedObject | bytes, target: str) -> bool:
            running.append(target)
            peaks.append(len(running))
            time.sleep(0.005)
            running.remove(target)
            return super()._put(source, target)

    monkeypatch.setattr("pictool.cluster.worker._MOST_UNSENT", 1)
    rows = run(replace(spec, remote=Slow(str(tmp_path / "slow"), QUICK)))
    assert max(peaks) == 1 and not any(row.error for row in rows)


def test_what_was_computed_is_signed_and_the_manifest_as_a_whole(spec: BulkSpec, tmp_path: Path) -> None:
    key, manifest = SigningKey.new(tmp_path / "key"), tmp_path / "manifest.parquet"
    trust = Trust(Signers(tmp_path / "signers", {key.public: "build"}, {}))
    first = run(spec, DOCUMENTS[:3])  # by whom nobody knows
    rows = run(spec)
    keys = {row.key for row in rows if row.key} - {row.key for row in first}
    tables = [to_table(rows)]
    sign_computed(spec.remote, tables, key)
    write_manifest(manifest, tables, key)
    require_signed_file(trust, manifest)
    assert read_table(manifest).num_rows == len(rows)
    here = Store(tmp_path / "here", remote=spec.remote.url, trust=trust)
    assert {row.key for row in rows if row.key and here.has(row.key)} == keys
    here.drain()
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(InputError, match=re.escape(str(manifest))):
        require_signed_file(trust, manifest)


def test_nothing_is_left_of_a_worker(spec: BulkSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    run(spec)
    assert not list((tmp_path / "scratch").iterdir()) and not list((tmp_path / "remote" / "tmp").iterdir())


def test_another_model_or_version_than_the_drivers_is_refused(spec: BulkSpec) -> None:
    with pytest.raises(ModelError, match=f"^{spec.model.name}: "):
        run(replace(spec, model=replace(spec.model, fingerprints=("a", "b"))))
    with pytest.raises(InputError, match=r" 0\.0\.0"):
        run(replace(spec, model=replace(spec.model, version="0.0.0")))


def test_a_model_that_cannot_be_loaded_is_no_documents_problem(spec: BulkSpec) -> None:
    with pytest.raises(ModelError):
        run(replace(spec, model=ModelSpec("/no/such/model", "cpu")))


def test_the_context_codec_and_salt_are_those_of_the_spec(spec: BulkSpec) -> None:
    specs = [
        BulkSpec(replace(spec.model, salt=salt), spec.remote, CompileOptions(codec, after=after))
        for salt in ("", "tenant") for after in ("none", "text") for codec in ("none", "int8")
    ]  # fmt: skip
    keys = {run(one, DOCUMENTS[:1])[0].key for one in specs}
    assert len(keys) == len(specs)
    assert "tenant" not in repr(specs[-1])


class Deaths:
    """Counts attempts, and is a worker that dies at some documents."""

    def __init__(self, deadly: set[str]) -> None:
        self.deadly, self.open, self.calls = deadly, Counter[str](), list[list[str]]()

    def begin(self, name: str) -> int:
        self.open[name] += 1
        return self.open[name] - 1

    def end(self, name: str) -> None:
        if not isinstance(sys.exception(), KeyboardInterrupt):  # which is the death here
            del self.open[name]

    def compile(self, documents: Sequence[SourceDocument]) -> list[ManifestRow]:
        self.calls.append([document.id for document in documents])
        if self.deadly & set(self.calls[-1]):
            raise KeyboardInterrupt
        return [ManifestRow(document.id, 0, "key", 1, 1, None, True, True, 0.0, 1) for document in documents]

    def until_done(self, documents: Sequence[SourceDocument]) -> tuple[list[ManifestRow], int]:
        """The rows, and how many workers died."""
        for died in range(20):
            with suppress(KeyboardInterrupt):
                return compile_counted(self.compile, documents, range(len(documents)), self.begin, self.end), died
        raise AssertionError("it never ends")


@pytest.mark.parametrize(("deadly", "died"), [(set(), 0), ({"d1"}, 3), ({"d0", "d2"}, 5)])
def test_a_document_that_kills_workers_is_left_out_after_three(deadly: set[str], died: int) -> None:
    deaths = Deaths(deadly)
    rows, count = deaths.until_done(DOCUMENTS[:3])
    assert count == died and not {row.id for row in rows if row.error} ^ deadly
    assert all("3 workers died" in row.error for row in rows if row.error)
    assert len(deaths.calls[0]) == 3 and (not deadly or len(deaths.calls[-1]) == 1), "one by one after a death"


def test_attempts_that_fail_without_a_death_do_not_count() -> None:
    deaths = Deaths(set())

    def fails(_: object) -> list[ManifestRow]:
        raise ModelError("no model")

    for _ in range(4):
        with pytest.raises(ModelError):
            compile_counted(fails, DOCUMENTS, range(12), deaths.begin, deaths.end)
    assert not deaths.open
