"""`pic store`: what it lists, that it finds damage, what goes, what stays, and what moves."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from commands.run import Objects, flip, pic, write
from pictool.store.objects.format import CompiledChunk, ObjectFile, write_object
from pictool.store.sources import read_sources


@pytest.fixture
def root(objects: Objects) -> Path:
    """A store with three objects of one text."""
    return Path(shutil.copytree(objects.store, "copied"))


def one_of(root: Path) -> Path:
    return min(root.glob("objects/??/*.kvo"))


def test_ls_shows_keys_sizes_and_beginnings(root: Path) -> None:
    outcome = pic("store", "ls", "--store", root)
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["key", "tokens", "size", "used", "model", "from:", "text"]
    assert len(lines) == 4
    assert lines[1].startswith(one_of(root).stem[:12])
    assert outcome.err.startswith("pic: 3 objects, ")


@pytest.mark.parametrize("width", [80, 120])
def test_ls_says_where_objects_came_from(
    model: Path, texts: tuple[Path, Path], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    key = pic("compile", "a.txt", "b.txt", "-m", model, "--json").json["objects"][0]["key"]
    pic("store", "pin", key)
    lines = pic("store", "ls").out.splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key[:12]}*")]
    assert " tiny " in line and " a.txt: " in line and lines[-1].startswith("* is pinned")
    assert {len(line) for line in lines[:-1]} == {width}
    listed = pic("store", "ls", "--json").json
    assert {(row["source"], Path(row["model"]).name, row["pinned"]) for row in listed} == {
        ("a.txt", "tiny", True), ("b.txt", "tiny", False)
    }  # fmt: skip
    assert pic("store", "ls", "--limit", 1).err.startswith("pic: 1 of 2 objects, ")
    by_size = [row["bytes"] for row in pic("store", "ls", "--sort", "size", "--json").json]
    assert by_size == sorted(by_size, reverse=True)
    assert pic("store", "ls", "--sort", "name").code == 2


def test_a_table_that_is_piped_is_not_cut(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    words = " ".join(["The harbour was quiet."] * 7)
    write("a.txt", words), pic("compile", "a.txt", "-m", model)
    _, line = pic("store", "ls").out.splitlines()
    assert line.endswith(f" a.txt: {words}")
    monkeypatch.setenv("COLUMNS", "80")
    _, line = pic("store", "ls").out.splitlines()
    assert len(line) == 80 and line.endswith("…")


def test_of_a_tenant_s_objects_no_names_are_kept(model: Path, texts: tuple[Path, Path]) -> None:
    pic("compile", "a.txt", "-m", model, "--salt", "s" * 40)
    (row,) = pic("store", "ls", "--json").json
    assert "source" not in row and read_sources(Path(".pic")) == {}


@pytest.mark.parametrize("verb", ["gc --max-size 1B", "gc --older-than 0s"], ids=str)
def test_a_dry_run_removes_nothing_and_names_what_would_go(root: Path, verb: str) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*.kvo")}
    planned = pic("store", *verb.split(), "--dry-run", "--store", root)
    assert {path: path.read_bytes() for path in root.rglob("*.kvo")} == before
    assert pic("store", *verb.split(), "--store", root).code == 0
    gone = [path for path in before if not path.exists()]
    assert gone and all(path.stem[:12] in planned.out for path in gone)
    assert len(planned.out.splitlines()) == len(gone)


def test_ls_as_json(root: Path) -> None:
    rows = pic("store", "ls", "--store", root, "--json").json
    assert [row["key"] for row in rows] == sorted(path.stem for path in root.glob("objects/??/*.kvo"))
    assert all(Path(row["path"]).stat().st_size == row["bytes"] and row["problem"] is None for row in rows)


@pytest.mark.parametrize(
    "verb", ["ls", "ls --stats", "verify", "gc", "push all -o a.kva", "push all --remote r", "pin abcd"]
)
def test_an_absent_store_is_named(verb: str) -> None:
    outcome = pic("store", *verb.split(), "--store", "nowhere")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("pic: error: nowhere: no such store; ") and not Path("nowhere").exists()


def test_verify_reads_all(root: Path) -> None:
    outcome = pic("store", "verify", "--store", root)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "pic: 3 objects checked, none damaged\n")


def test_verify_finds_a_flipped_bit_that_ls_does_not_read(root: Path) -> None:
    damaged = one_of(root)
    flip(damaged, damaged.stat().st_size // 2)
    assert pic("store", "ls", "--store", root).code == 0
    outcome = pic("store", "verify", "--store", root)
    assert outcome.code == 1
    assert outcome.out.count("\n") == 1 and str(damaged) in outcome.out and "checksum" in outcome.out
    assert outcome.err.startswith(f"pic: error: {root}: 1 of 3 objects are damaged; ")


def test_verify_as_json_names_the_damaged(root: Path) -> None:
    damaged = one_of(root)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    outcome = pic("store", "verify", "--store", root, "--json")
    assert outcome.code == 1
    assert f'"{damaged.stem}"' in outcome.out and '"objects": 3' in outcome.out


def test_ls_shows_a_truncated_object_as_damaged(root: Path) -> None:
    damaged = one_of(root)
    damaged.write_bytes(damaged.read_bytes()[:100])
    outcome = pic("store", "ls", "--store", root)
    line = outcome.out.splitlines()[1]
    assert line.startswith(damaged.stem[:12]) and " DAMAGED or unreadable: see below" in line
    assert f"\n{damaged.stem[:12]}: " in outcome.out and "truncated" in outcome.out.splitlines()[-1]
    assert pic("store", "ls", "--store", root, "--json").json[0]["problem"]


def test_an_object_under_another_name_is_damage(root: Path) -> None:
    first, second = sorted(root.glob("objects/??/*.kvo"))[:2]
    shutil.copy(first, second)
    assert first.stem[:12] in pic("store", "verify", "--store", root).out


def keys(root: Path) -> list[str]:
    return sorted(path.stem for path in root.glob("objects/??/*.kvo"))


def test_repair(root: Path) -> None:
    damaged = min(root.glob("objects/??/*.kvo"))
    flip(damaged, -1)
    outcome = pic("store", "verify", "--repair", "--store", root)
    assert outcome.code == 0 and outcome.out.endswith("(removed)\n")
    assert outcome.err == "pic: 3 objects checked, 1 removed; compile their texts again\n"
    assert len(keys(root)) == 2 and pic("store", "verify", "--store", root).code == 0


def test_ls_of_some(root: Path) -> None:
    first = pic("store", "ls", "--limit", 2, "--store", root, "--json").json
    assert [one["key"] for one in first] == keys(root)[:2]


def test_gc_to_a_size(root: Path) -> None:
    (root / "tmp" / ".left.0123456789abcdef.tmp").write_bytes(b"x")
    done = pic("store", "gc", "--max-size", "1B", "--store", root, "--json").json
    assert done["evicted"]["count"] == 3 and done["litter"] == {"count": 1, "num_bytes": 1} and keys(root) == []
    assert pic("store", "gc", "--max-size", "lots", "--store", root).code == 2


def test_the_budget_of_the_environment(root: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(path.stat().st_size for path in root.glob("objects/??/*.kvo"))
    monkeypatch.setenv("PIC_MAX_SIZE", f"{size}B")
    write("new.txt", "Something else stands here.\n")
    assert pic("compile", "new.txt", "-m", model, "--store", root).code == 0
    assert sum(path.stat().st_size for path in root.glob("objects/??/*.kvo")) <= size
    stats = pic("store", "ls", "--stats", "--store", root, "--json").json
    assert stats["max_bytes"] == size and stats["counts"]["evictions"] >= 1


def test_a_prompt_larger_than_the_budget_is_linked(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write(f"{i}.txt", f"Page {i}: the harbour was quiet, and nobody knows why.\n") for i in range(4)]
    link = ("link", *paths, "--query", "Why?", "-m", model, "--max-new-tokens", 3, "--json")
    wanted = pic(*link, "--store", "large").json["answer"]
    sizes = [path.stat().st_size for path in Path("large").glob("objects/??/*.kvo")]
    monkeypatch.setenv("PIC_MAX_SIZE", f"{max(sizes) * 2}B")
    assert pic(*link, "--store", "small").json["answer"] == wanted
    assert sum(path.stat().st_size for path in Path("small").glob("objects/??/*.kvo")) <= max(sizes) * 2


def test_expire_and_pins(root: Path) -> None:
    first, second, _ = keys(root)
    assert pic("store", "pin", first[:10], "--store", root).err == "pic: 1 object pinned\n"
    assert pic("store", "gc", first, "--store", root).code == 1
    assert pic("store", "gc", second[:8], "--store", root).code == 0
    pic("store", "gc", "--older-than", "0s", "--store", root)
    assert keys(root) == [first]
    (shown,) = pic("store", "ls", "--store", root, "--json").json
    assert shown["pinned"] and shown["key"] == first and "harbour" in shown["text"]
    pic("store", "pin", "--undo", first, "--store", root)
    assert pic("store", "gc", first, "--store", root).code == 0 and keys(root) == []


def test_gc_wants_one_of_keys_age_and_size() -> None:
    assert pic("store", "gc", "abcd", "--older-than", "1d").code == 2
    assert pic("store", "gc", "--max-size", "1G", "--older-than", "1d").code == 2


def test_hits_and_misses_of_compiles_and_links(model: Path) -> None:
    write("a.txt", "The harbour was quiet.\n")
    write("b.txt", "It holds a festival.\n")
    more = ("-m", model, "--store", "s")
    pic("compile", "a.txt", *more)
    pic("compile", "a.txt", *more)
    pic("link", "a.txt", "b.txt", "--query", "Why?", "--algo", "naive", "--max-new-tokens", 1, *more)
    counts = pic("store", "ls", "--stats", "--store", "s", "--json").json["counts"]
    assert counts["writes"] == 3  # a, b and the head
    assert (counts["hits"], counts["misses"]) == (2, 3)
    lines = pic("store", "ls", "--stats", "--store", "s").out
    assert "2 of 5 (40.0%)" in lines and "codec none" in lines


def test_an_archive_goes_from_store_to_store(root: Path) -> None:
    assert pic("store", "push", "all", "-o", "all.kva", "--store", root, "--json").json["objects"] == 3
    assert pic("store", "pull", "all.kva", "--store", "other").err == "pic: 3 objects, 3 of them new\n"
    assert keys(Path("other")) == keys(root)
    pic("store", "push", keys(root)[1][:9], "-o", "one.kva", "--store", root)
    pic("store", "pull", "one.kva", "--store", "third")
    assert keys(Path("third")) == [keys(root)[1]]
    assert pic("store", "pull", "missing.kva", "--store", "third").code == 1


def test_an_archive_replaces_no_file_unasked(objects: Objects) -> None:
    store = ("--store", objects.store)
    write("all.kva", "mine")
    refused = pic("store", "push", "all", "-o", "all.kva", *store)
    assert refused.code == 1 and "all.kva: " in refused.err and Path("all.kva").read_text() == "mine"
    assert pic("store", "push", "all", "-o", "all.kva", "--force", *store).code == 0
    assert pic("store", "push", "all", "-o", "-", *store).code == 2 and not Path("-").exists()


def test_a_rewritten_text_is_found_by_the_model_s_tokenizer(model: Path, texts: tuple[Path, Path]) -> None:
    """All checksums, the seal and the key hold; the key follows from the tokens alone."""
    pic("compile", "a.txt", "b.txt", "-m", model, "--chunk-tokens", "8")
    assert pic("store", "verify", "-m", model).code == 0
    path = next(path for path in Path(".pic/objects").glob("*/*.kvo"))
    with ObjectFile(path) as file:
        layers = [(bytes(key), bytes(value)) for key, value in map(file.layer, range(file.meta.target.geometry.layers))]
        chunk = CompiledChunk(file.meta, "another text", file.tokens(), layers)
    with path.open("wb") as out:
        write_object(out, chunk)
    assert pic("store", "verify").code == 0
    refused = pic("store", "verify", "-m", model)
    assert refused.code == 1 and f"{path}: its text " in refused.out
    linked = pic("link", path, "-q", "?", "-m", model, "--algo", f"speccache:spec_model={model}")
    assert linked.code == 1 and "its tokens" in linked.err
    assert pic("store", "verify", "--repair", "-m", model).code == 0 and not path.exists()
    assert pic("store", "verify", "-m", model).code == 0


def test_a_settings_file_of_others_costs_no_file(model: Path, texts: tuple[Path, Path]) -> None:
    """As a repository that was cloned may have one: `store` and `remote` name the user's directories."""
    for name in (
        "tmp/thesis",
        "tmp/.x.0123456789abcdef.tmp",
        "a/b/objects/x",
        "a/b/tmp/y",
        "index.sqlite3",
        "check.json",
    ):
        write(f"home/{name}", "mine")
    write("pic.yaml", f"store: home\nremote: home\nmodel: {model}\nmax_size: 1B\n")
    before = {path: path.read_bytes() for path in Path("home").rglob("*") if path.is_file()}
    for line in (
        "compile a.txt", "compile a.txt --remote ''", "link a.txt -q ? --remote ''", "store gc", "store gc --dry-run",
        "store gc --older-than 0s", "store verify --repair", "serve --check off --port 0",
    ):  # fmt: skip
        refused = pic(*shlex.split(line))
        assert refused.code == 1 and "home: " in refused.err and "(a, check.json, index.sqlite3" in refused.err
    assert pic("store", "ls").out == "" and pic("store", "push", "all", "--store", "other").code == 1
    assert {path: path.read_bytes() for path in Path("home").rglob("*") if path.is_file()} == before


def test_a_store_without_a_mark_is_adopted_with_a_note(model: Path, texts: tuple[Path, Path]) -> None:
    pic("compile", "a.txt", "-m", model)
    Path(".pic/pictool-store").unlink()
    assert "pictool-store" not in pic("store", "ls").err
    first, second = (pic("compile", "a.txt", "b.txt", "-m", model) for _ in range(2))
    assert first.err.count("pictool-store") == 1 and "pic: .pic: " in first.err
    assert "pictool-store" not in second.err and Path(".pic/pictool-store").exists()
    Path(".pic/pictool-store").unlink()
    pic("compile", "a.txt", "-m", model, "--store", "new")
    pushed = pic("store", "push", "all", "--store", "new", "--remote", ".pic", "--force")
    assert pushed.code == 0 and pushed.err.count("pictool-store") == 1
