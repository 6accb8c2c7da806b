"""`pic evidence`: its parts, its report, and how it goes on after a kill."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands.run import Outcome, pic, write
from pictool.commands import evidence
from pictool.commands.evidence_report import parts
from pictool.commands.evidence_report.parts import (
    EvidencePart,
    PartRecord,
    PartStatus,
    Round,
    read_record,
    run_part,
    run_pic,
)  # fmt: skip
from pictool.doctor import surroundings

PARTS = ["doctor", "bench-sync", "bench-breakdown", "tune", "answers-1"]
SECRET = "The vault of <b>Temmere</b> opens in spring."
Calls = list[tuple[str, ...]]


class Page(HTMLParser):
    """The tags of a page, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.loads, self.text = list[str](), list[str](), ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The commands that are run."""
    made: Calls = []
    run_here(monkeypatch, made)
    return made


def run_here(monkeypatch: pytest.MonkeyPatch, made: Calls) -> None:
    """Run commands in this process, without seconds of imports each, and small."""

    def here(arguments: Sequence[str], limit_s: float, log: Path) -> tuple[Round, bool]:
        made.append(tuple(arguments))
        outcome = pic(*arguments)
        result = json.loads(outcome.out) if outcome.out.startswith(("{", "[")) else None
        said = outcome.err.strip().splitlines()[-1:]
        return Round(tuple(arguments), 0.5, outcome.code, "".join(said), result), True

    monkeypatch.setattr(parts, "run_pic", here)
    monkeypatch.setattr(surroundings, "_FILE_BYTES", 2 << 20)
    monkeypatch.setattr("pictool.bench.roofline._SIZE", 64)
    monkeypatch.setattr("pictool.bench.roofline._COPY_BYTES", 1 << 20)
    monkeypatch.setattr("pictool.tuning.tune.DEFAULT_POLICIES", ("naive", "legolink-400"))
    monkeypatch.setattr(evidence, "QUESTIONS", (1, 2))


def run(model: Path, *more: object) -> Outcome:
    """Run `pic evidence` on two questions with the tiny model."""
    return pic("evidence", "-m", model, "--data", "q.jsonl", "--store", "st", *more)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with questions and their report; nothing writes to it."""
    root, made = tmp_path_factory.mktemp("evidence"), Calls()
    records = [{"documents": [{"text": SECRET}], "query": f"Who knows {i}?", "answers": ["she"]} for i in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.chdir(root)
        run_here(patch, made)
        write("q.jsonl", "\n".join(map(json.dumps, records)))
        outcome = run(model)
    assert outcome.code == 0, outcome.err + outcome.out
    assert [words[0] for words in made] == ["doctor", "bench", "bench", "tune", "eval", "eval"]
    return root


@pytest.fixture
def lacking(whole: Path) -> Callable[..., None]:
    """Copies the report to the working directory, without some of its parts."""

    def copy(*names: str) -> None:
        shutil.copytree(whole, ".", dirs_exist_ok=True)
        for name in names:
            Path(f"report/parts/{name}.json").unlink()

    return copy


def report_of(folder: Path = Path()) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report/report.json").read_text())
    return report


def test_the_report_has_every_part_and_no_text(whole: Path, model: Path) -> None:
    report, page = report_of(whole), Page((whole / "report/report.html").read_text())
    assert [(part["name"], part["status"], part["why"]) for part in report["parts"]] == [
        (name, "done", "") for name in PARTS
    ]
    assert report["is_good"] and report["model"]["fingerprint"] and report["machine"]["torch"]
    answers = report["parts"][-1]["rounds"]
    assert [each["result"]["questions"] for each in answers] == [1, 2]
    assert {line["algo"] for line in answers[-1]["result"]["lines"]} == set(report["model"]["policies"])
    headers = [part["rounds"][-1]["result"]["header"] for part in report["parts"][-2:]]
    assert all(len(header["dataset"]["sha256"]) == 64 for header in headers)
    assert all(load.startswith("data:") for load in page.loads) and page.tags.count("h2") == len(PARTS)
    assert "legolink-16" in page.text and report["model"]["fingerprint"] in page.text
    both = (whole / "report/report.json").read_text() + page.text
    assert "Temmere" not in both and str(model.parent) not in both and str(whole) not in both


def test_a_stopped_run_goes_on_where_it_was(
    lacking: Callable[..., None], model: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking("bench-breakdown", "answers-1")
    here = parts.run_pic

    def stopping(*arguments: Any) -> tuple[Round, bool]:
        if len(calls) == 2:
            raise KeyboardInterrupt
        return here(*arguments)

    monkeypatch.setattr(parts, "run_pic", stopping)
    assert run(model).code == 130
    monkeypatch.setattr(parts, "run_pic", here)
    assert run(model, "--json").json == report_of()
    assert [words[:4] for words in calls] == [
        ("bench", "breakdown", "-m", str(model)), *(("eval", "q.jsonl", "--limit", limit) for limit in "12"),
    ]  # fmt: skip


def test_what_has_no_time_is_left_out_and_named(lacking: Callable[..., None], model: Path, calls: Calls) -> None:
    lacking("tune")
    outcome = run(model, "--minutes", "0.0001")
    assert outcome.code == 0 and "left out The cheapest policy, 0 s: no time was left" in outcome.out and not calls
    assert run(model).code == 0 and {part["status"] for part in report_of()["parts"]} == {"done"}


def test_a_round_that_may_not_fit_is_not_begun(tmp_path: Path, calls: Calls) -> None:
    part = EvidencePart("x", "X", 1, (("config", "--json"), ("config", "--json")))
    record = run_part(part, read_record(part, tmp_path), tmp_path, 0.6, lambda _: None)
    assert record.status is PartStatus.PARTIAL and len(record.rounds) == 1
    assert record.why == "round 2 of 2 may take 1 s"
    assert read_record(part, tmp_path) == record
    assert not read_record(EvidencePart("x", "X", 1, (("config",),)), tmp_path).rounds  # another command's


def test_another_part_than_doctor_tells_the_model_and_the_machine() -> None:
    told = {"model": {"fingerprint": "x"}, "machine": {"cpu": "y"}}
    doctor = PartRecord("doctor", "Exactness", PartStatus.LEFT_OUT, "round 1 did not end in 9 s", 9.0, ())
    bench = PartRecord("bench", "Speed", PartStatus.DONE, "", 1.0, (Round(("bench",), 1.0, 0, "", told),))
    report = evidence.make_report([doctor, bench], 1.0)
    assert report["model"] == told["model"] and report["machine"] == told["machine"] and not report["is_good"]


def test_a_last_round_that_was_interrupted_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tune knows when it is interrupted counts until the same round has ended."""
    interrupted = Round(("tune",), 1.0, 130, "stopped", {"questions": 1})
    outcomes = iter([(interrupted, False), (Round(("tune",), 1.0, 0, "", {"questions": 2}), True)])
    monkeypatch.setattr(parts, "run_pic", lambda *_: next(outcomes))
    part = EvidencePart("x", "X", 1, (("tune",),))
    first = run_part(part, read_record(part, tmp_path), tmp_path, 60, lambda _: None)
    assert first.status is PartStatus.PARTIAL and first.result == {"questions": 1}
    second = run_part(part, read_record(part, tmp_path), tmp_path, 60, lambda _: None)
    assert second.status is PartStatus.DONE and second.result == {"questions": 2} and len(second.rounds) == 1


def test_a_failed_part_says_why_and_is_measured_again(lacking: Callable[..., None], model: Path, calls: Calls) -> None:
    lacking("answers-1")
    good = Path("q.jsonl").read_text()
    write("q.jsonl", "{}")
    outcome = run(model)
    assert outcome.code == 1 and "failed   Answers: q.jsonl" in outcome.out and "known dataset" in outcome.out
    assert "failed" in Page(Path("report/report.html").read_text()).text
    write("q.jsonl", good)
    assert run(model).code == 0


def test_other_weights_are_refused(lacking: Callable[..., None], model: Path, calls: Calls) -> None:
    lacking()
    record = json.loads(Path("report/parts/doctor.json").read_text())
    verdict = next(each for each in record["rounds"][0]["result"]["verdicts"] if each["check"] == "model")
    verdict["values"]["fingerprint"] = "0" * 64
    write("report/parts/doctor.json", json.dumps(record))
    outcome = run(model)
    assert outcome.code == 1 and "different weights" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--minutes", "0"], 2, "must be above 0"),
        (["--data", "nope.json"], 1, "no such file"),
        (["nope.txt"], 1, "no such file"),
        (["-o", "a.txt"], 1, "not a directory"),
    ],
)
def test_bad_input(arguments: list[str], code: int, message: str, texts: tuple[Path, Path]) -> None:
    outcome = pic("evidence", *arguments)
    assert outcome.code == code and message in outcome.err


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    write(tmp_path / "x.json", "{")
    with pytest.raises(Exception, match=r"x\.json: is no part of a report"):
        read_record(EvidencePart("x", "X", 1, (("doctor",),)), tmp_path)


def test_a_command_ends_at_its_limit(model: Path, tmp_path: Path) -> None:
    part = EvidencePart("x", "X", 1, (("eval", "world", "-m", str(model), "--json"),))
    record = run_part(part, read_record(part, tmp_path), tmp_path, 0.5, lambda _: None)
    assert record.status is PartStatus.LEFT_OUT and "did not end" in record.why and record.seconds >= 0.5


def test_a_command_ends_with_a_killed_run(model: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pictool.commands.evidence_report.parts import run_pic;"
        "run_pic(('eval', 'world', '-m', sys.argv[1]), 600, Path('log'))"
    )
    parent = subprocess.Popen([sys.executable, "-P", "-c", code, str(model)])
    started = psutil.Process(parent.pid)
    ends = time.monotonic() + 120
    while not (children := started.children()) and time.monotonic() < ends:
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    gone, alive = psutil.wait_procs(children, timeout=120)
    assert gone and not alive


def test_what_a_command_prints_is_its_result(tmp_path: Path) -> None:
    done, in_time = run_pic(("config", "--json"), 300, tmp_path / "log")
    assert in_time and done.code == 0 and done.result and done.said == ""
    done, in_time = run_pic(("link", "nope.txt"), 300, tmp_path / "log")
    assert in_time and done.code == 1 and done.result is None and done.said.startswith("pic: error: nope.txt")
