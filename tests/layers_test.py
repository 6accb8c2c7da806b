"""The layers of docs/design.md §5, read from the imports: arrows go down only. And what must stay light stays light."""

from __future__ import annotations

import ast
import graphlib
import json
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from traces import make_trace

from pictool.core import Geometry, Target
from pictool.store.objects.format import CompiledChunk, ObjectMeta
from pictool.store.store import Store
from pictool.trace.format import write_trace

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pictool"
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))

# Who stands on whom, lowest first. A part imports from the parts below it, and itself; `core` from `errors` and
# `reading`, `commands` from `tui`, and nothing else from beside it. `pictool/__init__.py` re-exports, and is exempt.
RANKS = {
    "bounded_process": 0, "core": 0, "errors": 0, "escapes": 0, "lru": 0, "needs": 0, "plugins": 0, "reading": 0,
    "routing": 0, "urls": 0, "strict_yaml": 0,
    "store": 1, "runtime": 1,
    "compiler": 2, "recognition": 2,
    "documents": 3, "linker": 3,
    "controller": 4, "trace": 4,
    "estimate": 5,
    "engines": 5,
    "fidelity": 6,
    "api": 7, "conversation": 7, "eval": 7, "spans": 7,
    "bench": 8,  # goodput needs datasets and metrics
    "serve": 8,
    "tuning": 8,  # chooses by what eval measures
    "cluster": 9,
    "doctor": 9,  # measures as bench does
    "commands": 10, "tui": 10,
    "__main__": 11,
}  # fmt: skip
VLLM = "engines.vllm"  # the only package that imports vllm
LLAMACPP = "engines.llamacpp"  # the only package that imports llama_cpp
RAY = {"ray", "pyarrow"}  # of `cluster` alone
FILES = {"charset_normalizer", "kreuzberg", "pathspec", "pypdf", "selectolax"}  # of `documents` alone
HTTP = {"fastapi", "starlette", "uvicorn"}  # of `serve` alone
BESIDE = {
    ("core", "errors"),
    ("core", "reading"),
    ("needs", "errors"),
    ("plugins", "errors"),
    ("commands", "tui"),
    ("api", "conversation"),
}
HEAVY = {"torch", "transformers", "tokenizers", "vllm", "llama_cpp"}
LIGHT = ("core", "errors", "escapes", "estimate", "recognition", "store")


