"""`pic compile --probe-model`: what it does, and what it is refused with."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands.run import pic, write

TEXT = "The harbour was quiet. It holds a festival in the spring; nobody knows why.\n"


def test_the_object_tells_who_measured_it(model: Path) -> None:
    write("a.txt", TEXT)
    more = ("-m", model, "--probes", 4, "--store", "s", "--json")
    recipes = []
    for named in ([], ["--probe-model", "embedded-small"], ["--probe-model", model]):
        (row,) = pic("compile", "a.txt", *more, *named).json["objects"]
        assert row["new"]
        recipes.append(pic("inspect", row["key"], "--store", "s", "--json").json["fixups"])
    assert recipes[0] == recipes[2] == "self-4x60"
    assert recipes[1].endswith("-4x60") and recipes[1] != recipes[0]


def test_naming_a_model_is_enough(model: Path) -> None:
    write("a.txt", TEXT)
    (row,) = pic("compile", "a.txt", "-m", model, "--probe-model", "embedded-small", "--store", "s", "--json").json[
        "objects"
    ]
    assert pic("inspect", row["key"], "--store", "s", "--json").json["fixups"].endswith("-8x60")


def test_a_depfile_names_its_files_too(model: Path) -> None:
    write("a.txt", TEXT)
    made = pic(
        "compile", "a.txt", "-m", model, "--probes", 2, "--probe-model", "embedded-small", "-o", "a.kvo", "--depfile"
    )
    assert made.code == 0
    assert "models/small/" in Path("a.d").read_text()


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (
            ["--probe-model", "embedded-small", "--probes", "0"],
            2,
            "--probe-model embedded-small: measures nothing with",
        ),
        (["--probes", "4", "--probe-model", "./none"], 1, "./none: not a model directory"),
    ],
)
def test_what_does_not_fit_is_one_line(model: Path, options: list[str], code: int, says: str) -> None:
    write("a.txt", TEXT)
    outcome = pic("compile", "a.txt", "-m", model, "--store", "s", *options)
    assert (outcome.code, outcome.err.count("\n")) == (code, 1) and says in outcome.err
