"""A bulk compile on a cluster of three nodes: what its manifest and the remote have, whatever goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import faulty_remotes as faulty
import psutil
import pyarrow as pa
import pytest
from pyarrow.parquet import read_table, write_table

from pictool.cluster.bulk import BulkResult, Progress, compile_bulk
from pictool.cluster.loading import ModelSpec
from pictool.cluster.manifest import COLUMNS, write_manifest
from pictool.cluster.session import connected
from pictool.cluster.sources import Columns, find_sources
from pictool.cluster.worker import BulkSpec
from pictool.compiler.chunking import make_chunks
from pictool.compiler.compile import compile_chunks
from pictool.errors import ModelError, StoreError
from pictool.runtime.model import load_model
from pictool.store.remote.remote import Remote, Retry
from pictool.store.store import Store

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

FILES, LINES, ROWS = 400, 1000, 600
CHUNK_TOKENS = 96
BATCH_TOKENS = 256  # so that 2,000 short documents are many batches
Rows = list[tuple[object, ...]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 documents: files in folders, lines of jsonl, and rows of parquet."""
    root = tmp_path_factory.mktemp("corpus")
    texts = [f"Town {number} lies at the river {number * 7 % 91}. " * (1 + number % 4) for number in range(2000)]
    for number, text in enumerate(texts[:FILES]):
        path = root / "files" / str(number % 7) / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    lines = [json.dumps({"id": f"line-{number}", "text": text}) for number, text in enumerate(texts[FILES:-ROWS])]
    (root / "lines.jsonl").write_text("\n".join(lines))
    rows = [{"id": f"row-{number}", "text": text} for number, text in enumerate(texts[-ROWS:])]
    write_table(pa.Table.from_pylist(rows), root / "rows.parquet")
    return root


