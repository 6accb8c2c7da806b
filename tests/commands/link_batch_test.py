"""`pic link --batch` and `--verify`: many requests by one process, and a canary for the answers of production."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from commands.run import Outcome, pic, write
from pictool.commands.linking.batch import require_little
from pictool.engines.base import Comparison
from pictool.errors import InputError
from pictool.fidelity.verify import Canary, Drift, wilson

COUNT = 8
Run = Callable[..., Outcome]


@pytest.fixture
def run(model: Path, texts: tuple[Path, Path]) -> Run:
    """Runs `pic link --batch` on eight requests, with the tiny model."""
    lines = [{"documents": ["a.txt", "b.txt"], "query": f"Who {i}?", "id": f"q{i}"} for i in range(COUNT - 1)]
    last = {"documents": [{"text": "Nobody knows the harbour."}], "query": "Who?", "id": "last", "head": "Read."}
    write("q/requests.jsonl", "\n".join(json.dumps(each) for each in [*lines, last]))
    Path("a.txt").rename("q/a.txt")
    Path("b.txt").rename("q/b.txt")
    common = ("-m", model, "--store", "st", "--max-new-tokens", 2, "--algo", "naive")
    return lambda *more: pic("link", "--batch", "q/requests.jsonl", *common, *more)


def test_every_request_is_answered_as_on_its_own_and_a_share_is_verified(run: Run, model: Path) -> None:
    report = run("--verify", 0.5, "--json").json
    answers, drift = report["answers"], report["drift"]
    assert [each["id"] for each in answers] == [*(f"q{i}" for i in range(COUNT - 1)), "last"]
    verified = [each for each in answers if each["compare"]]
    assert 0 < len(verified) == drift["verified"] < COUNT == drift["requests"]
    assert drift["kl_max"] == max(each["compare"]["kl"] for each in verified) > 0
    one = pic(
        "link", "q/a.txt", "q/b.txt", "-q", "Who 3?", "-m", model, "--store", "st", "--max-new-tokens", 2, "--algo",
        "naive", "--json",
    ).json  # fmt: skip
    assert one["answer"] == answers[3]["answer"]


def test_a_run_goes_on_and_verifies_the_same_requests(run: Run) -> None:
    assert run("--verify", 0.5, "-o", "out.jsonl").code == 0
    whole = Path("out.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == COUNT
    Path("out.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])  # killed while it wrote
    outcome = run("--verify", 0.5, "-o", "out.jsonl")
    assert outcome.code == 0 and f"of {COUNT} answers verified" in outcome.err
    again = [json.loads(line) for line in Path("out.jsonl").read_bytes().splitlines()]
    before = [json.loads(line) for line in lines]

    def seen(results: list[dict[str, object]]) -> dict[object, tuple[object, bool]]:
        return {each["id"]: (each["answer"], each["compare"] is not None) for each in results}

    assert seen(again) == seen(before)
    assert "answers another query" in run("-o", "out.jsonl", "--head", "Other.").err


def test_answers_hold_for_the_documents_and_the_model_that_they_follow_from(run: Run) -> None:
    def num_asked(*more: object) -> tuple[int, int]:
        """Answers that were asked again by the note, and verified answers of the file."""
        outcome = run("-o", "out.jsonl", *more)
        assert outcome.code == 0
        notes = [line for line in outcome.err.splitlines() if "of its answers" in line]
        records = [json.loads(line) for line in Path("out.jsonl").read_bytes().splitlines()]
        assert len(notes) < 2 and sorted(record["line"] for record in records) == list(range(1, COUNT + 1))
        return int(notes[0].split()[2]) if notes else 0, sum(record["compare"] is not None for record in records)

    assert num_asked() == num_asked() == (0, 0)
    with Path("q/b.txt").open("a") as file:
        file.write(" Nobody knows.")
    assert num_asked() == (COUNT - 1, 0)  # the last one reads a text of its own
    assert num_asked("--dtype", "bfloat16") == num_asked("--salt-file", write_salt()) == (COUNT, 0)
    assert num_asked("--salt-file", "salt", "--verify", 1) == (0, COUNT)  # it is not verified by an answer of before


def write_salt() -> str:
    write("salt", "a-long-enough-salt")
    Path("salt").chmod(0o600)
    return "salt"


def test_drift_beyond_the_limit_fails_after_all_is_written(run: Run) -> None:
    outcome = run("--verify", 1, "--max-kl", "0.000001", "-o", "out.jsonl")
    assert outcome.code == 1 and "above --max-kl" in outcome.err and "pic tune" in outcome.err
    assert len(Path("out.jsonl").read_bytes().splitlines()) == COUNT
    assert run("--verify", 1, "--max-kl", "0.000001", "--algo", "full").code == 2  # two policies
    fine = run("--verify", 1, "--max-kl", 100)
    assert fine.code == 0 and len(fine.out.splitlines()) == COUNT and f"{COUNT} of {COUNT} answers" in fine.err


def test_a_request_that_fails_does_not_stop_the_others(run: Run) -> None:
    with Path("q/requests.jsonl").open("a") as file:
        file.write('\n{"documents": ["no.txt"], "query": "Who?", "id": "lost"}\n')
    outcome = run("-o", "out.jsonl")
    assert outcome.code == 1 and "1 of 9 requests failed; request 9: " in outcome.err and "no.txt" in outcome.err
    assert [("error" in json.loads(line)) for line in Path("out.jsonl").read_text().splitlines()].count(True) == 1


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["-q", "Who?"], 2, "query"),
        (["--trace", "t"], 2, "--trace"),
        (["--verify", "2"], 2, "--verify"),
        (["--max-kl", "1"], 2, "--verify"),
        (["--auto-ratio"], 2, "--auto-ratio"),
        (["-o", "q/requests.jsonl"], 1, "q/requests.jsonl"),
    ],
)
def test_what_cannot_be_done_is_refused(run: Run, more: list[str], code: int, message: str) -> None:
    outcome = run(*more)
    assert outcome.code == code and message in outcome.err, outcome.err


def test_a_line_that_cannot_be_used_is_named(run: Run) -> None:
    write("q/requests.jsonl", '{"documents": ["a.txt"], "query": "Who?"}\n{"documents": ["a.txt"], "qery": "Who?"}\n')
    outcome = run()
    assert outcome.code == 1 and "q/requests.jsonl: line 2: " in outcome.err and "qery" in outcome.err


def test_one_link_is_verified_by_what_it_asks(model: Path, texts: tuple[Path, Path]) -> None:
    def ask(query: str, share: float, *more: object) -> Outcome:
        return pic(
            "link",
            "a.txt",
            "-q",
            query,
            "-m",
            model,
            "--store",
            "st",
            "--max-new-tokens",
            1,
            "--verify",
            share,
            "--algo",
            "legolink-16",
            *more,
        )

    answered = ask("Who?", 1)
    assert answered.code == 0 and "1 of 1 answers verified" in answered.err
    assert "speedup" not in answered.out and ask("Who?", 0, "--json").json["compare"] is None
    picked = [ask(f"Who {i}?", 0.5, "--json").json["compare"] is not None for i in range(6)]
    assert picked == [ask(f"Who {i}?", 0.5, "--json").json["compare"] is not None for i in range(6)]
    assert ask("Who?", 1, "--max-kl", 0).code == 1


def test_a_share_of_requests_is_picked_and_a_larger_one_has_them_all() -> None:
    requests = [str(i) for i in range(4000)]
    few, many = Canary(0.05), Canary(0.2)
    picked = [request for request in requests if few.picks(request)]
    assert 0.04 < len(picked) / len(requests) < 0.06 and all(many.picks(request) for request in picked)
    assert not any(Canary(0).picks(request) for request in requests) and all(map(Canary(1).picks, requests))
    assert [Canary(0.05, 1).picks(request) for request in requests] != [few.picks(request) for request in requests]


def test_drift_counts_what_differs() -> None:
    def comparison(kl: float, same: bool, answer_kl: float | None = None) -> Comparison:
        return Comparison("x", 1.0, 2.0, kl, same, same, 1, answer_kl)

    drift = Drift.of(10, [comparison(0.1, True), comparison(0.3, False)])
    assert (drift.verified, drift.kl_max, drift.differ) == (2, 0.3, 1) and drift.kl_mean == pytest.approx(0.2)
    whole = Drift.of(10, [comparison(0.1, True, 2.0), comparison(0.3, False, 4.0)])
    assert (drift.nats, whole.nats) == (drift.kl_mean, 3.0) and drift.kl_mean == whole.kl_mean
    require_little(drift, 1.0, "it has")
    with pytest.raises(InputError, match="--max-kl"):
        require_little(whole, 1.0, "it has")
    assert str(Drift.of(3, [])) == "none of 3 answers was verified"
    assert wilson(0, 100) == pytest.approx((0.0, 0.03699), abs=1e-4)  # Wilson (1927), as scipy has it
    assert wilson(10, 100) == pytest.approx((0.05523, 0.17437), abs=1e-4)