def imports(source: str) -> Iterator[str]:
    """Every module that a source names in an import, wherever it stands; `from a import b` is a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{name.name}" for name in node.names)


def part_of(module: str) -> str:
    """`pictool/store/objects/format.py` and `pictool.store.objects.format` belong to `store`."""
    return [*module.removesuffix(".py").replace("/", ".").split("."), ""][1]


def importer_of(path: str) -> str:
    """The part that a file belongs to, or the package in it that alone may import vllm, or llama_cpp."""
    apart = [part for part in (VLLM, LLAMACPP) if path.startswith(f"pictool/{part.replace('.', '/')}/")]
    return apart[0] if apart else part_of(path)


def is_allowed(importer: str, module: str) -> bool:
    """Whether a part, or the package that knows vllm, may import `module`. Public names stand above all."""
    top, part = module.split(".")[0], part_of(module)
    if top == "vllm":
        return importer == VLLM
    if top == "llama_cpp":
        return importer == LLAMACPP
    importer = importer.split(".")[0]
    if top in RAY:
        return importer == "cluster"
    if top in FILES:
        return importer == "documents"
    if top in HTTP:
        return importer == "serve"
    if top != "pictool":
        return top != "" and not (importer in LIGHT and top in HEAVY)  # "": a relative import, which nothing here uses
    if part == importer or (importer, part) in BESIDE:
        return True
    if part not in RANKS:
        return importer == "commands" and part == "__version__"
    return RANKS[part] < RANKS[importer]


@pytest.mark.parametrize("module", [module for module in MODULES if module != "pictool/__init__.py"])
def test_arrows_go_down_only(module: str) -> None:
    importer = importer_of(module)
    assert importer.split(".")[0] in RANKS, f"{module}: say in RANKS where this part stands"
    wrong = [name for name in imports((ROOT / module).read_text(encoding="utf-8")) if not is_allowed(importer, name)]
    assert not wrong, f"{module} may not import {', '.join(wrong)}"


@pytest.mark.parametrize(
    ("importer", "source", "allowed"),
    [
        ("store", "from pictool.core import Target", True),
        ("store", "from pictool.runtime import rope", False),
        ("store", "from pictool import runtime", False),
        ("store", "def f():\n    import torch.nn", False),
        ("store", "if TYPE_CHECKING:\n    from transformers import X", False),
        ("runtime", "import torch", True),
        ("runtime", "import pictool.store.objects.format", False),
        ("core", "from pictool.errors import PicError", True),
        ("errors", "import pictool.core", False),
        ("core", "import torch", False),
        ("linker", "from pictool.engines.torch import answer", False),
        ("linker", "import vllm", False),
        ("engines", "from vllm.v1 import x", False),
        ("serve", "from fastapi import Request", True),
        ("commands", "import uvicorn", False),
        ("documents", "import pypdf", True),
        ("linker", "from pictool.documents.reading import FileReader", False),
        ("spans", "from kreuzberg import extract_bytes_sync", False),
        ("cluster", "import ray", True),
        ("cluster", "from pictool.serve.work import Work", True),
        ("serve", "import ray.serve", False),
        ("commands", "import pyarrow as pa", False),
        ("serve", "from pictool.spans.execute import Executor", True),
        ("spans", "from pictool.serve.work import Work", False),
        ("engines.vllm", "from vllm.v1 import x", True),
        ("engines.vllm", "from pictool.linker.link import link", True),
        ("engines.vllm", "import llama_cpp", False),
        ("engines.llamacpp", "from llama_cpp import llama_cpp", True),
        ("engines.llamacpp", "from pictool.commands.app import app", False),
        ("commands", "import llama_cpp", False),
        ("engines.vllm", "from pictool.eval.datasets.base import Case", False),
        ("engines", "from pictool.commands.app import app", False),
        ("commands", "from pictool.engines.torch import answer", True),
        ("linker", "from .. import engines", False),
        ("store", "from .format import ObjectFile", False),
        ("engines", "from pictool import link", False),
        ("engines", "import pictool", False),
        ("commands", "from pictool import __version__", True),
    ],
)
def test_the_rule_itself(importer: str, source: str, allowed: bool) -> None:
    assert all(is_allowed(importer, name) for name in imports(source)) == allowed


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_by(source: str, names: set[str]) -> set[str]:
    """The package's modules that a source imports, within functions and for types, too."""
    return {name if name in names else name.rpartition(".")[0] for name in imports(source)} & names


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pictool.core", {"pictool.core"}),
        ("def f():\n    from pictool.core import Text", {"pictool.core"}),
        ("from pictool import core, other", {"pictool.core"}),
        (
            "if TYPE_CHECKING:\n    from pictool.core import Text\nelse:\n    import pictool.urls",
            {"pictool.core", "pictool.urls"},
        ),
    ],
)
def test_imports_within_functions_and_for_types_count(source: str, found: set[str]) -> None:
    assert imported_by(source, {"pictool.core", "pictool.urls"}) == found


def test_no_modules_import_each_other() -> None:
    names = {module_name(path) for path in MODULES} - {"pictool"}
    sources = {module_name(path): (ROOT / path).read_text(encoding="utf-8") for path in MODULES}
    graph = {name: imported_by(sources[name], names) - {name} for name in names}
    assert "pictool.store.store" in graph["pictool.linker.link"]
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_no_folder_has_more_than_twenty_files() -> None:
    folders = Counter(path.rpartition("/")[0] for path in MODULES)
    assert {folder: count for folder, count in folders.items() if count > 20} == {}


@pytest.mark.parametrize("module", [module for module in MODULES if part_of(module) == "linker"])
def test_a_function_of_the_linker_takes_at_most_five_arguments(module: str) -> None:
    for node in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            assert len(names) - (names[:1] in (["self"], ["cls"])) <= 5, f"{module}: {node.name}"


# The weight of each package, as docs/design.md §5 has it

_WEIGHT = re.compile(r"^\| `([\w.]+)/?` \| ([\d,]+) \|$", re.MULTILINE)


def statements(source: str) -> int:
    """Statements without docstrings: denser lines do not lower it."""
    return sum(
        isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(ast.parse(source))
    )


def test_statements_are_counted_not_lines() -> None:
    assert statements('"""A module."""\ndef f():\n    """It."""\n    a = 1; return a\n') == 3


def test_no_package_is_heavier_than_the_design_says() -> None:
    """A package that needs more says so in the table and in the changelog; one that is lighter gives back its room."""
    counts: Counter[str] = Counter()
    for path in MODULES:
        is_module = path.count("/") == 1
        counts["pictool" if is_module else part_of(path)] += statements((ROOT / path).read_text(encoding="utf-8"))
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    bounds = {name: int(number.replace(",", "")) for name, number in _WEIGHT.findall(design)}
    assert counts.keys() == bounds.keys()
    assert {name: count for name, count in counts.items() if not bounds[name] - 25 <= count <= bounds[name]} == {}


