"""What `pic` is made to do while the file system fails: every command that reads or writes a store or an output.

All happens below one directory, `world`, which `make_world` fills: two stores, a remote, a damaged store, an archive,
objects, traces, questions. Each run has a copy of it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import tiny
from old_stores import write_old
from transformers import LlamaConfig

from faults.program import Command, run

TEXTS = {
    "a.txt": "The harbour was quiet. It holds a festival in the spring; nobody knows why.\n",
    "b.txt": "Numbers such as 1,024 or 3.14 stand here too, and words.\n",
    "c.txt": 'Nobody knows the harbour, and emoji stand in the spring. "Really?" she asked.\n',
}
QUESTIONS = [
    {"documents": ["a.txt", "b.txt"], "query": "Who knows why?", "answers": ["nobody"], "id": "one"},
    {"documents": ["b.txt"], "query": "Who asked?", "answers": ["she"], "id": "two"},
]
_INNER = {"g": {"model": "default", "max_tokens": 3, "temperature": 0, "input": [{"file": "b.txt"}, {"user": "Why?"}]}}
QUERY = {
    "g": {"model": "default", "max_tokens": 3, "temperature": 0,
          "input": [{"plus": [{"file": "c.txt"}, _INNER]}, {"user": "Who knows?"}]}
}  # fmt: skip
LINK = ("-q", "Who knows why?", "--max-new-tokens", "4")
BENCH = {
    "sync": ("--chunks", "2", "--chunk-tokens", "20", "--tail-tokens", "6", "--new-tokens", "2", "--repeats", "1"),
}


@dataclass(frozen=True)
class Operation:
    """A command whose runs are made to fail.

    Fields:
        command: what runs, with {a}, {b}, {c} for the keys of the texts' objects.
        environment: beside that of all runs.
        measures: its output has times, so that no two are equal.
        is_slow: a run takes long, so fewer are made.
        removes: it takes objects out, so that a second run finds none.
        reports: it may say what it could not read, and end well.
        resumes: run again, it asks only for what is not answered, so it makes no object that it did without.
        instead: options with which it makes what it makes otherwise if one of its own objects cannot be read.
    """

    name: str
    command: str
    environment: dict[str, str] = field(default_factory=dict)
    measures: bool = False
    is_slow: bool = False
    removes: bool = False
    reports: bool = False
    resumes: bool = False
    instead: str = ""


OPERATIONS = [
    Operation("compile", "compile c.txt"),
    Operation("compile-first", "compile a.txt b.txt --store new"),
    Operation("compile-cached", "compile a.txt b.txt"),
    Operation("compile-force", "compile a.txt --force"),
    Operation("compile-output", "compile c.txt -o out/c.kvo"),
    Operation("compile-list", "compile a.txt -o out/parts.kvo --chunk-tokens 15"),
    Operation("compile-coded", "compile c.txt --codec int8"),
    Operation("compile-budget", "compile c.txt", {"PIC_MAX_SIZE": "40K"}, removes=True),
    Operation("compile-remote", "compile c.txt --remote far"),
    Operation("compile-model", "compile c.txt -m model", is_slow=True),
    Operation("link-naive", "link a.txt b.txt --algo naive"),
    Operation("link-missing", "link a.txt c.txt --algo legolink-2"),
    Operation("link-blend", "link a.txt b.txt --algo cacheblend-30"),
    Operation("link-prophet", "link a.txt c.txt --algo prophet-20"),
    Operation("link-keys", "link {a} {b} --algo naive"),
    Operation("link-files", "link a.kvo b.txt --algo naive"),
    Operation("link-remote", "link a.txt c.txt --algo naive --remote far --store new"),
    Operation("link-damaged", "link a.txt b.txt --algo naive --store damaged"),
    Operation("link-compare", "link a.txt b.txt --algo naive --compare", measures=True),
    Operation("link-outputs", "link a.txt b.txt --algo naive --trace out/t.trace -o out/r.json"),
    Operation("prefix-first", "link a.txt b.txt --algo prefix --store new"),
    Operation("prefix-longer", "link a.txt b.txt c.txt --algo prefix --store chained"),
    Operation("prefix-stored", "link a.txt b.txt --algo prefix --store chained"),
    Operation("converse", "converse st model --turns 3"),
    Operation("converse-kept", "converse chained model --turns 3"),
    Operation("inspect-object", "inspect {a} a.kvo --text"),
    Operation("inspect-trace", "inspect naive.trace"),
    Operation("inspect-against", "inspect naive.trace --against full"),
    Operation("diff", "inspect naive.trace lego.trace --diff"),
    Operation("eval", "eval q.jsonl --algo naive -o out/r.jsonl", measures=True, is_slow=True),
    Operation("query", "query q.yaml", measures=True, instead="--outputs compiled"),
    Operation(
        "query-bulk", "query bulk.jsonl -o out/answers.jsonl", measures=True, resumes=True, instead="--outputs compiled"
    ),
    Operation("plan", "plan a.txt b.txt", measures=True, is_slow=True),
    Operation("bench", "bench --shape tiny --algo naive", measures=True, is_slow=True),
    Operation("ls", "store ls --chains --store chained", reports=True),
    Operation("ls-0.3", "store ls --store old", reports=True),
    Operation("stats", "store ls --stats", reports=True, measures=True),
    Operation("verify", "store verify", reports=True),
    Operation("repair", "store verify --repair --store damaged", measures=True),
    Operation("gc", "store gc"),
    Operation("gc-size", "store gc --max-size 20K", removes=True),
    Operation("expire", "store gc {a}", removes=True),
    Operation("pin", "store pin {a} {b}"),
    Operation("unpin", "store pin --undo {b}"),
    Operation("export", "store push all -o out/all.kva --force"),
    Operation("import", "store pull all.kva --store new"),
    Operation("import-damaged", "store pull all.kva --store damaged"),
    Operation("push", "store push all --remote new"),
    Operation("push-again", "store push all --remote far"),
    Operation("pull", "store pull {a} {b} {c} --remote far --store new"),
]  # fmt: skip


def make_world(directory: Path, model: Path, output: Path) -> dict[str, str]:
    """Fill `directory`, with runs of `pic`; the keys of the three texts by their names (a, b, c)."""
    directory.mkdir()
    for name, text in TEXTS.items():
        (directory / name).write_text(text)
    (directory / "q.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (directory / "q.yaml").write_text(json.dumps(QUERY))
    (directory / "bulk.jsonl").write_text(f"{json.dumps(QUERY)}\n{json.dumps(_INNER)}\n")
    (directory / "out").mkdir()
    shutil.copytree(model, directory / "model")

    def pic(line: str) -> str:
        ended = run(_command(line, {}, directory, model), directory, output)
        assert ended.code == 0, f"pic {line}: {ended.err}"
        return ended.out

    pic("compile a.txt b.txt")
    listed = json.loads(pic("compile a.txt b.txt c.txt --store far --json"))["objects"]
    keys = {Path(row["source"]).stem: row["key"] for row in listed}
    for store in ("far", "chained"):
        pic(f"link a.txt b.txt --algo naive --store {store}")
    pic("link a.txt b.txt --algo prefix --store chained")
    pic("converse chained model")
    pic("compile a.txt -o a.kvo")
    for name in ("naive", "lego"):
        pic(f"link a.txt b.txt --trace {name}.trace --algo " + {"naive": "naive", "lego": "legolink-2"}[name])
    pic(f"store pin {keys['b']}")
    pic("store push all -o all.kva --store far")
    pic("store ls")
    pic("plan a.txt b.txt")
    shutil.copytree(directory / "far", directory / "damaged")
    _damage(directory / "damaged" / "objects", keys)
    shutil.copytree(directory / "far", directory / "old", ignore=shutil.ignore_patterns("store.sqlite3*"))
    write_old(directory / "old")
    return keys


def _damage(objects: Path, keys: dict[str, str]) -> None:
    """One object has a flipped bit, one is cut off, and one has a copy under another's name."""
    a, b, c = (objects / keys[name][:2] / f"{keys[name]}.kvo" for name in "abc")
    data = bytearray(a.read_bytes())
    data[-300] ^= 1
    a.write_bytes(data)
    b.write_bytes(b.read_bytes()[:-100])
    other = objects / "00" / f"{'0' * 64}.kvo"
    other.parent.mkdir(exist_ok=True)
    shutil.copyfile(c, other)


def command_of(operation: Operation, directory: Path, model: Path, keys: dict[str, str]) -> Command:
    """What an operation runs in a world."""
    return _command(operation.command.format(**keys), operation.environment, directory, model)


def _command(line: str, environment: dict[str, str], directory: Path, model: Path) -> Command:
    arguments = tuple(line.split())
    more = {"link": LINK, "bench": BENCH.get(arguments[1], ()), "eval": ("--max-new-tokens", "2")}.get(arguments[0], ())
    surroundings = {"PIC_MODEL": str(model), "PIC_DEVICE": "cpu", "PIC_STORE": "st", "PIC_SALT": "", "PIC_REMOTE": ""}
    surroundings |= {"XDG_CACHE_HOME": str(directory / "cache"), **environment}
    return Command((*arguments, *more), tuple(surroundings.items()))


def make_model(directory: Path) -> Path:
    """A tiny Llama."""
    return tiny.save_model(directory, LlamaConfig(**tiny.SIZE))
