"""Settings: where they come from, which comes first, and that they are read once."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest

from commands.run import pic, write
from pictool.commands.settings import settings
from pictool.commands.settings.settings import Settings, read_settings
from pictool.errors import InputError, ModelError
from pictool.runtime.gguf import find_files
from pictool.runtime.model import local_directory, require_name
from pictool.store.signatures import path_of
from pictool.store.store import Store


def test_without_anything_they_are_the_defaults() -> None:
    assert read_settings() == Settings()


def test_the_environment_comes_before_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        "pic.yaml",
        "{model: a, store: s, dtype: bfloat16, max_size: 10K, memory: 1M, remote_rate: 2K, head: You know., "
        "codec: int8}",
    )
    monkeypatch.setenv("PIC_MODEL", "b")
    monkeypatch.setenv("PIC_STORE", "")
    monkeypatch.setenv("PIC_MAX_SIZE", "2K")
    assert read_settings() == Settings(
        model="b",
        store="s",
        dtype="bfloat16",
        max_size=2000,
        memory=10**6,
        remote_rate=2000,
        head="You know.",
        codec="int8",
    )


def test_the_command_line_comes_before_both() -> None:
    named = Settings(model="a", remote="r", dtype="float16").override(model="b", store=None, remote="")
    assert (named.model, named.remote, named.dtype, named.store) == ("b", "", "float16", None)
    assert (named.option("model"), named.option("remote"), named.option("dtype")) == ("b", "", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("named: x", "pic.yaml: unknown key named"),
        ("memory: 5", "pic.yaml: memory"),
        ("head: [x]", "pic.yaml: head"),
        ('store: "a\\0b"', "pic.yaml: store"),
        ('remote: "\\udfff"', "pic.yaml: remote"),
        ("max_size: much", "max_size 'much'"),
    ],
)
def test_what_makes_no_sense_is_refused_whatever_the_command_needs(text: str, message: str) -> None:
    write("pic.yaml", text)
    with pytest.raises(InputError) as caught:
        read_settings()
    assert message in str(caught.value)
    outcome = pic("store", "ls")
    assert outcome.code == 1 and message in outcome.err


def test_the_nearest_file_above_is_read_and_its_paths_are_relative_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    write("project/pic.yaml", "{store: st, codec: int8, remote: far, model: org/name}")
    write("project/a/b/x.txt", "x")
    monkeypatch.chdir("project/a/b")
    found = read_settings()
    assert (found.store, found.remote, found.codec, found.model) == ("../../st", "../../far", "int8", "org/name")
    assert found.origin("codec") == "../../pic.yaml" and found.origin("dtype") == "default"
    write("pic.yaml", "codec: fp8")
    assert (read_settings().codec, read_settings().store) == ("fp8", None)


def test_without_a_store_in_a_file_above_the_store_is_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    write("project/pic.yaml", "codec: int8")
    Path("project/a").mkdir()
    monkeypatch.chdir("project/a")
    assert read_settings().store == "../.pic"


def test_a_file_above_of_another_user_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    write("project/pic.yaml", "codec: int8")
    Path("project/a").mkdir()
    monkeypatch.chdir("project/a")
    if os.getuid() == 0:  # root's files are anybody's
        os.chown("../pic.yaml", 12345, -1)
    monkeypatch.setattr("os.getuid", lambda: 12344)
    assert read_settings().codec == "none"
    monkeypatch.setattr("os.getuid", lambda: Path("../pic.yaml").stat().st_uid)
    assert read_settings().codec == "int8"


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIC_STORE", "~/objects")
    write("pic.yaml", "remote: ~/far")
    assert (read_settings().store, read_settings().remote) == (f"{tmp_path}/home/objects", f"{tmp_path}/home/far")
    assert read_settings().override(store="~/x").store == f"{tmp_path}/home/x"
    assert Store("~/objects").root == tmp_path / "home" / "objects"


def test_a_tilde_of_no_user_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "~no-such-user/x"
    write("pic.yaml", f"remote: {name}")
    monkeypatch.setenv("PIC_STORE", name)
    assert (read_settings().store, read_settings().remote) == (name, name)
    assert Store(name).root == path_of(name, "trust") == Path(name)
    assert local_directory(name) is None
    for refused in (require_name, find_files):
        with pytest.raises(ModelError, match=name):
            refused(name)


def test_an_error_names_who_says_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    write("pic.yaml", "dtype: int3")
    assert pic("store", "ls").err.startswith("pic: error: pic.yaml: dtype 'int3': must be one of auto, float32")
    monkeypatch.setenv("PIC_DTYPE", "int4")
    assert pic("store", "ls").err.startswith("pic: error: PIC_DTYPE: dtype 'int4': must be one of auto, float32")


def test_config_shows_every_setting_and_who_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    write("pic.yaml", "{codec: int8, salt: secret-of-a-tenant}")
    monkeypatch.setenv("PIC_STORE", "st")
    rows = {row["name"]: row for row in pic("config", "--json").json}
    assert rows.keys() == {field.name for field in fields(Settings)} - {"strange_file", "origins"}
    assert (rows["codec"]["value"], rows["codec"]["origin"]) == ("int8", "pic.yaml")
    assert (rows["store"]["value"], rows["store"]["origin"]) == ("st", "PIC_STORE")
    assert (rows["model"]["value"], rows["model"]["origin"]) == ("embedded", "default")
    shown = pic("config")
    assert "secret-of-a-tenant" not in shown.out and "int8" in shown.out and shown.err == ""


def test_a_command_reads_them_once(model: Path, texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    write("pic.yaml", f"{{model: '{model}', head: You know all.}}")
    count, read_yaml = 0, settings.read_yaml

    def counted(path: Path, keys: tuple[str, ...]) -> dict[str, object]:
        nonlocal count
        count += 1
        return read_yaml(path, keys)

    monkeypatch.setattr(settings, "read_yaml", counted)
    assert pic("link", "a.txt", "-q", "why?", "--max-new-tokens", 1).code == 0
    assert count == 1


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is not below the home directory."""
    Path("home").mkdir()
    monkeypatch.setenv("HOME", str(Path("home").absolute()))


