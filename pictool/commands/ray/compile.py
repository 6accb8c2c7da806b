"""`pic compile --ray`: a bulk compile on a Ray cluster, its options, progress and summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool import __version__
from pictool.commands.console.errors import UsageError
from pictool.commands.console.outputs import output_path, print_json
from pictool.commands.console.progress import work_bar
from pictool.commands.console.words import count
from pictool.commands.settings.options import CLUSTER, RayOption, option
from pictool.commands.settings.resources import note_logs, open_model
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError
from pictool.escapes import visible
from pictool.needs import require_extra
from pictool.store.signatures import SigningKey, path_of

if TYPE_CHECKING:
    from pictool.cluster.bulk import BulkResult, Progress
    from pictool.cluster.loading import ModelSpec
    from pictool.cluster.worker import BulkSpec
    from pictool.commands.settings.compiling import Compilation
    from pictool.runtime.model import Model
    from pictool.store.remote.remote import Remote, Retry

_MANIFEST = "manifest.parquet"
_ATTEMPTS = 8  # of a request to the remote: half a minute


@dataclass(frozen=True)
class BulkOptions:
    """Options of a bulk compile."""

    ray: RayOption = None
    manifest: Annotated[
        Optional[str],
        option("--manifest", "FILE", f"With --ray: file that lists every chunk ({_MANIFEST}).", CLUSTER),
    ] = None
    text_column: Annotated[
        Optional[str],
        option("--text-column", "NAME", "Field with the text in jsonl and parquet (text).", CLUSTER),
    ] = None
    id_column: Annotated[
        Optional[str],
        option("--id-column", "NAME", "Field with the document's name in jsonl and parquet (FILE#NUMBER).", CLUSTER),
    ] = None
    workers: Annotated[
        Optional[int],
        option(
            "--workers",
            "N",
            "With --ray: number of processes, each with its own model (one per GPU, else per CPU).",
            CLUSTER,
            min=1,
        ),
    ] = None

    def check(self, others: Mapping[str, object], settings: Settings) -> None:
        """Refuse options that exclude each other. `others` are options that a bulk compile lacks, by name."""
        if self.ray is None:
            own = {
                "--manifest": self.manifest,
                "--workers": self.workers,
            }
            if given := [name for name, value in own.items() if value is not None]:
                raise UsageError(f"{given[0]}: applies to bulk compiles; add --ray")
            return
        if given := [name for name, value in others.items() if value]:
            raise UsageError(f"{given[0]}: cannot be used with --ray")
        if not settings.remote:
            raise UsageError("--ray: needs --remote URL, where workers write objects")


def run_bulk(bulk: BulkOptions, what: Compilation, settings: Settings, as_json: bool) -> None:
    """Compile on a cluster, write the manifest, and print what was done.

    Raises:
        InputError: documents failed; everything else was done.
    """
    from pictool.cluster.session import PACKAGES, connected

    require_extra("ray", "pic compile --ray", *PACKAGES)
    from pictool.cluster.bulk import compile_bulk
    from pictool.cluster.manifest import sign_computed, write_manifest
    from pictool.cluster.sources import Columns, find_sources

    assert bulk.ray is not None
    manifest = output_path("--manifest", bulk.manifest or _MANIFEST, what.files)
    sources = find_sources(what.files)
    model = open_model(settings)
    spec = make_spec(what, model, settings)
    key = SigningKey.read(path_of(settings.signing_key, "signing-key")) if settings.signing_key else None
    with connected(bulk.ray), work_bar("compiling") as show:
        result = compile_bulk(
            sources, Columns(bulk.text_column or "text", bulk.id_column), spec, bulk.workers,
            lambda done: show(done.num_read, done.to_read, progress_line(done)),
        )  # fmt: skip
    if key is not None:
        sign_computed(spec.remote, result.tables, key)
    write_manifest(manifest, result.tables, key)
    report = make_report(result, model.name, manifest)
    if as_json:
        print_json(report)
    else:
        print_result(result.progress, manifest)
    if failed := result.progress.failed:
        first = next(error for table in result.tables for error in table["error"].to_pylist() if error is not None)
        raise InputError(f"{count(failed, 'document')} failed (see column error of {manifest}); the first: {first}")


def make_spec(what: Compilation, model: Model, settings: Settings) -> BulkSpec:
    """What all workers have to know."""
    from pictool.cluster.worker import BulkSpec
    from pictool.core import CompileOptions
    from pictool.store.remote.remote import Retry

    remote = shared_remote(settings, Retry(_ATTEMPTS))
    remote.remove_stale_temps()
    options = CompileOptions(settings.codec, after=settings.after)
    return BulkSpec(
        model_spec(model, settings), remote, options, what.chunk_tokens, what.overlap, what.force
    )  # fmt: skip


def shared_remote(settings: Settings, retry: Retry) -> Remote:
    """The remote that all processes write to. Raises StoreError if it is read-only."""
    from pictool.store.remote.remote import MIN_RATE, Remote

    note_logs()
    url = settings.remote or ""
    name = url if "://" in url else str(Path(url).absolute())
    remote = Remote(name, retry, min_rate=settings.remote_rate or MIN_RATE)
    remote.require_writable()
    return remote


def model_spec(model: Model, settings: Settings, threads: int = 1) -> ModelSpec:
    """The model as processes elsewhere find it: a directory is named from the root."""
    from pictool.cluster.loading import ModelSpec
    from pictool.runtime.model import local_directory

    directory = local_directory(settings.model)
    return ModelSpec(
        settings.model if settings.model is None or directory is None else str(directory.absolute()),
        settings.device.partition(":")[0], settings.dtype, settings.salt,
        (model.target.model, model.target.tokenizer), threads, __version__,
    )  # fmt: skip


def progress_line(done: Progress) -> str:
    """How fast it goes."""
    rate = done.documents / done.seconds if done.seconds else 0.0
    left = "" if done.left_s is None else f", {clock(done.left_s)} left"
    errors = f", {done.failed:,d} failed" if done.failed else ""
    return f"{count(done.documents, 'document')}, {rate:,.1f} a second{left}{errors}"


def clock(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def make_report(result: BulkResult, model: str, manifest: Path) -> dict[str, Any]:
    done = result.progress
    return {
        "model": model, "manifest": str(manifest), "documents": done.documents, "failed": done.failed,
        "objects": done.chunks, "compiled": done.new, "tokens": done.tokens, "compiled_tokens": done.new_tokens,
        "bytes": done.num_bytes, "seconds": done.seconds, "worker_seconds": done.worker_s,
    }  # fmt: skip


def print_result(done: Progress, manifest: Path) -> None:
    """What became of the documents, and what it cost."""
    print(
        f"{count(done.documents, 'document')}: {count(done.chunks, 'object')}, {done.new:,d} compiled, "
        f"{done.chunks - done.new:,d} at the remote already; {done.failed:,d} failed. See {visible(str(manifest))}"
    )
    rate = done.new_tokens / done.seconds if done.seconds else 0.0
    print(
        f"{done.new_tokens:,d} tokens computed in {clock(done.seconds)} ({rate:,.0f} a second; "
        f"{done.worker_s:,.0f} s of workers); {done.num_bytes / 1e9:,.3f} GB in all"
    )
