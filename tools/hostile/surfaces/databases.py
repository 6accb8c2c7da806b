"""Damaged files beside the objects, and of the cache: databases, pins, locks. None is in the way; leases are named."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from commands.run import pic, write

import pictool.controller.profile as profile
from hostile.judge import Case, Check, Outcome, Step, fine
from hostile.scene import Scene, inside
from hostile.surfaces.base import Surface, put_something_else
from hostile.surfaces.objects import check_json, healing
from hostile.values import dumps, mutate_bytes, mutate_tree, text, value
from pictool.store.database import DATABASE
from pictool.store.directory import MARK
from pictool.store.leases import LeasedObject, Leases

SQL = (
    "DROP TABLE {table}",
    "DELETE FROM {table}",
    "ALTER TABLE {table} ADD COLUMN extra",
    "PRAGMA user_version = 99",
    "PRAGMA user_version = 1",
    "UPDATE {table} SET key = 'x'",
    "UPDATE {table} SET key = NULL",
    "PRAGMA journal_mode = WAL",
    "CREATE TRIGGER t BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'no'); END",
    "PRAGMA page_size = 65536",
    "CREATE TRIGGER t AFTER DELETE ON {table} BEGIN SELECT RAISE(FAIL, 'no'); END",
    "ALTER TABLE {table} RENAME TO other",
    "DROP TABLE {table}; CREATE VIEW {table} AS SELECT 1 AS key, 2 AS count",
    "DROP TABLE {table}; CREATE TABLE {table} (x)",
    "CREATE TABLE big (x); INSERT INTO big VALUES (zeroblob(9999999))",
    "PRAGMA auto_vacuum = FULL; VACUUM",
    "DROP TABLE {table}; CREATE TABLE {table} (key BLOB, count TEXT)",
    "PRAGMA encoding = 'UTF-16'",
)
TABLES = {  # of each database: its tables, and their columns
    "store": (
        ("objects", "key", "inode", "bytes", "used", "meta", "text"),
        ("hits", "key", "count"),
        ("counts", "name", "count"),
        ("sources", "key", "source", "model"),
        ("leases", "id", "tenant", "created", "expires", "body"),
    ),
    "compiled": (("compiled", "name", "objects", "used"),),
}
PROFILES = {"compute": [[62.0, 2.0, 1.0, 0.064], [510.0, 2.0, 1.0, 0.512], [510.0, 2.0, 0.125, 0.066]],
            "loads": [[2e6, 1.0, 2e6, 0.3, 0.1], [2e6, 2.0, 2e6, 0.4, 0.1]]}  # fmt: skip


def hostile_rows(path: Path, draw: random.Random) -> str:
    """Values of other types in a table's rows."""
    table, *columns = draw.choice(TABLES[path.stem])
    column = draw.choice(columns[1:])
    new = draw.choice(
        (None, -1, 2**63 - 1, 0.5, float("inf"), b"\xff\xfe", "x", "{}", "[]", dumps(value(draw)), "é" * 9)
    )
    if isinstance(new, str):
        new = new.encode("utf-8", "replace").decode()
    with closing(sqlite3.connect(path)) as db, db:
        try:
            db.execute(f"UPDATE {table} SET {column} = ?", (new,))
        except sqlite3.Error:
            db.execute(f"DELETE FROM {table}")
    return f"{path.name}: {column} = {str(new)[:30]!r}"


def hostile_meta(path: Path, draw: random.Random) -> str:
    """Rows of the index whose metadata says something else, in a tree that is otherwise right."""
    with closing(sqlite3.connect(path)) as db, db:
        rows = db.execute("SELECT key, meta FROM objects").fetchall()
        tree = json.loads(rows[0][1])
        what = mutate_tree(tree, draw)
        meta = dumps(tree)
        db.execute("UPDATE objects SET meta = ?", (meta.encode("utf-8", "replace").decode(),))
    return f"{path.name}: meta {what}"


def hostile_schema(path: Path, draw: random.Random) -> str:
    table, script = draw.choice(TABLES[path.stem])[0], draw.choice(SQL)
    with closing(sqlite3.connect(path)) as db:
        try:
            db.executescript(script.format(table=table))
        except sqlite3.Error as error:
            return f"{path.name}: {script[:40]} ({error})"
    return f"{path.name}: {script[:60]}"


def hostile_bytes(path: Path, draw: random.Random) -> str:
    data, what = mutate_bytes(path.read_bytes(), draw)
    write(path, data)
    return f"{path.name}: {what}"


