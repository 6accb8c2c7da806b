"""A remote under processes: killed while they fetch, many at once, ended while something is on its way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chunks import make_chunk
from served import Server

from pictool.store.entries import litter_candidates
from pictool.store.fetching import BLOCK
from pictool.store.remote import Retry
from pictool.store.store import Store
from pictool.store.upkeep import gc, verify

ROOT = Path(__file__).parents[2]
OPEN = "file = store.open(key); file.layer(0); print('open', flush=True); "


@pytest.fixture
def far(tmp_path: Path) -> Store:
    return Store(tmp_path / "far")


def start(near: Path, server: Server, key: str, work: str) -> subprocess.Popen[str]:
    code = (
        f"from pictool.store.store import Store; store = Store({str(near)!r}, remote={server.url!r}); "
        f"key = {key!r}; {work}"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out, err


def test_a_process_killed_while_it_fetches_leaves_no_half_object(far: Store, server: Server, tmp_path: Path) -> None:
    path, near = far.put(make_chunk(1, 3 * BLOCK // 64)), Store(tmp_path / "near")
    server.always, server.spared = "hang", 2 * BLOCK
    process = start(near.root, server, path.stem, OPEN + "file.layer(1)")
    assert process.stdout and process.stdout.readline() == "open\n"
    (temp,) = litter_candidates(near.root)
    assert gc(near).litter.count == 0  # its writer lives
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert near.keys() == [] and temp.exists()
    assert gc(near).litter.count == 1 and not litter_candidates(near.root)


@pytest.mark.parametrize("after", [0.0, 0.005, 0.01, 0.02, 0.04])
def test_a_process_killed_at_any_time_leaves_no_half_object(
    after: float, far: Store, server: Server, tmp_path: Path
) -> None:
    path, near = far.put(make_chunk(1, BLOCK // 4)), Store(tmp_path / "near")
    process = start(near.root, server, path.stem, "print('go', flush=True); store.has(key)")
    assert process.stdout and process.stdout.readline() == "go\n"
    deadline = time.monotonic() + 30
    while not server.asked and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(after)
    process.kill()
    process.communicate()
    gc(near)
    assert not verify(near).problems and not litter_candidates(near.root)
    assert near.keys() in ([], [path.stem])


def test_processes_that_want_one_object_at_once(far: Store, server: Server, tmp_path: Path) -> None:
    path, near = far.put(make_chunk(1, BLOCK // 16)), Store(tmp_path / "near")
    work = "file = store.open(key); file.verify(); file.close(); store.drain()"
    for process in [start(near.root, server, path.stem, work) for _ in range(4)]:
        end(process)
    assert near.keys() == [path.stem] and near.path(path.stem).read_bytes() == path.read_bytes()
    assert not litter_candidates(near.root)


def test_a_process_ends_when_all_has_come(far: Store, server: Server, tmp_path: Path) -> None:
    path, near = far.put(make_chunk(1, 3 * BLOCK // 64)), Store(tmp_path / "near")
    end(start(near.root, server, path.stem, OPEN + "file.close()"))
    assert near.path(path.stem).read_bytes() == path.read_bytes() and not litter_candidates(near.root)


def test_an_interrupted_process_does_not_wait(far: Store, server: Server, tmp_path: Path) -> None:
    path, near = far.put(make_chunk(1, 16 * BLOCK // 64)), Store(tmp_path / "near")
    server.always, server.spared = "503", BLOCK
    work = "file = store.open(key); store.cancel(); file.close()"
    end(start(near.root, server, path.stem, work))
    assert near.keys() == [] and not litter_candidates(near.root)
    assert len(server.asked) < 1 + 15 * Retry().attempts  # what it would have tried
