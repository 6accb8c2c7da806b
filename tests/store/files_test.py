"""What a power failure leaves: the order in which things reach the disk. And whose temp files are stale."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from chunks import files, make_chunk

from pictool.errors import StoreError
from pictool.store.files import allow_open_files, atomic_write, remove_stale_temp
from pictool.store.store import Store


class Disk:
    """Follows what is made, renamed and synced; tells what a power failure now would take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, Path]] = []
        fsync, replace, mkdir = os.fsync, os.replace, os.mkdir

        def synced(fd: int) -> None:
            self.events.append(("sync", Path(f"/proc/self/fd/{fd}").readlink()))
            fsync(fd)

        def renamed(source: Path, target: Path) -> None:
            self.events.append(("rename from", Path(source).absolute()))
            replace(source, target)
            self.events.append(("rename to", Path(target).absolute()))

        def made(path: Path, *more: int, **also: int) -> None:
            mkdir(path, *more, **also)
            self.events.append(("mkdir", Path(path).absolute()))

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "replace", renamed)
        monkeypatch.setattr(os, "mkdir", made)

    def at(self, kind: str, path: Path) -> int:
        return self.events.index((kind, path))


def test_an_object_reaches_the_disk_before_its_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    path = store.put(make_chunk(1))
    (_, temp) = [event for event in disk.events if event[0] == "rename from"][-1]
    assert disk.at("sync", temp) < disk.at("rename to", path) < len(disk.events) - 1
    assert disk.events[-1] == ("sync", path.parent)


def test_new_directories_reach_the_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    path = store.put(make_chunk(1))
    made = [directory for kind, directory in disk.events if kind == "mkdir" and directory.is_relative_to(store.root)]
    assert set(made) == {store.root, store.root / "tmp", store.root / "objects", path.parent}
    for directory in made:
        last = len(disk.events) - 1 - disk.events[::-1].index(("sync", directory.parent))
        assert disk.at("mkdir", directory) < last


def test_a_directory_that_a_killed_writer_made_reaches_the_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been killed before it synchronised the one above."""
    store.put(make_chunk(1))
    shard = store.path(make_chunk(2).meta.key).parent
    shard.mkdir()
    disk = Disk(monkeypatch)
    for number in range(2):
        store.put(make_chunk(2))
        assert disk.events.count(("sync", shard.parent)) == 1, number


FULL = """
import resource, sys
from chunks import make_chunk
from pictool.errors import StoreError
from pictool.store.store import Store
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = Store(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    store.put(make_chunk(2))
except StoreError as error:
    print(error)
"""


def test_a_write_that_the_system_cuts_short_leaves_everything_as_it_was(store: Store) -> None:
    path = store.put(make_chunk(1))
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(store.root)],
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "File too large" in done.stdout and "nothing was changed" in done.stdout
    assert store.keys() == [path.stem] and os.listdir(store.root / "tmp") == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_writer_that_fails_leaves_the_old_file_and_no_temp_file(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "out").write_bytes(b"old")
    with (
        pytest.raises(StoreError if isinstance(error, OSError) else type(error)),
        atomic_write(tmp_path / "out") as file,
    ):
        file.write(b"half")
        raise error
    assert files(tmp_path) == [tmp_path / "out"] and (tmp_path / "out").read_bytes() == b"old"


def test_a_temp_file_that_is_being_written_is_no_litter(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "out", tmp_path / "tmp") as file:
        temp = Path(file.name)
        assert remove_stale_temp(temp) is None and temp.exists()
        file.write(b"x")
    assert (tmp_path / "out").read_bytes() == b"x"
    assert remove_stale_temp(temp) is None
    temp.write_bytes(b"123")
    assert remove_stale_temp(temp) == 3 and not temp.exists()


def test_a_file_that_a_gc_took_before_it_was_locked_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    flock, taken = fcntl.flock, list[Path]()

    def first_taken(file: object, flags: int) -> None:
        if not taken:
            taken.append(Path(file.name))  # type: ignore[attr-defined]
            taken[0].unlink()
        flock(file, flags)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", first_taken)
    with atomic_write(tmp_path / "out", tmp_path / "tmp") as file:
        assert Path(file.name) != taken[0]
        file.write(b"x")
    assert files(tmp_path) == [tmp_path / "out"]


# Outputs beside which no gc looks


def write_and_die(path: Path, step: str) -> None:
    """Write `path` in a process that is killed at a step of it."""
    child = os.fork()
    if child == 0:

        def die(*_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        with suppress(BaseException), atomic_write(path) as file:
            file.write(b"half")
            file.flush()
            setattr(os, step, die)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_killed_output_leaves_the_old_file_and_nothing_for_ever(step: str, tmp_path: Path) -> None:
    for name in ("out [1].kva", "another out.kva"):
        (tmp_path / name).write_bytes(b"old")
        for _ in range(2):
            write_and_die(tmp_path / name, step)
        assert (tmp_path / name).read_bytes() == b"old"
    assert len(files(tmp_path)) == 2 + 2  # a temp file each
    for name in ("out [1].kva", "another out.kva"):
        with atomic_write(tmp_path / name) as file:
            file.write(b"new")
        assert (tmp_path / name).read_bytes() == b"new"
    assert len(files(tmp_path)) == 2


def test_two_writers_of_one_output_leave_one_whole_file(tmp_path: Path) -> None:
    def write(content: bytes) -> None:
        for _ in range(50):
            with atomic_write(tmp_path / "out", durable=False) as file:
                file.write(content * 1000)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(write, bytes([number])) for number in range(4)]:
            done.result()
    assert files(tmp_path) == [tmp_path / "out"]
    assert len(set((tmp_path / "out").read_bytes())) == 1


def test_a_store_without_permission_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(make_chunk(1))

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(StoreError, match=f"^{store.root}: .*Permission denied"):
            store.put(make_chunk(2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", refuse)
        store.open(make_chunk(1).meta.key).close()  # a hit in a store that cannot be written is one all the same


def test_as_many_open_files_as_the_system_lets() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        assert allow_open_files(100) == 100 and resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        assert allow_open_files(400) == 400 and resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 400
        if hard != resource.RLIM_INFINITY:
            assert 0 < allow_open_files(hard + 1) < hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_need_not_be_durable_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    disk = Disk(monkeypatch)
    with atomic_write(tmp_path / "there" / "quick", durable=False) as file:
        file.write(b"x")
    assert "sync" not in {kind for kind, _ in disk.events}
    assert (tmp_path / "there" / "quick").read_bytes() == b"x"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "out").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "out")
    with atomic_write(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "out").read_bytes() == b"new"
    assert len(files(tmp_path)) == 2


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with atomic_write(pipe) as file:
        file.write(b"through")
    assert os.read(reader, 100) == b"through" and pipe.is_fifo()
    os.close(reader)


def test_a_relative_path_and_new_directories(tmp_path: Path) -> None:
    with atomic_write(Path("a/b/out")) as file:
        file.write(b"x")
    with atomic_write(Path("out")) as file:
        file.write(b"y")
    assert {path.relative_to(tmp_path).as_posix() for path in files(tmp_path)} == {"a/b/out", "out"}