@pytest.mark.usefixtures("outside")
def test_a_file_outside_of_the_home_directory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    write("pic.yaml", "{model: m, store: st}")
    noted = pic("config", "--json").err
    assert noted.startswith("pic: using model, store from pic.yaml") and "PIC_TRUST" in noted
    monkeypatch.setenv("PIC_TRUST", f"/nowhere{os.pathsep}{Path.cwd()}")
    assert pic("config", "--json").err == ""


def test_settings_that_have_left_are_noted_and_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    write("pic.yaml", "{server: 'http://127.0.0.1:1', codec: int8}")
    monkeypatch.setenv("PIC_SERVER_KEY", "key-of-a")
    outcome = pic("config", "--json")
    assert {row["name"]: row["value"] for row in outcome.json}["codec"] == "int8"
    noted = outcome.err.splitlines()
    assert len(noted) == 2 and "key-of-a" not in outcome.err
    assert noted[0].startswith("pic: pic.yaml: server: ") and noted[1].startswith("pic: PIC_SERVER_KEY: ")


@pytest.mark.usefixtures("outside")
def test_a_remote_s_url_in_a_file_outside_of_the_home_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    write("pic.yaml", "remote: https://user:p@ss@far/store?sig=x")
    outcome = pic("store", "ls")
    assert outcome.code == 1 and " https://far/store?…" in outcome.err
    assert pic("store", "ls", "--store", "none").code == 1
    monkeypatch.setenv("PIC_REMOTE", "https://near/store")
    assert "no such store" in pic("store", "ls").err
    monkeypatch.delenv("PIC_REMOTE")
    monkeypatch.setenv("PIC_TRUST", str(Path.cwd()))
    assert "no such store" in pic("store", "ls").err


@pytest.mark.parametrize("name", ["remote: far", "model: m", "store: st", "salt_file: s"])
def test_a_file_that_another_user_may_have_written_names_no_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write("s", "0123456789abcdefghij")
    write("pic.yaml", f"{{{name}, codec: int8}}").chmod(0o666)
    outcome = pic("config")
    assert outcome.code == 1 and "pic.yaml: " in outcome.err
    Path("pic.yaml").chmod(0o644)
    assert pic("config").code == 0
    if os.getuid() == 0:
        os.chown("pic.yaml", 12345, -1)
        assert "pic.yaml: belongs to another user" in pic("config").err
    write("pic.yaml", f"{{{name}, codec: int8}}").chmod(0o666)
    monkeypatch.setenv("PIC_TRUST", str(Path.cwd()))
    assert pic("config").code == 0


def test_a_file_of_anybody_may_say_how_things_are_computed() -> None:
    write("pic.yaml", "{codec: int8, algo: naive}").chmod(0o666)
    assert read_settings().codec == "int8"


def test_a_misspelt_variable_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIC_MODLE", "x")
    assert pic("config").err.startswith("pic: PIC_MODLE: unknown variable; did you mean PIC_MODEL?\n")


def test_no_password_of_a_url_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIC_REMOTE", "https://user:p@ss@far.example/store?sig=secret")
    for arguments in (("config",), ("config", "--json")):
        outcome = pic(*arguments)
        assert "https://far.example/store?…" in outcome.out and "ss@" not in outcome.out and "secret" not in outcome.out
