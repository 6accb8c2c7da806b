"""Stores that pictool 0.1.0 to 0.3.0 wrote (by their own command lines, with embedded-small), and what stays valid.

0.3.0: compile a.txt --codec int8 --probes 2; and in another store, of the settings in its pic.yaml but `server`:
    compile a.txt; store key new; store trust me KEY; store sign all; compile b.txt --signing-key;
    link a.txt b.txt -q "Which festival does Gadwick hold?" --trace t.trace; store export all.kva; store sign all.kva;
    eval q.jsonl --algo legolink-16 -o results.jsonl
0.2.0: compile a.txt; compile b.txt --codec int8 --sinks 2; compile b.txt --salt …; the same with --dtype bfloat16;
    link a.txt --algo prefix
0.1.0: compile b.txt --sinks 2; compile b.txt --salt …; its object of a.txt is that of 0.2.0, byte for byte
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from commands.run import pic

from pictool import Model, Store, load_model
from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import compile_chunks, object_key
from pictool.compiler.recompute import recompute
from pictool.core import CompileOptions
from pictool.store.directory import MARK

OLD = Path(__file__).parent / "written_by_0.2.0"
PLAIN = "c6ea8c72be1ebcb7a06dddd57d11f6efa78c9f82e3885dc9dd4650cf102799ab"
INT8 = "c920f0ae5dd7995c593203d3c991e980a996de3b7dca017ca3c4de53e3661abf"
SALTED = "d6791c27f490f313aa127d7e617af74c62e857a9a06792492b105eeafa09264c"
HALF = "ee94b911e2879d4ed1892c48b06156f03acf4d40566b3778a85a0b5e0d58cd14"
SINKS_OF_0_1, SALTED_OF_0_1 = (
    "3c8529aa6b798f714d2a6f705e9864b05583eccbfe481b972cc60f006afe468c",
    "161fa0d66db24bc393422382c5aad6c2a15d1fb59a1edb2475bdbb526d783b34",
)
WITH_TABLE = "6d11d15b4b6c6de113606bc79cfd0f7185dad726b21f0e8fac2dbefa00674b88"
SALT = "a-tenants-secret-0123456789"
HERE = ("-m", "embedded-small", "--store", "st")


@pytest.fixture(autouse=True)
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(OLD, "st", ignore=shutil.ignore_patterns("*.txt"))
    for name in ("a.txt", "b.txt"):
        shutil.copy(OLD / name, name)
    return Store("st")


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("embedded-small", "cpu", "float32")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (("a.txt",), PLAIN),
        (("b.txt", "--salt", SALT), SALTED),
    ],
)
def test_what_0_2_0_compiled_is_found(options: tuple[object, ...], key: str) -> None:
    done = pic("compile", *options, *HERE, "--after", "none", "--json").json
    assert [(row["key"], row["new"]) for row in done["objects"]] == [(key, False)]


def test_an_object_with_sinks_is_that_of_a_context_of_them(model: Model, old: Store) -> None:
    assert model.bos_id is not None
    options = CompileOptions("int8", after=((model.bos_id,) * 2,))
    (done,) = compile_chunks(model, old, [make_chunk(model, Path("b.txt").read_text(), "b.txt")], options)
    assert (done.key, done.is_new) == (INT8, False)


def test_half_precision_of_0_2_0_is_compiled_again_and_said_to_be_so(old: Store) -> None:
    """Its RoPE frequencies were rounded: such KV is never linked."""
    found = pic("store", "verify", "--store", "st")
    assert found.code == 1 and "1 of 5 objects are damaged" in found.err
    assert HALF[:12] in found.out and "pic 0.2 in half precision" in found.out
    done = pic("compile", "b.txt", *HERE, "--dtype", "bfloat16", "--salt", SALT, "--json").json
    assert [(row["key"] == HALF, row["new"]) for row in done["objects"]] == [(False, True)]
    assert pic("store", "verify", "--repair", "--store", "st").code == 0
    assert HALF not in old.keys() and {PLAIN, INT8, SALTED} < set(old.keys())


@pytest.mark.parametrize(
    ("options", "key"), [(("--after", "head"), SINKS_OF_0_1), (("--salt", SALT), SALTED_OF_0_1)], ids=["sinks", "salt"]
)
def test_sinks_and_salts_of_0_1_0_are_compiled_again(options: tuple[object, ...], key: str) -> None:
    shutil.copytree(OLD.with_name("written_by_0.1.0"), "older")
    done = pic("compile", "b.txt", "-m", "embedded-small", "--store", "older", *options, "--json").json
    assert [(row["key"] == key, row["new"]) for row in done["objects"]] == [(False, True)]
    assert key in Store("older").keys()


def test_an_object_with_sinks_of_0_1_0_is_refused_by_name() -> None:
    path = OLD.with_name("written_by_0.1.0") / "objects" / "3c" / f"{SINKS_OF_0_1}.kvo"
    shutil.copy(path, "old.kvo")
    refused = pic("link", "old.kvo", "-q", "x", *HERE)
    assert refused.code == 1 and "compiled after tokens" in refused.err


def test_it_is_whole_and_right_and_the_directory_is_adopted_at_the_first_write(model: Model, old: Store) -> None:
    found = recompute(model, old, [PLAIN, INT8, SALTED], 1.0)
    assert found.objects == 3 and found.problems == {} and not Path("st", MARK).exists()
    linked = pic("link", "a.txt", "-q", "Which festival?", *HERE)
    assert linked.code == 0 and "a store of an earlier version" in linked.err and Path("st", MARK).exists()


def test_a_link_of_old_objects_answers_as_one_of_new_ones() -> None:
    query = ("-q", "Which festival does Gadwick hold?", "-m", "embedded-small", "--json")
    answers = [pic("link", "a.txt", "b.txt", *query, "--store", store).json["answer"] for store in ("st", "new")]
    assert answers[0] == answers[1] != ""


def test_an_object_with_a_table_of_0_3_0_is_found_linked_shown_and_copied() -> None:
    """Policies read such tables then; now they are checked and carried along."""
    shutil.copytree(OLD.with_name("written_by_0.3.0"), "older")
    here = ("-m", "embedded-small", "--after", "none", "--codec", "int8", "--store")
    done = pic("compile", "a.txt", *here, "older", "--json").json
    assert [(row["key"], row["new"]) for row in done["objects"]] == [(WITH_TABLE, False)]
    shown = pic("inspect", WITH_TABLE[:12], "--store", "older", "--text", "--json").json
    assert shown["text"] == Path("a.txt").read_text() and "fixups" not in shown
    assert pic("store", "push", WITH_TABLE, "-o", "a.pic", "--store", "older").code == 0
    assert pic("store", "pull", "a.pic", "--store", "copied").code == 0
    assert Store("copied").path(WITH_TABLE).read_bytes() == Store("older").path(WITH_TABLE).read_bytes()
    assert pic("store", "verify", "--store", "copied").code == 0
    query = ("-q", "Which festival does Gadwick hold?", "--json")
    answers = [pic("link", "a.txt", *query, *here, store).json["answer"] for store in ("copied", "new")]
    assert answers[0] == answers[1] != ""


@pytest.fixture
def of_0_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user of 0.3.0 has: an archive, its signature, the list of signers, settings, a trace and results."""
    shutil.copytree(
        OLD.with_name("written_by_0.3.0"), ".", ignore=shutil.ignore_patterns("objects"), dirs_exist_ok=True
    )
    Path("pictool").mkdir(0o700)
    shutil.move("signers", "pictool/signers")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PIC_TRUST", str(tmp_path))


