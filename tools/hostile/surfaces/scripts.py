"""What users write or receive: settings, tiers, documents, datasets and results of `pic eval`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from commands.run import pic, write

from hostile.judge import Case, Step
from hostile.scene import QUERY, Scene, inside
from hostile.surfaces.base import Surface, put_something_else
from hostile.surfaces.objects import check_json
from hostile.values import dumps, encode, mutate_bytes, mutate_text, mutate_tree, value

SETTINGS = {
    "store": "st",
    "device": "cpu",
    "dtype": "float32",
    "codec": "none",
    "max_size": "1G",
    "memory": "1M",
    "head": "You answer.",
    "query_template": "Q: {query}",
    "salt": "s3cret-and-long-enough",
    "remote": "far",
}
RECORDS = [
    {"query": "Who?", "documents": ["a.txt", "b.txt"], "answers": ["nobody"], "id": 1},
    {"query": "Why?", "documents": ["b.txt"], "answers": ["x", "y"]},
]
_BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)
_MERGES = "a: &a {k: v, l: v}\n" + "".join(
    f"{b}: &{b} {{<<: [{','.join(['*' + a] * 9)}]}}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
CALL = {"model": "default", "max_tokens": 1, "temperature": 0, "input": [{"plus": [{"file": "a.txt"}]}, {"user": "x"}]}
QUERIES = [
    {"g": CALL},
    {"plus": [{"repeat": {"n": 2, "g": {**CALL, "temperature": 0.7, "input": {"user": "a\u2028b"}}}}]},
    {"g": {**CALL, "input": [{"retrieve": {"from": ["a.txt", "b.txt"], "query": {"user": "x"}}}]}},
]
ANSWERS = [{"line": 1, "query": "0" * 64, "made_of": "0" * 64, "answer": "x"}, {"line": 3, "query": "1", "answer": ""}]
YAML = (
    _BOMB,
    _MERGES,
    "&a [*a]",
    "&a {head: *a}",
    "documents: &a [*a]\nquery: x",
    "!!python/object/apply:os.system ['touch ../outside/own']",
    "? [a]\n: b",
    "!!binary aGk=",
    "!!set {a, b}",
    "!!timestamp 2001-01-01",
    "head: 2001-99-99",
    "head: 0x_",
    "head: 1e400",
    "head: .nan",
    "head: .inf",
    "head: !!float .nan",
    "- a\n- b",
    "head: |\n  x\n---\nhead: y",
    "<<: {a: 1}",
    "<<: *x",
    "{" * 3000,
    "[" * 3000,
    "a: b: c",
    "\t- x",
    "%YAML 9.9\n---\nx",
    'head: "\\ud800"',
    'head: "\\x1b[2J"',
    "head: '\x85'",
    "\ufeffhead: x",
    "head: 1:1:1",
    "head: on",
    "null: x",
    "1: x",
    "? \n: x",
    "[]: x",
    "head: !!int 9" + "9" * 5000,
    "documents: " + "[a.txt, " * 500 + "]" * 500,
    "query: !!python/name:os.system",
    "head: &x y\nquery: *x",
    "codec: !!null ''",
    "head: 12:30:45",
    "remote: 'http://['",
    "remote: ssh://x",
    "remote: 'file://\\0'",
    "remote: /dev/null",
    "remote: 'http://127.0.0.1:1'",
    "remote: simplecache::http://127.0.0.1:1",
    "store: /dev/null",
    "store: ''",
    "memory: 1e400",
    "max_size: -1",
    "memory: 999999999999999999T",
    "salt: ''",
    "model: ../..",
    "model: '\\0'",
    "device: cuda:999999999999999999999",
    'store: "a\\0b"',
)
DOCUMENTS = (
    b"",
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\x1b[2J",
    "\u202e\u200b".encode(),
    b"\xed\xa0\x80",
    b"a" * 3000,
    b" \n\t" * 100,
    b"<s></s><pad>" * 5,
    b"\n" * 5000,
    "é".encode() * 400,
    b"\r\n\r",
    b"\xf4\x90\x80\x80",
    "\U0001f468\u200d\U0001f469".encode() * 40,
    b"[bold]x[/bold]",
    b"\x7fELF" + bytes(300),
    b"\x02documents\x03",
    b"{query}",
)


def as_yaml(tree: Any, draw: random.Random) -> tuple[bytes, str]:
    """A mapping or list as YAML: one of the hostile texts, merges of merges, a changed tree, or damaged text."""
    kind = draw.randrange(5)
    if kind == 0:
        new = draw.choice(YAML)
        return encode(new), f"yaml {new[:50]!r}"
    if kind == 4:
        levels, width, joins = (
            draw.randint(1, 40),
            draw.randint(1, 12),
            draw.choice(("<<: [{}]", "x: [{}]", "? [{}]\n: y")),
        )
        return encode(merges(tree, levels, width, joins)), f"{levels} levels of {width} times {joins!r}"
    if kind == 1:
        new, what = mutate_text(yaml.safe_dump(tree), draw)
        return encode(new), what
    held = json.loads(json.dumps(tree))
    if kind == 2:
        name = draw.choice(sorted(held)) if isinstance(held, dict) else 0
        held[name] = value(draw)
        what = f"{name} = {str(held[name])[:40]!r}"
    else:
        what = mutate_tree(held, draw)
    return encode(dumps(held)), what


def merges(tree: Any, levels: int, width: int, joins: str) -> str:
    """A tree beside mappings each of which names the one before it `width` times, in a merge key, a list or a key."""
    lines = ["l0: &l0 {a: 1, b: 2}"]
    for level in range(1, levels + 1):
        named = joins.format(", ".join([f"*l{level - 1}"] * width)).replace("\n", "\n  ")
        lines.append(f"l{level}: &l{level}\n  {named}\n  own{level}: {level}")
    own = yaml.safe_dump(tree) if isinstance(tree, dict) else f"tree: {json.dumps(tree)}\n"
    return own + "\n".join(lines) + "\n"


def as_records(records: list[Any], draw: random.Random) -> tuple[bytes, str]:
    held = json.loads(json.dumps(records))
    what = mutate_tree(held, draw) if draw.random() < 0.8 else ""
    if not what:
        held[0] = value(draw)
        what = f"a record is {str(held[0])[:30]!r}"
    lines = [dumps(record, ensure_ascii=draw.random() < 0.7) for record in held]
    data = "[" + ",".join(lines) + "]" if draw.random() < 0.2 else "\n".join(lines) + "\n"
    return encode(data), what


class Scripts(Surface):
    """One hostile file among honest ones, and the command that reads it."""

    name, weight = "scripts", 12

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        with inside(scene.root / "evaluated"):
            scene.write_texts()
            write("q.jsonl", "".join(json.dumps(record) + "\n" for record in RECORDS))
            done = pic(*self._eval())
            assert done.code == 0, done.err
            self.results = Path("r.jsonl").read_bytes()

    def make(self, draw: random.Random) -> Case:
        self.scene.write_texts()
        self.scene.write_store("none")
        write("q.jsonl", "".join(json.dumps(record) + "\n" for record in RECORDS))
        makers: tuple[Callable[[random.Random], tuple[str, tuple[object, ...]]], ...] = (
            self._settings,
            self._settings,
            self._document,
            self._dataset,
            self._results,
            self._query,
            self._bulk,
        )
        what, arguments = draw.choice(makers)(draw)
        name = what.split(":")[0]
        if draw.random() < 0.03:
            what = f"{name}: {put_something_else(Path(name), draw, Path.cwd())}"
        return Case(what, (Step(arguments, (), check_json(arguments)),), {}, ("st",))

    def _settings(self, draw: random.Random) -> tuple[str, tuple[object, ...]]:
        tree = {name: held for name, held in SETTINGS.items() if draw.random() < 0.4}
        data, what = as_yaml(tree or {"store": "st"}, draw)
        write("pic.yaml", data)
        commands = (
            ("store", "ls"), ("store", "ls", "--stats", "--json"), ("compile", "a.txt", "-m", self.scene.model),
            ("link", "a.txt", "-q", QUERY, "-m", self.scene.model, "--max-new-tokens", 2), ("store", "push", "all"),
        )  # fmt: skip
        return f"pic.yaml: {what}", draw.choice(commands)

    def _document(self, draw: random.Random) -> tuple[str, tuple[object, ...]]:
        data, what = (
            (draw.choice(DOCUMENTS), "") if draw.random() < 0.6 else mutate_bytes(Path("a.txt").read_bytes(), draw)
        )
        write("a.txt", data)
        more: tuple[object, ...] = draw.choice(((), ("--chunk-tokens", 7), ("--after", "mean")))
        command: tuple[object, ...] = draw.choice(
            (("compile", "a.txt"), ("link", "a.txt", "b.txt", "-q", QUERY, "--max-new-tokens", 2))
        )
        return f"a.txt: {what or repr(data[:20])}", (*command, *more, "-m", self.scene.model, "--store", "st")

    def _dataset(self, draw: random.Random) -> tuple[str, tuple[object, ...]]:
        data, what = (
            mutate_bytes(Path("q.jsonl").read_bytes(), draw) if draw.random() < 0.1 else as_records(RECORDS, draw)
        )
        write("q.jsonl", data)
        return f"q.jsonl: {what}", (*self._eval(), *(("--json",) if draw.random() < 0.3 else ()))

    def _results(self, draw: random.Random) -> tuple[str, tuple[object, ...]]:
        """Results of an evaluation that is continued."""
        if draw.random() < 0.2:
            data, what = mutate_bytes(self.results, draw)
        else:
            lines = [json.loads(line) for line in self.results.splitlines()]
            what = mutate_tree(lines, draw)
            data = encode("\n".join(map(dumps, lines)) + "\n")
        write("r.jsonl", data)
        return f"r.jsonl: {what}", (*self._eval(), *(("--json",) if draw.random() < 0.3 else ()))

    def _query(self, draw: random.Random) -> tuple[str, tuple[object, ...]]:
        data, what = as_yaml(draw.choice(QUERIES), draw)
        write("q.yaml", data)
        more = draw.choice((("--explain",), ("--tree", 2), ("--json",), ()))
        return f"q.yaml: {what}", ("query", "q.yaml", "-m", self.scene.model, "--store", "st", *more)

    def _bulk(self, draw: random.Random) -> tuple[str, tuple[object, ...]]:
        """Lines of a bulk, and answers that it continues."""
        write("b.jsonl", encode("".join(dumps(query) + "\n" for query in QUERIES)))
        write("o.jsonl", encode("".join(dumps(answer) + "\n" for answer in ANSWERS)))
        name, records = draw.choice((("b.jsonl", QUERIES), ("o.jsonl", ANSWERS)))
        data, what = as_records(records, draw) if draw.random() < 0.7 else mutate_bytes(Path(name).read_bytes(), draw)
        write(name, data)
        more = draw.choice((("--json",), ("-o", "o.jsonl"), ("-o", "o.jsonl")))
        return f"{name}: {what}", ("query", "b.jsonl", "-m", self.scene.model, "--store", "st", *more)

    def _eval(self) -> tuple[object, ...]:
        return (
            "eval",
            "q.jsonl",
            "-m",
            self.scene.model,
            "--algo",
            "naive",
            "--max-new-tokens",
            2,
            "-o",
            "r.jsonl",
            "--store",
            "st",
        )