# What answers without a model must not wait for one


# Public class names that two modules share, and why that confuses nobody.
SHARED_NAMES = {
    "CacheBlend": "the policy and the dataset of one paper",
    "Message": "a message of a chat, and its node in a query",
}


def public_classes(source: str) -> list[str]:
    """The public classes that a module defines at its top level."""
    return [
        node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def test_public_classes_are_those_at_the_top() -> None:
    assert public_classes("class A:\n    class B: ...\nclass _C: ...\ndef f():\n    class D: ...\n") == ["A"]


def test_a_public_class_name_means_one_thing() -> None:
    sources = [(ROOT / path).read_text(encoding="utf-8") for path in MODULES]
    modules_of = Counter(name for source in sources for name in set(public_classes(source)))
    assert {name for name, count in modules_of.items() if count > 1} == set(SHARED_NAMES)
    assert all(modules_of[name] == 2 for name in SHARED_NAMES)


def loaded_by(source: str, *arguments: str, code: int = 0) -> set[str]:
    """The modules that a fresh interpreter has loaded after `source`, which ends with this exit code."""
    script = f"import json, sys\ntry:\n    {source}\nfinally:\n    print(json.dumps([*sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def path(store: Store) -> Path:
    target = Target("LlamaForCausalLM", "a" * 64, "b" * 64, "float32", Geometry(1, 1, 1))
    tokens = np.asarray([7], dtype=np.int32)
    meta = ObjectMeta(target.key(tokens, "none"), target, 1, "none")
    return store.put(CompiledChunk(meta, "text", tokens, [(bytes(4), bytes(4))]))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    write_trace(tmp_path / "link.trace", make_trace())
    return tmp_path / "link.trace"


COMMANDS = [
    ["--help"], ["store", "ls"], ["store", "verify"], ["inspect", "OBJECT"], ["inspect", "KEY", "--json"],
    ["inspect", "OBJECT", "--text"], ["inspect", "TRACE"],
    ["inspect", "TRACE", "TRACE", "--diff"], ["estimate", "LOG"], ["estimate", "LOG", "--json"],
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_that_need_no_model_load_no_torch(path: Path, trace: Path, store: Store, command: list[str]) -> None:
    log = path.with_name("log.jsonl")
    log.write_text('{"prompt": "a prompt"}\n')
    names = {"TRACE": str(trace), "OBJECT": str(path), "KEY": path.stem[:12], "LOG": str(log)}
    options = [] if command[0] in ("--help", "estimate") else ["--store", str(store.root)]
    arguments = [names.get(argument, argument) for argument in command] + options
    loaded = loaded_by("from pictool.commands import main; main()", *arguments)
    assert "pictool.commands.app" in loaded and not loaded & HEAVY


REFUSED = [
    ["link", "a.txt"], ["link", "a.txt", "-q", "x", "--algo", "foo"], ["bench", "--shape", "nope"],
    ["bench", "--algo", "foo"], ["compile", "a.txt", "--codec", "zz"],
]  # fmt: skip


@pytest.mark.parametrize("command", REFUSED, ids=" ".join)
def test_a_wrong_command_line_is_told_before_torch_is_loaded(command: list[str]) -> None:
    Path("a.txt").write_text("words")
    loaded = loaded_by("from pictool.commands import main; main()", *command, code=2)
    assert "pictool.commands.app" in loaded and not loaded & HEAVY


def test_a_link_imports_nothing_that_reads_folders_of_files() -> None:
    Path("a.txt").write_text("words")
    loaded = loaded_by("from pictool.commands import main; main()", "link", "a.txt", "-q", "Who?")
    assert "pictool.linker.link" in loaded and "torch" in loaded
    libraries = FILES - {"charset_normalizer"}  # of requests, too
    assert not [name for name in loaded if name.startswith("pictool.documents") or name.partition(".")[0] in libraries]


LIGHT_MODULES = [
    "pictool.commands.app", "pictool.store.store", "pictool.store.objects.bundles", "pictool",
    "pictool.serve.app",  # the router knows no engine
    "pictool.trace.analysis", "pictool.trace.attention_sinks",  # what they find is read by the TUI
]  # fmt: skip


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_imports_that_load_no_torch(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert module in loaded and not loaded & HEAVY


def test_what_python_is_going_to_take_away_is_an_error_in_our_code_alone() -> None:
    source = "import warnings; warnings.warn('going', DeprecationWarning)"
    with pytest.raises(DeprecationWarning):
        exec(source, {"__name__": "pictool.store.made_up"})
    with warnings.catch_warnings(record=True) as told:
        exec(source, {"__name__": "another_package"})
    assert len(told) == 1