@pytest.mark.usefixtures("of_0_3")
def test_an_archive_of_0_3_0_is_taken_by_its_signatures() -> None:
    here = ("-m", "embedded-small", "--codec", "int8", "--after", "none", "--store", "taken")
    assert pic("store", "pull", "all.kva", "--store", "taken", "--require-signed").code == 0
    done = pic("compile", "a.txt", "b.txt", *here, "--json").json
    assert [row["new"] for row in done["objects"]] == [False, False]
    with open("all.kva", "ab") as file:
        file.write(b"more")
    refused = pic("store", "pull", "all.kva", "--store", "untaken", "--require-signed")
    assert refused.code == 1 and "all.kva" in refused.err and not list(Path("untaken").glob("objects/*/*"))


@pytest.mark.usefixtures("of_0_3")
def test_settings_traces_and_results_of_0_3_0() -> None:
    done = pic("config")
    assert done.code == 0 and re.search(r"^algo +legolink-16 +pic.yaml$", done.out, re.MULTILINE)
    assert "pic.yaml: server: " in done.err  # is no setting any more
    shown = pic("inspect", "t.trace", "--json").json
    assert shown["algo"] == "legolink" and shown["tokens"]["recomputed"] == 27
    before = Path("results.jsonl").read_bytes()
    refused = pic("eval", "q.jsonl", "--algo", "legolink-16", "-o", "results.jsonl")
    assert refused.code == 1 and "results.jsonl" in refused.err  # its prompts were others
    assert Path("results.jsonl").read_bytes() == before


def test_an_old_chain_is_reused() -> None:
    again = ("link", "a.txt", "-q", "where?", *HERE, "--algo", "prefix:block=16", "--max-new-tokens", 2)
    before = Store("st").keys()
    assert pic(*again, "--json").json["tokens"]["recomputed"] < 19
    assert set(before) <= set(Store("st").keys())


def test_versions_of_libraries_are_in_no_key(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    monkeypatch.setattr(transformers, "__version__", "9.9.9")
    monkeypatch.setattr("pictool.__version__", "9.9.9")
    fresh = load_model("embedded-small", "cpu", "float32")
    assert object_key(fresh, make_chunk(fresh, Path("a.txt").read_text(), "a.txt")) == PLAIN


def test_processor_flags_are_in_no_key() -> None:
    flags = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    command = [sys.executable, "-m", "pictool", "compile", "a.txt", "--after", "none", *HERE]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, check=True)
    assert "cached" in done.stdout and "0 compiled" in done.stderr


def test_another_dtype_codec_salt_or_context_is_another_object(old: Store) -> None:
    for options in (("--dtype", "float16"), ("--codec", "zstd"), ("--salt", SALT), ("--after", "text")):
        done = pic("compile", "a.txt", *HERE, *options, "--json").json
        assert [(row["key"] == PLAIN, row["new"]) for row in done["objects"]] == [(False, True)]
    assert PLAIN in old.keys()  # and the old one stays


def test_other_weights_are_another_model_whose_objects_say_so(model: Model, old: Store, tmp_path: Path) -> None:
    assert model.directory is not None
    shutil.copytree(model.directory, tmp_path / "other")
    weights = next((tmp_path / "other").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    other = load_model(str(tmp_path / "other"), "cpu", "float32")
    chunk = make_chunk(other, Path("a.txt").read_text(), "a.txt")
    (done,) = compile_chunks(other, old, [chunk], CompileOptions())
    assert done.is_new and done.key != PLAIN
    shutil.copy(old.path(PLAIN), "a.kvo")
    refused = pic("link", "a.kvo", "-q", "x", "-m", tmp_path / "other", "--store", "st")
    assert refused.code == 1 and "made for model" in refused.err and "compile the text again" in refused.err
