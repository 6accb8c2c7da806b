"""`pic store sign`, `trust`, `--require-signed`, and `--recompute`, from the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile.surfaces.objects import Anatomy

from commands.run import pic, write
from pictool.commands.settings.settings import read_settings
from pictool.compiler import recompute
from pictool.store.store import Store

QUERY = ("-q", "Who knows why?", "--max-new-tokens", 3, "--store", "st")


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "pictool"


def new_key() -> str:
    made = pic("store", "sign")
    assert made.code == 0 and made.out == pic("store", "sign").out
    return made.out.strip()


def compiled(model: Path, *more: object) -> list[str]:
    done = pic("compile", "a.txt", "b.txt", "-m", model, "--store", "st", "--json", *more)
    return [row["key"] for row in done.json["objects"]]


def plant(key: str) -> None:
    """Make the values of one layer of an object 1 % larger."""
    path = Store("st").path(key)
    anatomy = Anatomy.of(path.read_bytes())
    values = np.frombuffer(anatomy.parts["layers.001.value"], dtype="<f4") * np.float32(1.01)
    anatomy.parts["layers.001.value"] = values.tobytes()
    path.write_bytes(anatomy.build())


@pytest.mark.usefixtures("texts")
def test_only_what_a_trusted_key_signed_is_linked(model: Path, config: Path) -> None:
    public, keys = new_key(), compiled(model)
    link = ("link", *keys, *QUERY, "-m", model, "--json")
    answer = pic(*link).json["answer"]
    refused = pic(*link, "--require-signed")
    assert refused.code == 1 and "pic store trust" in refused.err
    assert pic("store", "trust", "me", public).out == f"{public}  me\n"
    assert (config / "signers").stat().st_mode & 0o777 == 0o644
    refused = pic(*link, "--require-signed")
    assert refused.code == 1 and "no object with this key and salt" in refused.err
    assert pic("store", "sign", "all", "--store", "st").code == 0
    assert pic(*link, "--require-signed").json["answer"] == answer
    plant(keys[0])
    assert pic(*link, "--require-signed").code == 1
    texts = pic("link", "a.txt", "b.txt", *QUERY, "-m", model, "--json", "--require-signed")
    assert texts.json["answer"] == answer
    assert pic("store", "trust", "--revoke", "me").out == f"{public}  me  revoked\n"
    assert pic(*link, "--require-signed").code == 1


@pytest.mark.usefixtures("texts")
def test_settings_say_it_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = new_key()
    pic("store", "trust", "me", public)
    write("pic.yaml", "{require_signed: default, signing_key: default, store: st}")
    keys = compiled(model)
    assert pic("link", *keys, *QUERY, "-m", model).code == 0
    assert pic("store", "verify").code == 0
    write("pic.yaml", "require_signed: nosuch")
    assert "nosuch: no such list of signers" in pic("link", *keys, *QUERY, "-m", model).err
    write("sub/pic.yaml", "{require_signed: own, signing_key: default}")
    monkeypatch.chdir("sub")
    settings = read_settings()
    assert (settings.require_signed, settings.signing_key) == ("own", "default")
    write("deep/x", "")
    monkeypatch.chdir("deep")
    settings = read_settings()
    assert (settings.require_signed, settings.signing_key) == ("../own", "default")
    monkeypatch.setenv("PIC_REQUIRE_SIGNED", "there")
    assert read_settings().require_signed == "there"


@pytest.mark.usefixtures("texts")
def test_a_file_that_is_named_must_be_signed_beside_itself(model: Path) -> None:
    pic("store", "trust", "me", new_key())
    assert pic("compile", "a.txt", "-m", model, "--store", "st", "-o", "a.kvo").code == 0
    link = ("link", "a.kvo", *QUERY, "-m", model, "--require-signed")
    assert "a.kvo: not signed" in pic(*link).err
    assert pic("store", "sign", "a.kvo").code == 0 and Path("a.kvo.sig").exists()
    assert pic(*link).code == 0


@pytest.mark.usefixtures("texts")
def test_an_archive_is_signed_and_taken_as_a_whole(model: Path) -> None:
    pic("store", "trust", "me", new_key())
    compiled(model, "--signing-key")
    assert pic("store", "push", "all", "-o", "x.kva", "--store", "st").code == 0
    take = ("store", "pull", "x.kva", "--store", "other", "--require-signed")
    assert pic(*take).code == 1
    assert pic("store", "sign", "x.kva").code == 0
    assert pic(*take).code == 0
    assert pic("store", "verify", "--store", "other", "--require-signed", "--json").json["unsigned"] == []


def test_a_key_that_others_read_signs_nothing(config: Path) -> None:
    new_key()
    (config / "signing-key").chmod(0o644)
    refused = pic("store", "sign", "all", "--store", "st")
    assert refused.code == 1 and "this private key" in refused.err


@pytest.mark.usefixtures("texts")
def test_recompute_removes_a_planted_object(model: Path) -> None:
    keys = compiled(model)
    verify = ("store", "verify", "--recompute", 1, "-m", model, "--store", "st")
    honest = pic(*verify)
    assert honest.code == 0 and f": 0 of {len(keys)} recomputed " in honest.err
    plant(keys[0])
    assert pic("store", "verify", "--store", "st").code == 0  # whole it is
    shutil.copytree("st", "far")
    found = pic(*verify)
    assert found.code == 1 and "layer 1's value differs by 1.00%" in found.out
    assert f"1 of {len(keys)} recomputed objects" in found.err
    assert not Store("st").path(keys[0]).exists()
    pull = ("store", "pull", *keys, "--remote", "far", "--store", "here", "--check", 1, "-m", model, "--json")
    pulled = pic(*pull)
    assert pulled.code == 1 and Store("here").keys() == sorted(keys[1:])
    assert pic("store", "verify", "--recompute", 2, "--store", "st").code == 2


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize("end", [interrupt, kill])
def test_an_interrupted_pull_leaves_nothing_unchecked(
    model: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[..., None]
) -> None:  # fmt: skip
    keys = compiled(model)
    plant(keys[1])
    pull = ("store", "pull", *keys, "--remote", "st", "--store", "here", "--check", 1, "-m", model, "--json")
    honest, seen = recompute.find_difference, []

    def second_ends(*args: Any) -> str | None:
        seen.append(args)
        if len(seen) >= 2:
            end()
        return honest(*args)

    monkeypatch.setattr(recompute, "find_difference", second_ends)
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        pic(*pull)
        os._exit(0)
    assert Store("here").keys() == keys[:1]
    monkeypatch.setattr(recompute, "find_difference", honest)
    again = pic(*pull)
    report = json.loads(again.out)
    assert again.code == 1 and set(report["problems"]) == {keys[1]} and report["present"] == keys[:1]
    assert Store("here").keys() == keys[:1] and not list(Path("here").glob(".pic-scratch-*"))


@pytest.mark.usefixtures("texts")
def test_a_checked_pull_keeps_the_signatures_of_what_is_right(model: Path) -> None:
    pic("store", "trust", "me", new_key())
    keys = compiled(model, "--signing-key")
    pull = ("store", "pull", *keys, "--remote", "st", "--store", "here", "--check", 0.5, "-m", model, "--json")
    done = pic(*pull, "--require-signed")
    assert done.code == 0 and done.json["recomputed"] == 1 and set(done.json["keys"]) == set(keys)
    assert Store("here").keys() == sorted(keys)
    assert pic("store", "verify", "--store", "here", "--require-signed", "--json").json["unsigned"] == []
