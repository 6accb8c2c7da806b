"""Command lines that are refused: every command says so before it imports torch, transformers or fastapi."""

from __future__ import annotations

import json
import subprocess
import sys

from commands.help_test import every_command
from commands.run import write

# What is wrong with each is known from the command line, the settings and the files that it names.
REFUSED = """
compile none.txt
compile a.txt --engine none
compile a.txt --codec none1
compile a.txt -m ./none
compile a.txt -m embeded
compile a.txt --probes 8
compile a.txt -o a.txt
link none.txt -q x
link a.txt
link abc0 -q x
link a.txt -q x --algo none
link a.txt -q x --algo legolink:none=1
link a.txt -q x --codec none1
link a.txt -q x --engine none
link a.txt -q x --engine vllm
link a.txt -q x -m ./none
link a.txt -q x --temperature -1
link --batch none.jsonl
query none.json
query a.txt
query q.json --algo none
query q.json --codec none1
query q.json --pool none
query q.json --outputs none
query q.json --engine vllm
query q.json -m ./none
query q.jsonl --plot a.svg
plan none.txt
plan abc0
plan a.txt --algo none
plan a.txt --read-gb-s none
plan a.txt -m ./none
inspect none
inspect a.txt
diff none none
diff a.txt a.txt
store ls --store none
store ls --sort none
inspect abcd --store none
store ls --stats --store none
store verify --store none
store sign none --signing-key=none
store trust none
store gc --max-size none
store gc abcd --store none
store pin abcd --store none
store pin --undo abcd --store none
store push all -o a.kva --store none
store push all --store none
store pull none
ask
ask none -q why
ask a.txt -q why --algo none
ask a.txt -q why -m ./none
mcp none
mcp a.txt -m ./none
estimate
estimate none
sync
sync none
sync a.txt --splitter none
eval none
eval world
eval q.jsonl --algo none
eval q.jsonl --metric none
eval q.jsonl --codec none1
eval q.jsonl -p none=1
eval q.jsonl -m ./none
tune
tune none.txt --questions q.jsonl
tune a.txt --questions none
tune a.txt --algo none
tune a.txt --questions q.jsonl --codec none1
tune a.txt --questions q.jsonl -m ./none
bench --shape none
bench --algo none
bench -m ./none
serve --algo none
serve --allow none
serve --check none
serve --codec none1
serve --pool none
serve --learn none
serve --keys none
serve --engine none
serve -m ./none
tui
config --none
doctor --algo none
doctor -m ./none
doctor -m embeded
doctor -o x
"""
PROGRAM = """
import json, sys

HEAVY = {"torch", "transformers", "fastapi.applications"}
imported = set()

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in HEAVY:
            imported.add(name)
            raise ImportError(name)

sys.meta_path.insert(0, Finder())
from pictool.commands.app import app

for line in json.load(sys.stdin):
    imported.clear()
    try:
        app(line.split())
    except SystemExit as ended:
        print(json.dumps([line, ended.code, sorted(imported)]))
    except BaseException as error:
        print(json.dumps([line, repr(error), sorted(imported)]))
"""


def test_a_command_line_that_is_refused_imports_nothing_heavy() -> None:
    write("a.txt", "Some text.")
    write("q.jsonl", '{"documents": ["a.txt"], "query": "x", "answers": ["y"]}')
    write("q.json", '{"g": {"model": "default", "input": {"user": "x"}}}')
    lines = REFUSED.split("\n")[1:-1]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(lines), capture_output=True, text=True, timeout=120
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line, *_ in outcomes] == lines, done.stderr
    assert [outcome for outcome in outcomes if outcome[1] not in (1, 2) or outcome[2]] == []


def test_every_command_is_among_them() -> None:
    named = {tuple(line.split()) for line in REFUSED.strip().splitlines()}
    assert [words for words in every_command() if not any(line[: len(words)] == tuple(words) for line in named)] == []