def hostile_journal(path: Path, draw: random.Random) -> str:
    """What a killed writer, or an attacker, may have left beside a database."""
    suffix = draw.choice(("-journal", "-wal", "-shm"))
    magic = draw.choice((b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7", b"\x37\x7f\x06\x82", b""))
    write(Path(f"{path}{suffix}"), magic + draw.randbytes(600))
    return f"{path.name}{suffix} of noise"


class Databases(Surface):
    """Files beside the objects are damaged; the objects are honest, so every command has its answer."""

    name, weight = "databases", 8

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        # Times are none of this surface's.
        profile.measure_compute = lambda *_: PROFILES["compute"]  # type: ignore[attr-defined]
        profile.measure_loads = lambda *_: PROFILES["loads"]  # type: ignore[attr-defined]
        with inside(scene.root / "side"):
            scene.write_texts()
            scene.write_store("none")
            for command in (
                scene.link("none"),
                ("store", "ls", "--store", "st"),
                ("store", "pin", *scene.keys["none"].values(), "--store", "st"),
                self._plan(),
            ):
                done = pic(*command)
                assert done.code == 0, done.err
            pic("store", "ls", "--stats", "--store", "st")
            kept = [LeasedObject(key, 5) for key in scene.keys["none"].values()]
            Leases(Path("st")).add("t", "m", kept, 4e9)
            self.files = {
                path.relative_to(Path.cwd()): path.read_bytes()
                for path in sorted(Path.cwd().rglob("*"))
                if path.is_file() and path.suffix not in (".kvo", ".txt", ".trace")
            }

    def make(self, draw: random.Random) -> Case:
        scene = self.scene
        scene.write_texts()
        for path, content in self.files.items():
            write(path, content)
        kept = {path.absolute(): content for path, content in scene.write_store("none").items()}
        path = draw.choice([path for path in self.files if path.parts[0] in ("st", "cache")])
        is_special = draw.random() < 0.12
        if is_special:
            what = f"{path} is {put_something_else(path, draw, scene.root / 'outside')}"
        else:
            what = self._damage(path, draw)
        steps = [self._step(draw, path, is_special) for _ in range(draw.choice((1, 2, 3)))]
        return Case(what, tuple(steps), kept, ("st",))

    def _damage(self, path: Path, draw: random.Random) -> str:
        if path.suffix == ".sqlite3":
            ways: list[Callable[[Path, random.Random], str]] = [
                hostile_rows,
                hostile_schema,
                hostile_bytes,
                hostile_journal,
            ]
            return draw.choice([*ways, *([hostile_meta] * 2 if path.name == DATABASE else [])])(path, draw)
        if path.suffix == ".json" and draw.random() < 0.7:
            tree = json.loads(path.read_bytes())
            what = mutate_tree(tree, draw) if draw.random() < 0.8 else ""
            write(path, dumps(tree if what else value(draw)).encode("utf-8", "surrogatepass"))
            return f"{path.name}: {what}"
        if path.parent.name == "pins":
            other = path.with_name(draw.choice(("x", "é", "a" * 200, ".hidden", "0" * 64)))
            write(other, text(draw).encode("utf-8", "surrogatepass"))
            return f"pin {other.name[:20]!r}"
        return hostile_bytes(path, draw)

    def _step(self, draw: random.Random, path: Path, is_special: bool) -> Step:
        scene = self.scene
        keys = scene.keys["none"]
        key = keys["a.txt"]
        store = ("--store", "st")

        def lists_all(outcome: Outcome) -> str | None:
            listed = {entry["key"] for entry in json.loads(outcome.out)}
            return None if listed >= set(keys.values()) else f"lists only {len(listed)} objects"

        def plans(outcome: Outcome) -> str | None:
            return check_json(("--json",))(outcome)

        commands: list[tuple[tuple[object, ...], Check]] = [
            (("store", "ls", "--json", *store), lists_all),
            (("store", "ls", *store), fine),
            (("store", "ls", "--stats", *store), fine),
            (("store", "ls", "--stats", "--json", *store), check_json(("--json",))),
            (("store", "verify", *store), fine),
            (("store", "gc", "--max-size", "1G", *store), fine),
            (("store", "pin", key, *store), fine),
            (("store", "pin", "--undo", key, *store), fine),
            (("inspect", key, *store), fine),
            (("compile", "a.txt", "-m", scene.model, *store), fine),
            ((*self._plan(), "--json"), plans),
            (("store", "verify", "--repair", *store), fine),
            (("store", "gc", "--older-than", "900d", *store), fine),
        ]
        if draw.random() < 0.25:
            done = healing(scene, "none")
            return done if not is_special and path.name != MARK else Step(done.arguments, ("st", path.name), done.check)
        arguments, check = draw.choice(commands)
        # Nobody knows what damaged leases keep from being removed, and a mark may name a later version.
        needs_leases = "gc" in arguments or "--stats" in arguments
        may_refuse = is_special or path.name == MARK or (path.name.startswith(DATABASE) and needs_leases)
        return Step(arguments, ("st", path.name, str(path)), check, must_answer=not may_refuse)

    def _plan(self) -> tuple[object, ...]:
        return "plan", "a.txt", "-m", self.scene.model, "--store", "st"
