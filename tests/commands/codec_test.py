"""`--codec`: in the object, in the key, in the answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands.run import pic, write
from pictool.store.codecs import codecs

TEXT = "The harbour was quiet. It holds a festival in the spring; nobody knows why.\n"


@pytest.mark.parametrize("codec", codecs())
def test_compile_and_link(model: Path, codec: str) -> None:
    write("a.txt", TEXT)
    more = ("-m", model, "--codec", codec, "--store", "s")
    (row,) = pic("compile", "a.txt", *more, "--json").json["objects"]
    assert pic("inspect", row["key"], "--store", "s", "--json").json["codec"] == codec
    linked = pic("link", "a.txt", "--query", "Why?", "--algo", "naive", "--max-new-tokens", 2, *more)
    assert linked.code == 0 and "compiled a.txt" not in linked.err
    by_key = pic("link", row["key"], "--query", "Why?", "--algo", "naive", "--max-new-tokens", 2, *more, "--json")
    assert by_key.json["answer"] == linked.out.strip()
    heads = [one for one in pic("store", "ls", "--store", "s", "--json").json if one["key"] != row["key"]]
    assert [one["codec"] for one in heads] == ["zstd" if codec == "zstd" else "none"]


def test_another_codec_is_another_object(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.txt", TEXT)
    compiled = ["compile", "a.txt", "-m", model, "--store", "s", "--json"]
    assert pic(*compiled).json["objects"][0]["new"]
    monkeypatch.setenv("PIC_CODEC", "int8")
    assert pic(*compiled).json["objects"][0]["new"] and not pic(*compiled).json["objects"][0]["new"]
    monkeypatch.delenv("PIC_CODEC")
    write("pic.yaml", "codec: int8\n")
    assert not pic(*compiled).json["objects"][0]["new"]


def test_an_unknown_codec_is_one_line(model: Path) -> None:
    write("a.txt", TEXT)
    outcome = pic("compile", "a.txt", "-m", model, "--codec", "int3")
    assert (outcome.code, outcome.err) == (
        2,
        "pic: error: --codec int3: must be one of float8_e4m3, float8_e4m3_head, fp8, int4, int8, none, "
        "states_bfloat16, zstd\n",
    )
