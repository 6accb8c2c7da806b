"""Everything that a user can get wrong: one line that names the thing and the remedy, an exit code, nothing lost."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from commands.run import Objects, pic, write

Prepare = Callable[[pytest.MonkeyPatch], object]
LONG = "harbour " * 200  # 801 tokens; the model takes 512
LINK = ("link", "-q", "why?", "--max-new-tokens", 2)


@dataclass(frozen=True)
class Case:
    """One mistake: the command line, what its error line says, and what stands in the working directory."""

    name: str
    arguments: tuple[Any, ...]
    says: tuple[str, ...]
    prepare: Prepare = lambda _: None
    code: int = 1


def files(**contents: str | bytes) -> Prepare:
    """Files in the working directory; `a_txt` stands for `a.txt`."""
    return lambda _: [write(name.replace("_", "."), content) for name, content in contents.items()]


def fails_with(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def two_objects_of_one_prefix(_: pytest.MonkeyPatch) -> None:
    for rest in "ab":
        write(f".pic/objects/ab/abcd{rest * 60}.kvo", "")


COMPILE = [
    Case("missing", ("compile", "x.txt"), ("x.txt", "No such file")),
    Case("directory", (*LINK, "d"), ("d:", "d/*.txt"), files(**{"d/x_txt": "x"})),
    Case("empty", ("compile", "e.txt"), ("e.txt", "empty"), files(e_txt="")),
    Case("binary", ("compile", "e.txt"), ("e.txt", "iconv"), files(e_txt=b"\x7fELF\0\0")),
    Case("utf-16", ("compile", "e.txt"), ("e.txt", "UTF-16", "iconv"), files(e_txt="Straße".encode("utf-16"))),
    Case("latin-1", ("compile", "e.txt"), ("e.txt", "byte 4", "iconv"), files(e_txt="Straße".encode("latin-1"))),
    Case("only a byte order mark", ("compile", "e.txt"), ("e.txt", "white space"), files(e_txt="\ufeff")),
    Case(
        "too large", ("compile", "a.txt"), ("a.txt", "split it"),
        lambda patch: patch.setattr("pictool.compiler.chunking.MAX_FILE_BYTES", 8),
    ),
    Case("too long", ("compile", "l.txt"), ("l.txt", "801", "512", "--chunk-tokens"), files(l_txt=LONG)),
    Case("one of two is bad", ("compile", "a.txt", "x.txt"), ("x.txt",)),
    Case("-o of two files", ("compile", "a.txt", "b.txt", "-o", "o.kvo"), ("o.kvo", "2 were given"), code=2),
    Case("-o of another kind", ("compile", "a.txt", "-o", "a.obj"), ("a.obj", ".kvo"), code=2),
    Case("-o is a directory", ("compile", "a.txt", "-o", "d.kvo"), ("-o d.kvo",), files(**{"d.kvo/x_txt": ""})),
    Case("--trace is a directory", (*LINK, "--trace", "d"), ("--trace d",), files(**{"d/x_txt": ""})),
    Case(
        "disk full", ("compile", "b.txt"), (".kvo", "No space left"),
        lambda patch: patch.setattr(
            "pictool.store.store.write_object", fails_with(OSError(errno.ENOSPC, "No space left on device"))
        ),
    ),
    Case("store is a file", ("compile", "a.txt", "--store", "b.txt"), ("b.txt", "--store")),
    Case("store of ls is a file", ("store", "ls", "--store", "b.txt"), ("b.txt", "--store")),
    Case("device", ("compile", "a.txt", "--device", "tpu"), ("tpu", "cpu", "cuda"), code=2),
    Case("dtype", ("compile", "a.txt", "--dtype", "int8"), ("int8", "float32", "bfloat16"), code=2),
    Case(
        "no cuda", ("compile", "a.txt", "--device", "cuda"), ("cuda", "--device cpu"),
        lambda patch: patch.setattr("torch.cuda.is_available", lambda: False),
    ),
    Case("pic.yaml is a list", ("compile", "a.txt"), ("pic.yaml", "mapping"), files(pic_yaml="- model")),
    Case("pic.yaml has another key", ("compile", "a.txt"), ("pic.yaml", "modell"), files(pic_yaml="modell: x")),
    Case("pic.yaml has a list", ("compile", "a.txt"), ("pic.yaml", "store", "string"), files(pic_yaml="store: [x]")),
]  # fmt: skip

LINKING = [
    Case("missing document", (*LINK, "x.txt"), ("x.txt", "no such file")),
    Case("prompt too long", (*LINK, "l.txt"), ("523", "512", "fewer or shorter"), files(l_txt="harbour " * 125)),
    Case("unknown key", (*LINK, "abcd1234"), ("abcd1234", "pic store ls")),
    Case("short key", (*LINK, "abc"), ("abc", "4 hex digits")),
    Case("ambiguous key", ("inspect", "abcd"), ("abcd", "2 objects", "pic store ls"), two_objects_of_one_prefix),
    Case("damaged objects by key", (*LINK, "abcd"), ("abcd: no object", "pic store ls"), two_objects_of_one_prefix),
    Case("a text as object", (*LINK, "t.kvo"), ("t.kvo", "not an object"), files(t_kvo="The harbour was quiet.")),
    Case("empty object", (*LINK, "t.kvo"), ("t.kvo", "not an object"), files(t_kvo="")),
    Case("missing object", (*LINK, "t.kvo"), ("t.kvo", "no such file")),
    Case("unknown policy", (*LINK, "--algo", "nosuch"), ("nosuch", "full", "naive", "auto"), code=2),
    Case("unknown field", (*LINK, "--algo", "legolink:depth=3"), ("depth", "legolink", "k"), code=2),
    Case("field without value", (*LINK, "--algo", "legolink:k"), ("'k'", "FIELD=VALUE"), code=2),
    Case("field of another type", (*LINK, "--algo", "legolink:k=many"), ("legolink", "k=", "many", "int"), code=2),
    Case("policy without such a field", (*LINK, "--algo", "naive:k=3"), ("naive", "k", "no fields"), code=2),
    Case("negative k", (*LINK, "--algo", "legolink:k=-1"), ("k=-1",), code=2),
    Case("no query", ("link", "a.txt"), ("--query",), code=2),
    Case("empty query", ("link", "-q", " "), ("query is empty",)),
    Case("query of half a character", ("link", "-q", "\udcff"), ("query", "UTF-8")),
    Case("head of half a character", (*LINK, "--head", "\ud800"), ("head", "UTF-8"), code=2),
    Case("template without a place", (*LINK, "--query-template", "Why?"), ("Why?", "{query}")),
    Case("negative temperature", (*LINK, "--temperature", -1), ("temperature -1", "0 (greedy)"), code=2),
    Case("top-p 0", (*LINK, "--top-p", 0), ("top-p 0", "above 0"), code=2),
    Case("empty stop", (*LINK, "--stop", ""), ("stop string is empty",), code=2),
    Case("-o over a document", (*LINK, "a.txt", "-o", "a.txt"), ("-o a.txt", "input")),
    Case("--trace over a document", (*LINK, "a.txt", "--trace", "./a.txt"), ("--trace ./a.txt", "input")),
    Case("--trace over -o", (*LINK, "--trace", "t.json", "-o", "t.json"), ("t.json",), code=2),
    Case("-o below a file", (*LINK, "-o", "a.txt/o.json"), ("a.txt/o.json", "not a directory")),
]  # fmt: skip


def stored(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.rglob("*.kvo") if path.is_file()}


def litter() -> list[Path]:
    return [*Path.cwd().rglob("*.tmp"), *Path(".pic").glob("tmp/*")]


@pytest.mark.parametrize("case", [*COMPILE, *LINKING], ids=lambda case: case.name)
def test_a_mistake_is_one_line_and_an_exit_code(
    case: Case, model: Path, objects: Objects, texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(objects.store, ".pic")
    before = stored(Path(".pic")), [text.read_bytes() for text in texts]
    case.prepare(monkeypatch)
    needs_model = case.arguments[0] in ("compile", "link")
    outcome = pic(*case.arguments, *(("-m", model) if needs_model else ()))
    assert outcome.code == case.code, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("pic: error: ") and outcome.err.count("\n") == 1, outcome.err
    assert [part for part in case.says if part not in outcome.err] == [], outcome.err
    after = stored(Path(".pic"))
    assert {name: after.get(name) for name in before[0]} == before[0]
    assert [text.read_bytes() for text in texts] == before[1]
    assert litter() == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("compile",), ("nosuch",), ("inspect",), ("link", "-q"), ("link", "--nosuch"), ("store", "nosuch"),
        ("compile", "a.txt", "--chunk-tokens", 0), ("compile", "a.txt", "--after", "what"), ("link", "--top-p", "many"),
        ("link", "--max-new-tokens", 0), ("link", "--seed", -1), ("link", "--seed", 1 << 64),
    ],
    ids=lambda arguments: " ".join(map(str, arguments)),
)  # fmt: skip
def test_a_wrong_command_line_is_usage(arguments: tuple[Any, ...]) -> None:
    outcome = pic(*arguments)
    assert outcome.code == 2 and outcome.out == ""
    assert "rror: " in outcome.err and "Traceback" not in outcome.err


def test_an_interruption_is_130(model: Path, texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pictool.compiler.compile.object_key", fails_with(KeyboardInterrupt()))
    outcome = pic("compile", *texts, "-m", model)
    assert (outcome.code, outcome.err) == (130, "pic: interrupted\n")
    assert litter() == []


def test_an_error_of_the_system_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pictool.store.store.Store.objects", fails_with(PermissionError(13, "Permission denied", ".pic"))
    )
    Path(".pic").mkdir()
    outcome = pic("store", "ls")
    assert (outcome.code, outcome.err) == (1, "pic: error: .pic: Permission denied\n")


def test_a_query_without_documents_works(model: Path) -> None:
    report = pic("link", "-q", "why?", "--max-new-tokens", 2, "-m", model, "--json").json
    assert report["tokens"]["context"] == report["tokens"]["head"] == 1


def test_an_empty_pic_yaml_says_nothing(model: Path, texts: tuple[Path, Path]) -> None:
    write("pic.yaml", "# later\n")
    assert pic("compile", *texts, "-m", model).code == 0
