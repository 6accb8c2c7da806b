"""Bulk compile over Ray Data: sources → documents → objects at a remote → a manifest.

    files ─ read (tasks) ─> blocks of documents ─ compile (actors, a model each) ─> rows ─ driver ─> manifest

Ray Data schedules, retries and bounds memory. A block is the unit of loss: if a worker or its node dies, its blocks are
read and compiled again elsewhere, and find at the remote what was already written. A document that
kills its worker again and again is left out, with an error.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pictool.cluster.manifest import ManifestRow, to_table
from pictool.cluster.session import cluster_resources
from pictool.cluster.sources import TABLES, Columns, SourceDocument, SourceFile, read_documents
from pictool.cluster.worker import BulkSpec, CompileWorker, compile_counted
from pictool.errors import ModelError, PicError, StoreError

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_TOKENS = 1 << 15  # much more than a forward takes, so that little of one is padding
_TOKEN_BYTES = 4  # of text, about
_FILES_PER_TASK = 64  # small files that one task reads
_WORKER_SHARE = 0.5  # of its CPUs that a worker reserves, so that those of a dead node find a place on the others
_READER_CPUS = 0.1
_HOPELESS = 200  # objects that fail to be written, one after another


@dataclass(frozen=True)
class Progress:
    """How far a bulk compile is. `worker_s` are seconds of workers, `seconds` those since it began.

    Fields:
        documents: that are done; failed: those of them with an error.
        chunks: objects; new: those of them that were computed now.
        tokens, num_bytes: of all objects; new_tokens: of those computed now.
        num_read, to_read: bytes of the sources, about.
    """

    documents: int = 0
    failed: int = 0
    chunks: int = 0
    new: int = 0
    tokens: int = 0
    new_tokens: int = 0
    num_bytes: int = 0
    worker_s: float = 0.0
    num_read: int = 0
    to_read: int = 0
    seconds: float = 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds left at the current rate; None if it is not known yet."""
        return self.seconds * (self.to_read / self.num_read - 1) if self.num_read and self.to_read else None

    def plus(self, rows: pa.Table, seconds: float) -> Progress:
        """This after more rows."""
        from pyarrow import compute as pc

        def total(column: str, where: Any = None) -> Any:
            values = rows[column] if where is None else pc.filter(rows[column], where)
            return pc.sum(values).as_py() or 0

        is_bad, is_made = pc.is_valid(rows["error"]), pc.is_valid(rows["bytes"])
        return replace(
            self,
            documents=self.documents + total("is_first"),
            failed=self.failed + len(pc.unique(pc.filter(rows["id"], is_bad))),
            chunks=self.chunks + pc.sum(is_made).as_py(),
            new=self.new + total("is_new"),
            tokens=self.tokens + total("tokens", is_made),
            new_tokens=self.new_tokens + total("tokens", rows["is_new"]),
            num_bytes=self.num_bytes + total("bytes"),
            worker_s=self.worker_s + total("seconds"),
            num_read=self.num_read + total("num_read"),
            seconds=seconds,
        )


@dataclass(frozen=True)
class BulkResult:
    """What a bulk compile did: the rows of its manifest, and the sums."""

    tables: tuple[pa.Table, ...]
    progress: Progress


def compile_bulk(
    sources: Sequence[SourceFile], columns: Columns, spec: BulkSpec, workers: int | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None, batch_tokens: int = BATCH_TOKENS,
) -> BulkResult:  # fmt: skip
    """Compile all documents of these sources to objects at the remote, on the cluster that Ray is connected to.

    Args:
        workers: actors, each with a model; None: as many as there are GPUs, or CPUs without.
        batch_tokens: of the documents that a worker compiles together, and loses if it dies; about.

    Raises:
        PicError: no worker can open the model, or nothing can be written to the remote any more.
    """
    started, tables = time.monotonic(), list[Any]()
    progress, lost = Progress(to_read=sum(source.num_bytes for source in sources)), 0
    for table in _rows(sources, columns, spec, workers, batch_tokens * _TOKEN_BYTES):
        if any(table["is_fatal"].to_pylist()):
            raise ModelError(_last_error(table))
        tables.append(table)
        progress = progress.plus(table, time.monotonic() - started)
        on_progress(progress)
        lost = _count_lost(table, lost)
        if lost >= _HOPELESS:
            raise StoreError(f"{_last_error(table)}; {lost} objects in a row failed; those already written are kept")
    return BulkResult(tuple(tables), progress)


