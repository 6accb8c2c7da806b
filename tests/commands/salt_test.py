"""`--salt` and `--algo prefix` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands.run import pic, write

QUERY = ("-q", "Who knows why?", "--max-new-tokens", 2, "--json")


def recomputed(*arguments: object) -> float:
    found: float = pic("link", "a.txt", "b.txt", *arguments, *QUERY).json["tokens"]["recomputed"]
    return found


def test_a_second_prompt_reuses_the_first_one_s_blocks(model: Path, texts: tuple[Path, Path]) -> None:
    named = ("-m", model, "--algo", "prefix", "-p", "block=4")
    first, second = recomputed(*named), recomputed(*named)
    assert first >= 8 and second == first % 4
    stats = pic("store", "stats", "--json").json
    assert stats["chains"]["count"] == stats["objects"] >= first // 4
    assert pic("store", "ls", "--json").json == [] and len(pic("store", "ls", "--chains", "--json").json) >= 2
    assert pic("store", "verify").code == 0
    (one,) = pic("store", "show", pic("store", "ls", "--chains", "--json").json[0]["key"], "--json").json
    assert one["tokens"] == 4 and one["parent"]


def test_another_salt_never_hits(model: Path, texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    named = ("-m", model, "--algo", "prefix", "-p", "block=4")
    first = recomputed(*named, "--salt", "mine")
    assert recomputed(*named) == recomputed(*named, "--salt", "other") == first
    monkeypatch.setenv("PIC_SALT", "mine")
    assert recomputed(*named) == first % 4
    (compiled,) = pic("compile", "a.txt", "-m", model, "--json").json["objects"]
    assert pic("compile", "a.txt", "-m", model, "--json").json["objects"][0]["key"] == compiled["key"]
    monkeypatch.setenv("PIC_SALT", "other")
    assert pic("compile", "a.txt", "-m", model, "--json").json["objects"][0]["key"] != compiled["key"]
    refused = pic("link", compiled["key"], "-m", model, *QUERY)
    assert refused.code == 1 and "link with the --salt that it was compiled with" in refused.err
    monkeypatch.delenv("PIC_SALT")
    write("pic.yaml", "salt: mine\n")
    assert pic("link", compiled["key"], "-m", model, *QUERY).code == 0


@pytest.mark.parametrize("command", ["eval", "bench"])
def test_what_depends_on_what_was_asked_before_is_not_compared(command: str, model: Path) -> None:
    given = ("eval", "world", "--limit", 1) if command == "eval" else ("bench", "sync")
    refused = pic(*given, "--algo", "prefix", "-m", model)
    assert refused.code == 1 and "depends on earlier requests" in refused.err
