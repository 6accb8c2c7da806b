"""`pic compile --ray`: its options, and what it says without Ray. What it does on a cluster is in tests/on_ray."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow.parquet import read_table

from commands.run import Outcome, pic, write
from pictool.cluster.bulk import BulkResult, Progress, compile_bulk
from pictool.cluster.manifest import ManifestRow, to_table
from pictool.cluster.worker import CompileWorker


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a bulk compile is called with; in place of a cluster a worker of this process compiles."""
    import contextlib

    from pictool.cluster import bulk, session
    from pictool.cluster.sources import read_documents

    seen: dict[str, Any] = {}

    def connected(address: str) -> Any:
        seen["address"] = address
        return contextlib.nullcontext()

    def compiling(sources: Any, columns: Any, spec: Any, workers: Any, on_progress: Any) -> BulkResult:
        seen.update(sources=sources, columns=columns, spec=spec, workers=workers)
        documents = [document for source in sources for document in read_documents(source, columns)]
        worker = CompileWorker(spec)
        table = to_table(worker.compile(documents))
        worker.close()
        done = Progress(to_read=1).plus(table, 2.0)
        on_progress(done)
        return BulkResult((table,), done)

    monkeypatch.setattr(session, "connected", connected)
    monkeypatch.setattr(bulk, "compile_bulk", compiling)
    return seen


def bulk(*arguments: object) -> Outcome:
    return pic("compile", "--device", "cpu", "-m", "embedded-small", "--remote", "far", *arguments)


def test_the_manifest_and_the_summary(used: dict[str, Any]) -> None:
    write("docs/a.txt", "The river is long.")
    write("docs/b.txt", "")
    outcome = bulk("--ray", "docs", "--workers", "3", "--text-column", "body", "--id-column", "name")
    assert outcome.code == 1
    assert "2 documents: 1 object, 1 compiled, 0 at the remote already; 1 failed. See manifest.parquet" in outcome.out
    assert "docs/b.txt: " in outcome.err
    rows = {row["id"]: row for row in read_table("manifest.parquet").to_pylist()}
    assert rows["docs/a.txt"]["key"] and rows["docs/b.txt"]["error"] and rows["docs/b.txt"]["key"] is None
    assert (used["workers"], used["columns"].text, used["columns"].id) == (3, "body", "name")
    assert Path(used["spec"].remote.url) == Path.cwd() / "far"  # workers are elsewhere
    assert Path(used["spec"].model.name).is_absolute()


def test_json_says_what_it_cost(used: dict[str, Any]) -> None:
    write("a.txt", "The river is long.")
    report = bulk("--ray=head:6379", "a.txt", "--manifest", "out/m.parquet", "--json").json
    assert (report["documents"], report["objects"], report["compiled"], report["failed"]) == (1, 1, 1, 0)
    assert report["tokens"] == report["compiled_tokens"] > 0 and report["seconds"] == 2.0 and report["bytes"] > 0
    assert Path("out/m.parquet").is_file() and used["address"] == "head:6379"


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--ray", "a.txt"], "default"), (["a.txt", "--ray"], "default"), (["--ray", "auto", "a.txt"], "auto"),
        (["--ray", "host:6379", "a.txt"], "host:6379"), (["--ray", "ray://host:10001", "a.txt"], "ray://host:10001"),
        (["a.txt", "--ray", "--force"], "default"), (["--ray", "local", "a.txt"], "local"),
        (["--ray", "--", "a.txt"], "default"),
    ],
)  # fmt: skip
def test_the_address_may_be_left_out(used: dict[str, Any], words: list[str], address: str) -> None:
    write("a.txt", "The river is long.")
    assert bulk(*words).code == 0
    assert used["address"] == address and [source.name for source in used["sources"]] == ["a.txt"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--manifest", "m.parquet"], "--manifest: "),
        (["--workers", "2"], "--workers: "),
        (["--ray", "-o", "a.kvo"], "-o: cannot be used with --ray"),
        (["--ray", "--engine", "torch"], "--engine: cannot be used with --ray"),
        (["--ray", "--remote", ""], "needs --remote URL"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_together_is_refused(words: list[str], problem: str) -> None:
    outcome = bulk("a.txt", *words)
    assert outcome.code == 2 and problem in outcome.err


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(
        "pictool.needs.find_spec", lambda name: None if name == "ray" else original(name)
    )  # fmt: skip
    outcome = bulk("--ray", "a.txt")
    assert outcome.code == 1
    assert outcome.err.startswith("pic: error: pic compile --ray needs ray") and "'pictool[ray]'" in outcome.err


def test_nobody_at_an_address_is_one_line() -> None:
    write("a.txt", "text")
    outcome = bulk("--ray", "127.0.0.1:9", "a.txt")
    assert outcome.code == 1 and "ray start" in outcome.err


def test_a_node_that_does_not_start_in_time_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def init(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray raises it

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    write("a.txt", "text")
    outcome = bulk("--ray", "local", "a.txt")
    assert outcome.code == 1 and "--ray local: " in outcome.err


def test_a_remote_that_refuses_all_objects_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    from pictool.cluster import bulk as module
    from pictool.errors import StoreError

    def rows(count: int, size: int | None, is_new: bool) -> list[ManifestRow]:
        error = None if size else "k: cannot be written (No space left on device)"
        return [ManifestRow(f"d{i}", 0, "k", 5, size, error, is_new, True, 0.0, 1) for i in range(count)]

    tables = [to_table(rows(150, None, False)), to_table(rows(1, 7, True)), to_table(rows(150, None, False))]
    monkeypatch.setattr(module, "_rows", lambda *_: iter(tables))
    assert compile_bulk([], SimpleNamespace(), SimpleNamespace()).progress.failed == 300  # type: ignore[arg-type]
    monkeypatch.setattr(module, "_rows", lambda *_: iter([tables[0], tables[2], tables[1]]))
    with pytest.raises(StoreError, match=r"^k: .* 300 "):
        compile_bulk([], SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
