"""`pic plan`, and `--auto-ratio` of `pic link`: what was measured is made up here, so that every number is known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from commands.run import Outcome, pic, write
from pictool.controller import profile
from pictool.controller.profile import Measurements

TOKEN_BYTES = 384  # of the tiny model: 2 × 3 layers × 2 heads × 8 dims × 4 bytes
TOKEN_S = 1e-3  # of a prefill
KEYS = [
    "model", "algo", "ratio", "tokens", "objects", "bytes", "prefill_s", "recompute_s", "devices", "choice",
]  # fmt: skip


@dataclass
class Machine:
    """A machine on which a prefill takes a millisecond a token, and loading `load_s` seconds of that."""

    load_s: float = 1e-4
    measured: int = 0

    def compute(self, *_: object) -> Measurements:
        self.measured += 1
        return [[62.0, 2.0, 1.0, 0.064], [510.0, 2.0, 1.0, 0.512], [510.0, 2.0, 0.125, 0.06575]]

    def loads(self, model: object, place: object, codec: str) -> Measurements:
        """Coded, a quarter of the bytes is read, and it takes a quarter longer."""
        self.measured += 1
        share, longer = (1.0, 1.0) if codec == "none" else (0.25, 1.25)
        tokens = (64, 512)
        return [[n * TOKEN_BYTES, 1.0, n * TOKEN_BYTES * share, *[n * self.load_s * longer] * 2] for n in tokens]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made_up = Machine()
    monkeypatch.setattr(profile, "measure_compute", made_up.compute)
    monkeypatch.setattr(profile, "measure_loads", made_up.loads)
    return made_up


@pytest.fixture
def plan(model: Path, texts: tuple[Path, Path], machine: Machine) -> Any:
    """Runs `pic plan` on the tiny model, where a.txt and b.txt stand."""
    return lambda *arguments, **more: pic("plan", *arguments, "-m", model, **more)


def test_json_has_the_delays_on_every_device(plan: Any, model: Path) -> None:
    found = plan("a.txt", "b.txt", "-q", "Who knows why?", "--read-gb-s", "0.001,10", "--json").json
    assert list(found) == KEYS
    assert (found["model"], found["algo"], found["ratio"]) == (str(model), "cacheblend", 0.15)
    linked = pic("link", "a.txt", "b.txt", "-q", "Who knows why?", "--max-new-tokens", 1, "-m", model, "--json").json
    assert found["tokens"] == {name: linked["tokens"][name] for name in ("context", "tail")}
    assert (found["objects"], found["bytes"]) == (3, found["tokens"]["context"] * TOKEN_BYTES)  # with the head
    store, slow, fast = found["devices"]
    assert [device["name"] for device in found["devices"]] == ["store", "0.001 GB/s", "10 GB/s"]
    context = found["tokens"]["context"] * TOKEN_S
    assert found["recompute_s"] > context / 3
    assert store["load_s"] == pytest.approx(0.1 * context * 2 / 3)  # cacheblend needs nothing of layer 0
    assert slow["load_s"] == pytest.approx(store["load_s"] + found["bytes"] / 1e6 * 2 / 3)
    assert fast["load_s"] == pytest.approx(store["load_s"] + found["bytes"] / 1e10 * 2 / 3)
    assert fast["is_hidden"] and fast["ratio"] == 0.15 and fast["ttft_s"] == found["recompute_s"]


@pytest.mark.parametrize(
    ("rates", "ratio", "device"),
    [("0.0001", 0.15, None), ("0.0001,0.002,5", 0.15, "5 GB/s"), ("0.0001,0.002,5", 0.9, "0.002 GB/s")],
)
def test_the_cheapest_device_is_the_first_that_is_hidden(
    plan: Any, rates: str, ratio: float, device: str | None
) -> None:
    found = plan("--tokens", 400, "--algo", f"speccache:ratio={ratio}", "--read-gb-s", rates, "--json").json
    assert found["choice"]["device"] == device


def test_the_table_says_the_same(plan: Any) -> None:
    lines = plan("a.txt", "b.txt").out.splitlines()
    assert "3 objects" in lines[0] and lines[1].split() == ["device", "load", "recompute", "TTFT", "free", "ratio"]
    assert [line.split()[0] for line in lines[3:8]] == ["store", "0.5", "1", "5", "100"]
    assert lines[-2].startswith("ratio   0.15 ") and lines[-1].startswith("device  0.5 GB/s ")


def test_it_is_measured_once_and_says_so(plan: Any, machine: Machine) -> None:
    first, second, again = plan("a.txt"), plan("a.txt"), plan("a.txt", "--measure")
    assert [len(one.err.splitlines()) for one in (first, second, again)] == [2, 0, 2]
    assert "measuring prefill" in first.err and "measuring loading from " in first.err
    assert machine.measured == 4 and first.out == second.out == again.out


def test_a_document_is_read_from_stdin(plan: Any) -> None:
    named, read = plan("a.txt", "b.txt", "--json"), plan("-", "b.txt", "--json", stdin=Path("a.txt").read_text())
    assert read.json["tokens"] == named.json["tokens"]


def test_a_slow_store_gets_a_larger_ratio(plan: Any, machine: Machine) -> None:
    machine.load_s = TOKEN_S
    found = plan("a.txt", "b.txt", "--algo", "speccache", "--json").json
    assert 0.15 < found["devices"][0]["ratio"] == found["choice"]["ratio"] < 1


def test_a_store_slower_than_the_model_is_not_worth_loading_from(plan: Any, machine: Machine) -> None:
    machine.load_s = 10 * TOKEN_S
    found = plan("a.txt", "--algo", "speccache", "--json").json
    assert found["choice"] == {"ratio": 1, "device": None}


def test_a_length_needs_no_documents(plan: Any) -> None:
    found = plan("--tokens", 400, "--json").json
    assert (found["tokens"]["context"], found["objects"], found["bytes"]) == (400, 1, 400 * TOKEN_BYTES)
    assert plan("--tokens", 400, "--chunk-tokens", 100, "--json").json["objects"] == 4


def test_a_codec_s_bytes_and_decoding_count(plan: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plan("--tokens", 400, "--json").json
    monkeypatch.setenv("PIC_CODEC", "int8")
    coded = plan("--tokens", 400, "--json").json
    assert coded["bytes"] == plain["bytes"] / 4 and machine.measured == 3  # prefill, and loads twice
    of_plain, of_coded = (found["devices"][0]["load_s"] for found in (plain, coded))
    assert of_coded == pytest.approx(1.25 * of_plain)
    assert plan("--tokens", 400, "--codec", "none", "--json").json == plain


def test_it_plans_for_the_embedded_model(texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing made up; only short."""
    monkeypatch.setattr(profile, "_PREFILL_TOKENS", (64, 128))
    monkeypatch.setattr(profile, "_LOADS", ((1, 64), (4, 8)))
    outcome = pic("plan", *texts)
    assert outcome.code == 0 and "recompute" in outcome.out
    assert not list(Path.cwd().glob(".pic-*"))


