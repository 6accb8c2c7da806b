from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from logging import getLogger
from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import settings
from served import Server, serving

from pictool.store.store import Store

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the programs that tests start: there is a worker of pytest for each core
settings.register_profile("pictool", deadline=None)  # no test asserts a time
settings.load_profile("pictool")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and its programs would


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own settings, store or caches."""
    for name in (
        "PIC_MODEL", "PIC_STORE", "PIC_DEVICE", "PIC_DTYPE", "PIC_CODEC", "PIC_MAX_SIZE", "PIC_SALT", "PIC_REMOTE",
        "PIC_MEMORY", "PIC_ALGO", "PIC_SALT_FILE", "PIC_REMOTE_RATE", "PIC_TRUST",
        "PIC_GPU_LAYERS", "PIC_GRAPHS", "PIC_REQUIRE_SIGNED", "PIC_SIGNING_KEY",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PAGER", "cat")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # no file of a test has to survive a power failure
    log = getLogger("pictool.store")  # the program has handlers of its own (`note_logs`), to its end
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def server(far: Store) -> Iterator[Server]:
    """Serves the store `far`, which a module of tests makes."""
    with serving(far.root) as server:
        yield server


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def near(tmp_path: Path, server: Server, warnings: list[str]) -> Store:
    """A store whose remote is `far`, served; it warns into `warnings`."""
    return Store(tmp_path / "near", remote=server.remote, on_warning=warnings.append)


@pytest.fixture
def alarm() -> Iterator[None]:
    """Fail a test that waits, as for a pipe which nobody writes."""

    def ring(*_: object) -> None:
        pytest.fail("waited for what never comes")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tiny Llama as a model directory."""
    return tiny.save_model(tmp_path / "model", tiny.CONFIGS["llama"]())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-all", action="store_true", help="fail if any test was skipped, or none was found")
    parser.addoption("--per-cell", type=int, default=5, help="requests of each cell of tests/vllm_matrix.py")
    parser.addoption("--matrix", metavar="FILE", help="where to write what the cells of tests/vllm_matrix.py answered")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--matrix`, run the tests of the matrix alone."""
    if config.getoption("--matrix") is not None:
        items[:] = [item for item in items if "answered" in getattr(item, "fixturenames", ())]


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later collection of garbage: there is no other, and much of it."""
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if not session.config.getoption("--require-all"):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    left_out = [kind for kind in ("skipped", "xfailed", "deselected") if reporter.stats.get(kind)]
    if left_out or not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter.write_line(f"--require-all: {', '.join(left_out) or 'no test was run'}", red=True)