def _rows(
    sources: Sequence[SourceFile], columns: Columns, spec: BulkSpec, workers: int | None, batch_bytes: int
) -> Iterator[pa.Table]:
    """The rows of all chunks, in the order in which they are ready."""
    import ray

    _prepare_data(batch_bytes)
    items = [asdict(source) for source in sources]
    tables = sum(source.url.endswith(TABLES) for source in sources)
    blocks = max(1, tables + math.ceil((len(items) - tables) / _FILES_PER_TASK))
    documents = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
        _read, fn_kwargs={"columns": columns, "batch_bytes": batch_bytes}, batch_size=None, batch_format="pyarrow",
        num_cpus=_READER_CPUS,
    )  # fmt: skip
    attempts = ray.remote(_Attempts).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
    there = cluster_resources()
    gpus = 0 if spec.model.device == "cpu" else int(there.get("GPU", 0))
    most = workers or gpus or max(1, int(there.get("CPU", 1)))
    rows = documents.map_batches(
        _Actor, fn_constructor_args=(spec, attempts), batch_size=None, batch_format="pyarrow",
        concurrency=(1, most), num_cpus=spec.model.threads * _WORKER_SHARE, num_gpus=1 if gpus else 0,
    )  # fmt: skip
    yield from rows.iter_batches(batch_size=None, batch_format="pyarrow")


def _prepare_data(batch_bytes: int) -> None:
    """Let Ray Data say nothing but errors, and make blocks that are batches of the workers."""
    import ray

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.target_max_block_size = batch_bytes
    context.target_min_block_size = 0
    context.raise_original_map_exception = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def _read(batch: pa.Table, columns: Columns, batch_bytes: int) -> Iterator[pa.Table]:
    """The documents of files, in tables that are cut into blocks by Ray Data."""
    for item in batch.to_pylist():
        held, size = list[SourceDocument](), 0
        for document in read_documents(SourceFile(**item), columns):
            held.append(document)
            size += len(document.text or "")
            if size >= batch_bytes:
                yield _documents(held)
                held, size = [], 0
        yield _documents(held)


def _documents(documents: Sequence[SourceDocument]) -> pa.Table:
    """A table of documents, with tags that tell those of equal names apart."""
    import pyarrow as pa

    schema = pa.schema(
        [("id", pa.string()), ("text", pa.large_string()), ("error", pa.string()), ("num_bytes", pa.int64())]
    )
    table = pa.table({name: [getattr(part, name) for part in documents] for name in schema.names}, schema=schema)
    return table.append_column("tag", pa.array([secrets.randbits(62) for _ in documents], pa.int64()))


class _Attempts:
    """Attempts that have not ended, counted in a process of its own; where its node dies, from the beginning."""

    def __init__(self) -> None:
        self._open = Counter[str]()

    def begin(self, name: str) -> int:
        self._open[name] += 1
        return self._open[name] - 1

    def end(self, name: str) -> None:
        del self._open[name]


class _Actor:
    """A worker in a process of its own."""

    def __init__(self, spec: BulkSpec, attempts: Any) -> None:
        self._worker, self._attempts = CompileWorker(spec), attempts

    def __call__(self, batch: pa.Table) -> pa.Table:
        records = batch.to_pylist()
        tags = [record.pop("tag") for record in records]
        documents = [SourceDocument(**record) for record in records]
        end = self._attempts.end.remote  # it comes before what this process begins next
        try:
            rows = compile_counted(self._worker.compile, documents, tags, self._begin, end) if documents else []
            return to_table(rows)
        except PicError as error:  # Ray would wrap it, and lose what it is
            return to_table([ManifestRow.failed("", str(error), is_fatal=True)])

    def _begin(self, name: str) -> int:
        import ray

        return int(ray.get(self._attempts.begin.remote(name)))


def _count_lost(rows: pa.Table, lost: int) -> int:
    """How many objects failed to be written since the last one that did not."""
    from pyarrow import compute as pc

    if pc.any(rows["is_new"]).as_py():
        return 0
    return lost + int(pc.sum(pc.and_(pc.is_valid(rows["key"]), pc.is_null(rows["bytes"]))).as_py() or 0)


def _last_error(rows: pa.Table) -> str:
    return next(str(error) for error in reversed(rows["error"].to_pylist()) if error is not None)
