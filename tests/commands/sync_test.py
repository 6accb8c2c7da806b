"""`pic sync` and `--dry-run`: what would change, what it costs, and a store in step with a folder."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import folders
import pytest
from unprivileged import unprivileged

from commands.run import pic, write
from training.world.generate import write_prompt


@pytest.fixture
def docs() -> Path:
    pages = write_prompt(random.Random(3), 30).pages
    for number, page in enumerate(pages[:24]):
        write(f"docs/{number}.txt", page * (1 + number % 4))
    write("docs/all.pdf", folders.pdf(pages[24:]))
    write("docs/cut.pdf", folders.pdf(["a"])[:200])
    return Path("docs")


def sources() -> set[str]:
    return {entry["source"].partition(",")[0] for entry in pic("store", "ls", "--json").json}


def test_a_dry_run_is_right_within_ten_percent_and_writes_nothing(docs: Path) -> None:
    for number in range(8, 24):
        (docs / f"{number}.txt").unlink()
    for codec in ("none", "zstd", "int8", "int4"):
        said = pic("sync", docs, "--dry-run", "--json", "--codec", codec, "--store", codec).json
        assert not Path(codec).exists()
        assert pic("sync", docs, "--codec", codec, "--store", codec).code == 0
        listed = pic("store", "ls", "--json", "--store", codec).json
        assert said["documents"] == 9 and said["new_chunks"] == len(listed)
        assert said["new_tokens"] == sum(entry["tokens"] for entry in listed)
        assert sum(entry["bytes"] for entry in listed) == pytest.approx(said["bytes"][codec], rel=0.1)
        assert said["seconds"] > 0 and said["free_bytes"] > 0 and len(said["new"]) == len(listed)
        again = pic("sync", docs, "--dry-run", "--json", "--codec", codec, "--store", codec).json
        assert (again["new_chunks"], again["bytes"][codec], again["new"], again["gone"]) == (0, 0, [], [])


def test_a_dry_run_counts_the_passages_that_are_retrieved_equal_ones_too(docs: Path) -> None:
    write("docs/copy.txt", (docs / "0.txt").read_text())
    outcome = pic("sync", docs, "--dry-run", "--json")
    said, counted = outcome.json, f"{outcome.json['chunks']:,d} passages of {outcome.json['documents']} documents"
    assert f"{counted}, {said['tokens']:,d} tokens" in outcome.err and said["chunks"] > said["objects"]


def test_a_name_that_is_not_utf_8_is_synchronised() -> None:
    name = Path("docs", os.fsdecode(b"caf\xe9.txt"))
    write("docs/a.txt", "The harbour was quiet.\n")
    write(name, "A windmill on the old quay.\n")
    first = pic("sync", "docs", "--json")
    assert r"docs/caf\udce9.txt" in [new["source"] for new in first.json[0]["new"]] and first.code == 0
    assert [pic("sync", "docs", "--json").json[0][change] for change in ("new", "gone")] == [[], []]
    name.unlink()
    gone = pic("sync", "docs", "--json").json[0]["gone"]
    assert [entry["path"] for entry in gone] == [r"docs/caf\udce9.txt"] and sources() == {"docs/a.txt"}


def test_compile_forecasts_the_same_way() -> None:
    for number, page in enumerate(write_prompt(random.Random(5), 12).pages):
        write(f"{number}.txt", page * (1 + number % 3))
    names = [f"{number}.txt" for number in range(12)]
    said = pic("compile", *names, "--dry-run", "--json").json
    assert said["documents"] == 12 and not Path(".pic").exists()
    assert pic("compile", *names).code == 0
    size = sum(entry["bytes"] for entry in pic("store", "ls", "--json").json)
    assert size == pytest.approx(said["bytes"]["none"], rel=0.1)
    shown = pic("compile", *names, "--dry-run").out
    assert "documents  12, 12 chunks" in shown and "to compile 0 chunks, 0 tokens" in shown


def test_more_than_a_tenth_of_the_free_disk_is_warned_of(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pictool.compiler.forecast.free_bytes", lambda path: 10_000_000)
    assert "of disk are free; see --dry-run" in pic("sync", docs).err
    assert "of disk are free" not in pic("sync", docs).err  # all is there


def test_what_is_new_is_compiled_and_what_is_gone_is_removed(docs: Path) -> None:
    first = pic("sync", docs)
    assert first.code == 0 and "docs/cut.pdf: is damaged" in first.err and "+  docs/0.txt" in first.out
    (docs / "0.txt").unlink()
    write("docs/1.txt", "Here begins a new book.\n"), write("docs/new.html", "<html><p>It is new.")
    planned, done = pic("sync", docs, "--dry-run").out, pic("sync", docs)
    assert done.out.splitlines() == [" - docs/0.txt", "+- docs/1.txt", "+  docs/new.html"]
    assert planned.startswith(done.out)
    assert {"docs/1.txt", "docs/new.html"} <= sources() and "docs/0.txt" not in sources()
    (folder,) = pic("store", "ls", "--stats", "--json").json["folders"]
    assert folder["folder"] == str(docs.resolve()) and folder["files"] == 25
    assert folder["objects"] == len(pic("store", "ls", "--json").json)
    assert pic("sync", docs).out == "" and pic("store", "verify").code == 0


def test_what_others_have_stays(docs: Path, model: Path) -> None:
    """Another folder's, another model's, a pinned object, and those of a file that cannot be read now."""
    write("more/copy.txt", (docs / "0.txt").read_text())
    assert pic("sync", docs, "more").code == 0 and pic("sync", docs, "-m", model).code == 0
    pinned = [entry["key"] for entry in pic("store", "ls", "--json").json if entry["source"] == "docs/2.txt"]
    assert pinned and pic("store", "pin", *pinned).code == 0
    before = len(pic("store", "ls", "--json").json)
    for name in ("0.txt", "1.txt", "2.txt"):
        (docs / name).unlink()
    (docs / "all.pdf").write_bytes(b"%PDF-broken")
    assert pic("sync", docs).out.splitlines() == [" - docs/1.txt"]
    assert len(pic("store", "ls", "--json").json) < before
    assert sources() >= {"docs/0.txt", "docs/2.txt", "docs/all.pdf"}  # 0.txt is in the other folder too


@pytest.fixture
def notes() -> Path:
    for name in ("a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"):
        write(f"notes/{name}", f"This is {name}. The harbour was quiet.\n")
    assert pic("sync", "notes").code == 0
    return Path("notes")


@pytest.mark.parametrize("name", ["notes", "./notes/", "absolute", "link"])
@pytest.mark.parametrize("closed", ["a.txt", "sub", "sub/deep"])
def test_what_cannot_be_read_keeps_its_objects(notes: Path, name: str, closed: str) -> None:
    Path("link").symlink_to("notes")
    (notes / "b.txt").unlink()
    (notes / closed).chmod(0)
    named = notes.resolve() if name == "absolute" else name
    done = unprivileged(lambda: pic("sync", named))
    (notes / closed).chmod(0o755)
    assert done.code == 1 and f"{Path(named, closed)}: " in done.err and done.out == f" - {Path(named, 'b.txt')}\n"
    assert sources() == {"notes/a.txt", "notes/sub/c.txt", "notes/sub/deep/d.txt"}
    again = pic("sync", named)
    assert (again.code, again.out) == (0, "") and "3 objects, 0 new, 0 removed" in again.err


def test_a_folder_whose_files_may_not_be_looked_at_keeps_its_objects(notes: Path) -> None:
    (notes / "sub").chmod(0o644)  # it can be listed
    done = unprivileged(lambda: pic("sync", "notes", "--json"))
    (notes / "sub").chmod(0o755)
    assert done.code == 1
    (report,) = json.loads(done.out)
    assert report["gone"] == [] and set(report["withheld"]) == {"notes/sub/c.txt", "notes/sub/deep"}
    assert len(sources()) == 4


@pytest.mark.parametrize(("named", "start"), [("notes", "."), (".", "notes"), ("../notes", "sub"), ("link", ".")])
def test_what_an_earlier_version_kept_is_recognised(
    notes: Path, monkeypatch: pytest.MonkeyPatch, named: str, start: str
) -> None:  # fmt: skip
    """It kept paths as the folder was named, from any directory."""
    with closing(sqlite3.connect(".pic/store.sqlite3")) as db, db:
        (count,) = db.execute("SELECT count(*) FROM folders").fetchone()
        db.execute("UPDATE folders SET path = ? || substr(path, ?)", (
            "" if named == "." else f"{named}/", len(str(notes.resolve())) + 2,
        ))  # fmt: skip
    assert count == 4
    (notes / "sub").chmod(0)
    (notes / "b.txt").unlink()
    done = unprivileged(lambda: pic("sync", notes.resolve()))
    (notes / "sub").chmod(0o755)
    assert done.code == 1 and " 1 removed" in done.err
    assert len(sources()) == 3


def test_what_compile_made_of_another_file_stays(notes: Path) -> None:
    write("copy.txt", (notes / "a.txt").read_text())
    assert pic("compile", "copy.txt", notes / "b.txt").code == 0
    for _ in range(2):  # a sync forgets nothing
        assert pic("sync", "notes").code == 0
    (notes / "a.txt").unlink()
    (notes / "b.txt").unlink()
    assert pic("sync", "notes").out == " - notes/b.txt\n"
    assert len(sources()) == 3
    assert len(pic("store", "ls", "--stats", "--json").json["folders"]) == 1


def test_what_cannot_work_is_said(docs: Path) -> None:
    assert "is not a folder" in pic("sync", docs / "0.txt").err and pic("sync", docs, "--watch", "--json").code == 2
    assert "--salt: " in pic("sync", docs, "--salt", "a-salt-that-is-long-enough").err
    assert pic("sync", docs).code == 0
    Path(".pic/store.sqlite3").write_bytes(b"x" * 4096)
    assert "store.sqlite3: cannot be used" in pic("sync", docs).err
    Path(".pic/store.sqlite3").unlink()
    assert pic("sync", docs).code == 0


def test_watching_follows_a_change() -> None:
    write("docs/a.txt", "The harbour was quiet.\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "pictool", "sync", "docs", "--watch"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        limit = threading.Timer(300, process.kill)  # the lines end then
        limit.start()
        assert any("watching docs" in line for line in process.stderr)
        write("docs/b.txt", "A mill.\n")
        assert any("2 objects, 1 new, 0 removed" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        limit.cancel()
    assert sources() == {"docs/a.txt", "docs/b.txt"}