@pytest.fixture(scope="module")
def expected(corpus: Path, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The manifest of a serial compile."""
    from pictool.cluster.sources import read_documents

    model, store, found = load_model(str(tiny_dir), "cpu"), Store(tmp_path_factory.mktemp("serial")), Rows()
    parts = [
        (document.id, number, chunk)
        for source in find_sources([str(corpus)])
        for document in read_documents(source, Columns(id="id"))
        for number, chunk in enumerate(make_chunks(model, document.text or "", document.id, CHUNK_TOKENS))
    ]
    done = compile_chunks(model, store, [chunk for *_, chunk in parts])
    sizes = {one.key: one.path.stat().st_size for one in done}
    for (name, number, chunk), one in zip(parts, done, strict=True):
        found.append((name, number, one.key, len(chunk), sizes[one.key], None))
    return sorted(found)


@pytest.fixture
def connection(cluster: Cluster) -> Iterator[None]:
    with connected(cluster.address):
        yield


def spec_of(remote: Remote, tiny_dir: Path) -> BulkSpec:
    return BulkSpec(ModelSpec(str(tiny_dir), "cpu"), remote, chunk_tokens=CHUNK_TOKENS)


def run(
    spec: BulkSpec, corpus: Path, on_progress: Callable[[Progress], None] = lambda _: None, workers: int = 2
) -> BulkResult:
    sources = find_sources([str(corpus)])
    return compile_bulk(sources, Columns(id="id"), spec, workers, on_progress, BATCH_TOKENS)


def manifest_of(result: BulkResult) -> Rows:
    return sorted(tuple(row[name] for name in COLUMNS) for table in result.tables for row in table.to_pylist())


def rows_of(expected: Rows) -> Rows:
    """What the parquet file alone becomes."""
    return [row for row in expected if str(row[0]).startswith("row")]


def require_remote(path: Path, rows: Sequence[tuple[object, ...]]) -> None:
    """The remote has the objects of these rows, whole, and nothing else."""
    there = Store(path)
    assert there.keys() == sorted({str(row[2]) for row in rows})
    for key in there.keys()[::17]:
        with there.peek(key) as file:
            file.verify()


def kill(processes: Sequence[psutil.Process]) -> int:
    """As kill -9; how many were there."""
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=60)
    return len(processes)


def workers_of_jobs() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "MapWorker" in " ".join(child.cmdline()[:1])]


@pytest.mark.usefixtures("connection")
def test_the_manifest_is_that_of_a_serial_compile(corpus: Path, expected: Rows, tiny_dir: Path, tmp_path: Path) -> None:
    seen = list[Progress]()
    result = run(spec_of(Remote(str(tmp_path / "remote")), tiny_dir), corpus, seen.append)
    assert manifest_of(result) == expected
    require_remote(tmp_path / "remote", expected)
    done = result.progress
    assert (done.documents, done.failed, done.chunks) == (2000, 0, len(expected))
    distinct = len({row[2] for row in expected})
    assert distinct <= done.new < distinct + 50  # equal chunks may be computed by two workers at once
    assert done.tokens == sum(int(str(row[3])) for row in expected)
    assert 0.9 < done.num_read / done.to_read <= 1.0 and len(seen) > 10
    assert [one.documents for one in seen] == sorted(one.documents for one in seen)


def test_workers_and_a_node_that_are_killed_lose_nothing_and_double_nothing(
    cluster: Cluster, corpus: Path, expected: Rows, tiny_dir: Path, tmp_path: Path
) -> None:
    node = cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
    killed = Counter[str]()

    def interfere(done: Progress) -> None:
        if done.documents > 200 and not killed["workers"]:
            killed["workers"] = kill(workers_of_jobs()[:1])
        if done.documents > 700 and not killed["node"]:
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            killed["node"] = kill([raylet, *raylet.children(recursive=True)])

    with connected(cluster.address):
        result = run(spec_of(Remote(str(tmp_path / "remote")), tiny_dir), corpus, interfere, workers=3)
    cluster.remove_node(node, allow_graceful=False)
    assert killed["workers"] == 1 and killed["node"]
    assert manifest_of(result) == expected
    require_remote(tmp_path / "remote", expected)


@pytest.mark.usefixtures("connection")
def test_a_slow_remote_that_fails_half_of_its_writes(
    corpus: Path, expected: Rows, tiny_dir: Path, tmp_path: Path
) -> None:
    rows = rows_of(expected)
    patient = Retry(attempts=20, first_s=0.001, most_s=0.01)
    remote = faulty.SlowAndHalfFailing(str(tmp_path / "remote"), patient)
    result = run(spec_of(remote, tiny_dir), corpus / "rows.parquet")
    assert manifest_of(result) == rows
    require_remote(tmp_path / "remote", rows)


@pytest.mark.usefixtures("connection")
def test_a_full_remote_ends_the_job_and_what_is_there_stays(
    corpus: Path, expected: Rows, tiny_dir: Path, tmp_path: Path
) -> None:
    spec = spec_of(faulty.Full(str(tmp_path / "full")), tiny_dir)
    with pytest.raises(StoreError, match="No space left"):
        run(spec, corpus / "rows.parquet")
    kept = Store(tmp_path / "full").keys()
    assert 20 <= len(kept) < 100  # workers do not know of each other
    (tmp_path / "full" / "more").touch()
    result = run(spec, corpus / "rows.parquet")
    rows = rows_of(expected)
    assert manifest_of(result) == rows
    assert result.progress.new >= len({row[2] for row in rows}) - len(kept)


@pytest.mark.usefixtures("connection")
def test_an_error_of_ours_on_a_worker_is_one_of_ours_here(tiny_dir: Path, corpus: Path, tmp_path: Path) -> None:
    spec = BulkSpec(ModelSpec(str(tiny_dir), "cpu", fingerprints=("a", "b")), Remote(str(tmp_path)))
    with pytest.raises(ModelError):
        run(spec, corpus / "rows.parquet", workers=1)


@pytest.mark.usefixtures("connection")
def test_a_document_that_kills_its_workers_is_left_out_and_ids_may_be_anything(tiny_dir: Path, tmp_path: Path) -> None:
    names = ["a", "poison", "\0fatal", "a\0b", ""]
    lines = [
        {"id": name, "text": f"{'POISON' * (name == 'poison')} number {number}."} for number, name in enumerate(names)
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "remote").mkdir()
    result = run(spec_of(faulty.Deadly(str(tmp_path / "remote")), tiny_dir), tmp_path / "lines.jsonl", workers=1)
    write_manifest(tmp_path / "manifest.parquet", result.tables)
    rows = {str(row["id"]): row["error"] for row in read_table(tmp_path / "manifest.parquet").to_pylist()}
    assert str(rows.pop("poison")).startswith("poison: 3 workers died") and set(rows.values()) == {None}
    assert set(rows) == {*names} - {"poison"}
    assert (tmp_path / "remote.deaths").stat().st_size == 3
    assert (result.progress.documents, result.progress.failed) == (5, 1)


def test_two_jobs_at_once_over_the_same_documents(
    cluster: Cluster, corpus: Path, expected: Rows, tiny_dir: Path, tmp_path: Path
) -> None:
    """From the command line, each in a process of its own. What is in the working directory is not imported."""
    for name in ("blake3", "torch", "pyarrow"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    command = [
        sys.executable, "-P", "-m", "pictool", "compile", "--ray", cluster.address, str(corpus / "rows.parquet"),
        "--id-column", "id",
        "--chunk-tokens", str(CHUNK_TOKENS), "--remote", "remote", "-m", str(tiny_dir), "--device", "cpu",
        "--workers", "1", "--json", "--after", "none",
    ]  # fmt: skip
    surroundings = {name: value for name, value in os.environ.items() if name != "RAY_BACKEND_LOG_LEVEL"}
    jobs = [
        subprocess.Popen(
            [*command, "--manifest", f"{name}.parquet"], cwd=tmp_path, env=surroundings, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for name in ("a", "b")
    ]  # fmt: skip
    expected_rows = rows_of(expected)
    for job, name in zip(jobs, ("a", "b"), strict=True):
        out, err = job.communicate(timeout=200)
        assert job.returncode == 0, err
        assert all(line.startswith("pic: compiling") for line in err.splitlines()), err
        report = json.loads(out)
        assert (report["documents"], report["failed"], report["objects"]) == (ROWS, 0, len(expected_rows))
        rows = read_table(tmp_path / f"{name}.parquet").to_pylist()
        assert [tuple(row.values()) for row in rows] == expected_rows
    require_remote(tmp_path / "remote", expected_rows)
    assert not (tmp_path / "imported").exists()
