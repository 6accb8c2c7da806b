"""`pic tune`: what it prints, what it writes to pic.yaml and leaves there, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from commands.run import Outcome, pic, write
from pictool.commands.settings.file import write_setting
from pictool.commands.settings.settings import read_settings
from pictool.errors import InputError

Run = Callable[..., Outcome]


@pytest.fixture
def run(model: Path, texts: tuple[Path, Path]) -> Run:
    """Runs `pic tune` on a.txt and b.txt with forty questions and the tiny model."""
    write("q.jsonl", "\n".join(json.dumps({"query": f"Who {i}?", "max_new_tokens": 1}) for i in range(40)))
    common = ("-m", model, "--store", "st", "--algo", "naive", "--algo", "legolink-400")
    return lambda *more: pic("tune", *more, *common)


def given(run: Run, *more: object) -> Outcome:
    return run("a.txt", "b.txt", "--questions", "q.jsonl", *more)


def test_the_policy_is_written_to_pic_yaml_and_pic_link_takes_it(
    run: Run, model: Path, texts: tuple[Path, Path]
) -> None:
    write("pic.yaml", "# mine\nmemory: '1M'  # keep\n")
    outcome = given(run, "--target-answer-kl", "5")
    assert outcome.code == 0, outcome.err
    assert Path("pic.yaml").read_text() == "# mine\nmemory: '1M'  # keep\nalgo: naive\n"
    assert "Answers cannot be certified" in outcome.out and max(map(len, outcome.out.splitlines()[1:-1])) <= 80
    assert "algo: naive" in outcome.err
    asked = ("link", "a.txt", "b.txt", "-q", "Who?", "-m", model, "--store", "st", "--max-new-tokens", 1, "--json")
    assert pic(*asked).json["algo"] == "naive"
    assert pic(*asked, "--algo", "legolink").json["algo"] == "legolink"


def test_json_has_everything_and_a_dry_run_writes_nothing(run: Run) -> None:
    report = given(run, "--target-answer-kl", "5", "--json", "-n").json
    assert report["target"] == {"measure": "answer_kl", "limit": 5}
    assert report["by_mean"] == "naive"
    assert all(line["answer_kl"] >= line["kl"] for line in report["lines"])
    assert report["chosen"] == "naive" and report["outcome"] == "found" and report["units"] == 32
    assert {line["label"]: line["finding"]["status"] for line in report["lines"]}["legolink-400"] == "meets"
    assert not Path("pic.yaml").exists()


def test_where_no_claim_is_possible_nothing_is_written(run: Run) -> None:
    outcome = given(run, "--target-loss", "1%")
    assert outcome.code == 1 and "answers cannot be certified" in outcome.err and not Path("pic.yaml").exists()
    few = given(run, "--limit", 4, "--json")
    assert json.loads(few.out)["target"] == {"measure": "share", "limit": 0.15}
    assert few.code == 1 and "4 questions are too few" in few.err and not Path("pic.yaml").exists()


def test_an_interrupted_run_shows_what_is_known(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from pictool.eval.evaluate import evaluate as measured

    calls = []

    def evaluate(*arguments: object, **more: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measured(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("pictool.tuning.tune.evaluate", evaluate)
    outcome = given(run, "--target-answer-kl", "0.0001")
    assert outcome.code == 130 and "32 of 40 questions" in outcome.out and not Path("pic.yaml").exists()
    assert "stopped; nothing is written" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["a.txt"], 2, "--questions"),
        (["a.txt", "--target-answer-kl", "0"], 2, "--target-answer-kl"),
        (["a.txt", "--target-loss", "much"], 2, "--target-loss"),
        (["a.txt", "--target-loss", "1%", "--target-answer-kl", "1"], 2, "--target-"),
        (["a.txt", "--target-differ", "2"], 2, "--target-differ 2: "),
        (["a.txt", "--target-share", "0"], 2, "--target-share 0: "),
        (["a.txt", "--algo", "mapreduce"], 2, "mapreduce"),
        (["no.txt", "--questions", "q.jsonl"], 1, "no.txt"),
    ],
)
def test_what_cannot_be_done_is_refused(run: Run, arguments: list[str], code: int, message: str) -> None:
    outcome = run(*arguments)
    assert outcome.code == code and message in outcome.err, outcome.err


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "algo: legolink-5\n"),
        ("model: x", "model: x\nalgo: legolink-5\n"),
        ("algo: naive # why\nmodel: x\n", "algo: legolink-5 # why\nmodel: x\n"),
        ("algo:\nmodel: x\n", "algo: legolink-5\nmodel: x\n"),
        ("# only a comment\n", "# only a comment\nalgo: legolink-5\n"),
        ("{algo: naive, model: x}\n", "{algo: legolink-5, model: x}\n"),
    ],
)
def test_a_setting_is_written_and_the_rest_stays(before: str, after: str) -> None:
    path = write("pic.yaml", before)
    write_setting(path, "algo", "legolink-5")
    assert path.read_text() == after and read_settings().algo == "legolink-5"


def test_where_no_line_fits_the_file_stays() -> None:
    path = write("pic.yaml", "{model: x}\n")
    with pytest.raises(InputError, match=r"^pic\.yaml: algo .*legolink-5"):
        write_setting(path, "algo", "legolink-5")
    assert yaml.safe_load(path.read_text()) == {"model": "x"}


def test_a_policy_of_the_settings_that_there_is_not_names_who_says_it(
    model: Path, texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIC_ALGO", "fixxup-5")
    outcome = pic("link", "a.txt", "-q", "Who?", "-m", model)
    assert outcome.code == 1 and "PIC_ALGO: algo: " in outcome.err