# `pic link --auto-ratio`


def auto(model: Path, *arguments: object) -> Outcome:
    return pic("link", "a.txt", "b.txt", "-q", "why?", "--max-new-tokens", 2, "-m", model, "--json", *arguments)


def test_auto_is_the_ratio_of_the_plan(plan: Any, model: Path, machine: Machine) -> None:
    machine.load_s = 1.5 * TOKEN_S
    planned = plan("a.txt", "b.txt", "-q", "why?", "--json").json
    outcome = auto(model, "--algo", "cacheblend", "--auto-ratio")
    ratio = outcome.json["params"]["ratio"]
    assert 0.15 < ratio < 1 and ratio == planned["choice"]["ratio"]
    load, prefill = 1e3 * planned["devices"][0]["load_s"], 1e3 * planned["tokens"]["context"] * TOKEN_S
    assert f"pic: ratio {ratio:g} (load {load:.0f} ms, prefill {prefill:.0f} ms)\n" in outcome.err


def test_auto_knows_the_codec(plan: Any, model: Path, machine: Machine) -> None:
    machine.load_s = TOKEN_S
    planned = plan("a.txt", "b.txt", "-q", "why?", "--codec", "int8", "--json").json
    plain, coded = (
        auto(model, "--algo", "cacheblend", "--auto-ratio", "--codec", codec).json for codec in ("none", "int8")
    )
    assert plain["params"]["ratio"] < coded["params"]["ratio"] == planned["choice"]["ratio"]


def test_auto_measures_once_and_says_so(
    model: Path, texts: tuple[Path, Path], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("PIC_SEPARATOR", "")
    first, second = (auto(model, "--algo", "cacheblend", "--auto-ratio") for _ in range(2))
    assert machine.measured == 2
    assert "measuring prefill" in first.err and "measuring" not in second.err
    assert second.err == "pic: ratio 0.15 (load 5 ms, prefill 73 ms)\n"


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_measured(
    model: Path, texts: tuple[Path, Path], machine: Machine
) -> None:
    outcome = auto(model, write("l.txt", "harbour " * 125), "--algo", "cacheblend", "--auto-ratio")
    assert outcome.code == 1 and machine.measured == 0
    assert " 512 " in outcome.err


def test_a_policy_without_a_ratio_refuses_auto(model: Path, texts: tuple[Path, Path], machine: Machine) -> None:
    outcome = auto(model, "--algo", "legolink", "--auto-ratio")
    assert outcome.code == 2 and outcome.err.startswith("pic: error: --auto-ratio: legolink ")
    assert machine.measured == 0


# What a user can get wrong


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        ((), ("documents", "--tokens"), 2),
        (("a.txt", "--tokens", 5), ("--tokens", "documents"), 2),
        (("--tokens", 600), ("600 tokens of context", "512"), 1),
        (("nosuch.txt",), ("nosuch.txt",), 1),
        (("a.txt", "-q", " "), ("query",), 1),
        (("a.txt", "--algo", "nosuch"), ("nosuch", "cacheblend"), 2),
        (("a.txt", "--algo", "legolink"), ("legolink", "ratio"), 2),
        (("a.txt", "--algo", "cacheblend:ratio=2"), ("ratio",), 2),
        (("a.txt", "--codec", "int9"), ("int9", "int8"), 2),
        (("a.txt", "--algo", "cacheblend:depth=3"), ("cacheblend", "depth"), 2),
        (("a.txt", "--read-gb-s", "fast"), ("--read-gb-s fast",), 2),
        (("a.txt", "--read-gb-s", "1,0"), ("--read-gb-s 1,0",), 2),
        (("a.txt", "--read-gb-s", "inf"), ("--read-gb-s inf",), 2),
        (("a.txt", "--store", "b.txt"), ("b.txt", "--store"), 1),
    ],
)
def test_a_mistake_is_one_line(
    plan: Any, machine: Machine, arguments: tuple[object, ...], says: tuple[str, ...], code: int
) -> None:
    outcome = plan(*arguments)
    assert (outcome.code, outcome.out, machine.measured) == (code, "", 0)
    assert outcome.err.startswith("pic: error: ") and outcome.err.count("\n") == 1
    assert all(word in outcome.err for word in says), outcome.err
