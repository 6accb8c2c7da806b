"""Which files of a folder are read: as `rg` chooses them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from commands.run import write

from pictool.documents.finding import FileFilter, find_files
from pictool.errors import InputError

FILES = (
    "a.txt", "b.log", "build/x.txt", "deep/c.txt", "deep/keep.log", "deep/d.log", ".hidden/e.txt", ".f.txt",
    "deep/er/g.md", "st/pictool-store", "st/objects/k.kvo",
)  # fmt: skip


@pytest.fixture
def folder() -> Path:
    for name in FILES:
        write(f"docs/{name}", "x")
    write("docs/.gitignore", "*.log\n/build/\n[\n"), write("docs/deep/.gitignore", "!keep.log\n")
    return Path("docs")


def found(folder: Path, selection: FileFilter = FileFilter()) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in find_files([folder], selection)]


def test_ignored_hidden_files_and_stores_are_left_out(folder: Path) -> None:
    assert found(folder) == ["a.txt", "deep/c.txt", "deep/er/g.md", "deep/keep.log"]
    everything = found(folder, FileFilter(reads_ignored=True))
    assert everything == ["a.txt", "b.log", "build/x.txt", "deep/c.txt", "deep/d.log", "deep/er/g.md", "deep/keep.log"]


def test_git_itself_agrees(folder: Path) -> None:
    write("docs/.gitignore", "*.log\n/build/\n")
    subprocess.run(["git", "init", "-q", folder], check=True)
    command = ["git", "-C", str(folder), "ls-files", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    visible = [name for name in listed if not any(part.startswith(".") for part in name.split("/"))]
    assert found(folder) == sorted(name for name in visible if not name.startswith("st/"))


def test_patterns_include_and_exclude(folder: Path) -> None:
    assert found(folder, FileFilter(include=("*.md", "a.*"))) == ["a.txt", "deep/er/g.md"]
    assert found(folder, FileFilter(exclude=("deep/",))) == ["a.txt"]
    with pytest.raises(InputError, match=f"^{folder}: "):
        found(folder, FileFilter(include=("*.pdf",)))
    with pytest.raises(InputError, match="--exclude"):
        found(folder, FileFilter(exclude=("!",)))


def test_links_are_not_followed_out_of_the_folder(folder: Path) -> None:
    write("outside/secret.txt", "x")
    (folder / "link.txt").symlink_to(Path("outside/secret.txt").absolute())
    (folder / "link").symlink_to(Path("outside").absolute())
    (folder / "loop").symlink_to(".")
    assert found(folder) == ["a.txt", "deep/c.txt", "deep/er/g.md", "deep/keep.log"]


def test_a_file_that_is_named_is_read_whatever_its_name_and_once(folder: Path) -> None:
    named = [folder / "b.log", folder, folder / "a.txt"]
    assert find_files(named)[:2] == [folder / "b.log", folder / "a.txt"] and len(find_files(named)) == 5
    with pytest.raises(InputError, match=r"^nowhere: "):
        find_files(["nowhere"])
