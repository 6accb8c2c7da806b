"""`pic plan`, and `--ratio auto` of `pic link`: what was measured is made up here, so that every number is known."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from commands.run import Outcome, pic, write
from pictool.controller import calibration as profile
from pictool.controller import measuring as measure
from pictool.controller.measuring import Measured, stored_bytes
from pictool.runtime import products

TOKEN_BYTES = 384  # of the tiny model: 2 × 3 layers × 2 heads × 8 dims × 4 bytes
TOKEN_S = 1e-3  # of a prefill
KEYS = [
    "model", "algo", "ratio", "tokens", "objects", "bytes", "kv_bytes", "decode_s", "prefill", "recompute_s",
    "bfloat16_gain", "tiers", "choice", "check",
]  # fmt: skip
TIERS = """
tiers:
  - {name: fast, read_gb_s: 10, price_gb_month: 2}
  - {name: slow, read_gb_s: 0.001, latency_ms: 40, price_gb_month: 0.01}
  - {name: disk, path: ., price_gb_month: 0.2}
  - {name: store, price_gb_month: 0.1}
"""


@dataclass
class Machine:
    """A machine on which a prefill takes a millisecond a token, and loading `load_s` seconds of that."""

    load_s: float = 1e-4
    measured: int = 0
    num_busy: int = 0  # measurements of prefill during which the machine is busy

    def compute(self, *_: object) -> Measured:
        self.measured += 1
        self.num_busy -= 1
        return Measured([[n - 2.0, 2.0, 1.0, n * TOKEN_S] for n in (64, 512)], 0.8 if self.num_busy >= 0 else 0.0)

    def loads(self, *_: object) -> Measured:
        self.measured += 1
        return Measured([[n * TOKEN_BYTES, 1.0, n * self.load_s, 1e-9, n * self.load_s, 1e-9] for n in (64, 512)])

    def decoding(self, *_: object) -> Measured:
        """A quarter of the bytes is read; decoding takes as long as loading plain."""
        self.measured += 1
        plain = [n * self.load_s for n in (64, 512)]
        rows = [[n * TOKEN_BYTES, 1.0, n * TOKEN_BYTES / 4, s, 1.25 * s] for n, s in zip((64, 512), plain, strict=True)]
        return Measured(rows)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made_up = Machine()
    monkeypatch.setattr(profile, "measure_compute", made_up.compute)
    monkeypatch.setattr(profile, "measure_loads", made_up.loads)
    monkeypatch.setattr(profile, "measure_decoding", made_up.decoding)
    monkeypatch.setattr(products, "bfloat16_gain", lambda: 1.0)
    monkeypatch.setattr(profile, "MAX_DISAGREEMENT", 1e9)  # of links with times that are made up
    return made_up


@pytest.fixture
def plan(model: Path, texts: tuple[Path, Path], machine: Machine) -> Any:
    """Runs `pic plan` on the tiny model, where a.txt and b.txt stand."""
    return lambda *arguments, **more: pic("plan", *arguments, "-m", model, **more)


def test_json_has_the_delays_of_every_tier(plan: Any, model: Path) -> None:
    found = plan("a.txt", "b.txt", "-q", "Who knows why?", "--json").json
    assert list(found) == KEYS and found["check"] is None
    assert (found["model"], found["algo"], found["ratio"]) == (str(model), "cacheblend", 0.15)
    linked = pic("link", "a.txt", "b.txt", "-q", "Who knows why?", "--max-new-tokens", 1, "-m", model, "--json").json
    assert found["tokens"] == {name: linked["tokens"][name] for name in ("context", "tail")}
    assert (found["objects"], found["bytes"]) == (3, found["tokens"]["context"] * TOKEN_BYTES)  # with the head
    names = [one["name"] for one in found["tiers"]]
    assert names == ["memory", "nvme", "network-ssd", "object-store", "store"]
    context = found["tokens"]["context"] * TOKEN_S
    assert found["prefill"]["context_s"] == pytest.approx(context)
    store = found["tiers"][-1]
    assert store["load_s"] == pytest.approx(0.1 * context * 2 / 3)  # cacheblend needs nothing of layer 0
    assert store["cost_month"] == pytest.approx(0.1 * found["bytes"] / 1e9)
    assert found["recompute_s"] > context / 3 and store["is_hidden"] and store["ratio"] == 0.15


def test_the_table_says_the_same(plan: Any) -> None:
    outcome = plan("a.txt", "b.txt", "--tiers", write("t.yaml", TIERS))
    lines = outcome.out.splitlines()
    assert lines[0].startswith("prompt ") and "3 objects" in lines[0]
    assert re.split(r"  +", lines[4].strip()) == ["tier", "load", "recompute", "TTFT", "ratio", "$/month"]
    assert [line.split()[0] for line in lines[5:9]] == ["fast", "slow", "disk", "store"]
    assert len({len(line) for line in lines[4:9]}) == 1
    assert lines[-3].startswith("ratio     0.15 on store: loading (")
    assert lines[-2].startswith("tier      store for ratio 0.15: the cheapest whose loading (")
    assert re.fullmatch(r"measured  [-0-9]{10} [:0-9]{5}, repeats within 0%; --measure measures again", lines[-1])


@pytest.mark.parametrize(("gain", "lines"), [(0.4, 0), (2.0, 1)])
def test_it_says_what_bfloat16_would_give(plan: Any, gain: float, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "bfloat16_gain", lambda: gain)
    told = "bfloat16  products are 2.0x as fast, and objects half as large: --dtype bfloat16\n"
    assert plan("a.txt").out.count(told) == lines
    assert plan("a.txt", "--json").json["bfloat16_gain"] == gain
    assert "bfloat16  " not in plan("a.txt", "--dtype", "bfloat16").out


def test_it_is_measured_once_and_says_so(plan: Any, machine: Machine) -> None:
    first, second, again = plan("a.txt"), plan("a.txt"), plan("a.txt", "--measure")
    assert [len(one.err.splitlines()) for one in (first, second, again)] == [2, 0, 2]
    assert "measuring prefill" in first.err and "measuring loading from " in first.err
    assert machine.measured == 4 and first.out == second.out == again.out


def test_a_plan_never_follows_from_a_busy_machine(plan: Any, machine: Machine) -> None:
    even = plan("a.txt").out
    machine.num_busy = 2
    refused = plan("a.txt", "--measure")
    assert (refused.code, refused.out) == (1, "") and machine.measured == 4  # prefill and loads; then prefill twice
    assert "this machine is busy: measured times of prefill were 80% apart" in refused.err
    again = plan("a.txt")  # what was kept is of the busy machine
    assert (again.code, again.out) == (0, even) and machine.measured == 5


def test_a_document_is_read_from_stdin(plan: Any) -> None:
    named, read = plan("a.txt", "b.txt", "--json"), plan("-", "b.txt", "--json", stdin=Path("a.txt").read_text())
    assert read.json["tokens"] == named.json["tokens"]


def test_a_slow_store_gets_a_larger_ratio(plan: Any, machine: Machine) -> None:
    machine.load_s = TOKEN_S
    found = plan("a.txt", "b.txt", "--algo", "speccache", "--json").json
    store = found["tiers"][-1]
    assert 0.15 < store["ratio"] < 1 and store["ratio"] == pytest.approx(store["ratio_equal"], abs=0.0051)
    outcome = plan("a.txt", "b.txt", "--algo", "speccache")
    assert f"{store['ratio']:g} on store: recompute (" in outcome.out
    assert "so it costs no time" in outcome.out and "a second model" in outcome.err


def test_a_store_slower_than_the_model_is_not_worth_loading_from(plan: Any, machine: Machine) -> None:
    machine.load_s = 10 * TOKEN_S
    outcome = plan("a.txt", "--algo", "speccache")
    assert "1 on store: computing everything (" in outcome.out
    assert "for ratio 0.15: recompute (" in outcome.out and "hides no tier's loading" in outcome.out


def test_a_stated_tier_is_read_by_the_loader_as_it_is(plan: Any) -> None:
    tiers = write("t.yaml", TIERS)
    fast, slow, disk, store = plan("a.txt", "--tiers", tiers, "--json").json["tiers"]
    loader = 1e-4 / TOKEN_BYTES
    assert fast["speed"]["byte_s"] == pytest.approx(loader + 1e-10)
    assert slow["speed"]["byte_s"] == pytest.approx(loader + 1e-6)
    assert slow["speed"]["object_s"] == pytest.approx(3 * 0.04) and slow["speed"]["open_s"] == pytest.approx(3 * 0.04)
    assert disk["speed"] == store["speed"]


def test_a_fixed_ratio_finds_its_tier(plan: Any) -> None:
    tiers = write("t.yaml", TIERS.replace("latency_ms: 40", "latency_ms: 5"))
    small = plan("--tokens", 400, "--tiers", tiers, "--ratio", 0.15, "--algo", "speccache", "--json").json
    large = plan("--tokens", 400, "--tiers", tiers, "--ratio", 0.9, "--algo", "speccache", "--json").json
    assert (small["choice"]["tier"], large["choice"]["tier"]) == ("store", "slow")
    assert small["choice"]["is_hidden"] and large["choice"]["is_hidden"]


def test_a_policy_s_fields_change_its_delays(plan: Any) -> None:
    gradual, single, given = (
        plan("--tokens", 400, "-p", field, "--json").json for field in ("filter=gradual", "filter=single", "ratio=0.4")
    )
    assert single["recompute_s"] < gradual["recompute_s"] < given["recompute_s"]
    assert (gradual["ratio"], given["ratio"]) == (0.15, 0.4)


def test_a_length_needs_no_documents(plan: Any) -> None:
    found = plan("--tokens", 400, "--json").json
    assert (found["tokens"]["context"], found["objects"], found["bytes"]) == (400, 1, 400 * TOKEN_BYTES)
    assert plan("--tokens", 400, "--chunk-tokens", 100, "--json").json["objects"] == 4


def test_a_codec_s_bytes_and_decoding_count(plan: Any, machine: Machine) -> None:
    plain = plan("--tokens", 400, "--json").json
    coded = plan("--tokens", 400, "--codec", "int8", "--json").json
    assert (plain["kv_bytes"], plain["decode_s"]) == (plain["bytes"], 0)
    assert (coded["bytes"], coded["kv_bytes"]) == (plain["bytes"] / 4, plain["bytes"])
    assert coded["decode_s"] == pytest.approx(400 * machine.load_s)
    of_plain, of_coded = (found["tiers"][-1] for found in (plain, coded))
    assert of_coded["load_s"] == pytest.approx(1.25 * of_plain["load_s"])
    assert of_coded["cost_month"] == pytest.approx(of_plain["cost_month"] / 4)
    assert machine.measured == 3  # prefill, loads, decoding: once each
    out = plan("--tokens", 400, "--codec", "int8").out
    assert "0.2 MB of KV in 0.0 MB, 40.0 ms to decode)" in out


def test_compiled_objects_have_the_bytes_that_they_have(
    plan: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("PIC_SEPARATOR", "")  # whose KV is computed, and has no object
    before = plan("a.txt", "b.txt", "--codec", "zstd", "--json").json
    pic("compile", "a.txt", "b.txt", "--codec", "zstd", "-m", model)
    after = plan("a.txt", "b.txt", "--codec", "zstd", "--json").json
    assert before["bytes"] == before["kv_bytes"] / 4 and after["kv_bytes"] == before["kv_bytes"]
    compiled = [stored_bytes(path) for path in Path(".pic/objects").rglob("*.kvo")]
    head = before["kv_bytes"] - sum(plan(name, "--json").json["kv_bytes"] for name in ("a.txt", "b.txt"))
    assert len(compiled) == 2 and after["bytes"] == sum(compiled) + abs(head) / 4  # the head is still to be compiled


def test_the_codec_of_the_settings_is_planned_with(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIC_CODEC", "int4")
    assert plan("a.txt", "--json").json["decode_s"] > 0
    assert plan("a.txt", "--codec", "none", "--json").json["decode_s"] == 0


def test_check_links_and_compares(plan: Any) -> None:
    found = plan("a.txt", "b.txt", "--check", "--json").json
    check = found["check"]
    assert check["ratio"] == 0.15 and list(check) == ["ratio", "estimated", "measured", "error"]
    for name in ("load", "recompute", "ttft"):
        assert check["measured"][name] > 0
        assert check["error"][name] == pytest.approx(check["estimated"][name] / check["measured"][name] - 1)
    assert check["estimated"]["load"] == found["tiers"][-1]["load_s"]
    outcome = plan("a.txt", "b.txt", "--check", "--ratio", 0.5)
    header, *rows = outcome.out.splitlines()[-4:]
    assert re.split(r"  +", header) == ["ratio 0.5", "estimated", "measured", "error"]
    assert [row.split()[0] for row in rows] == ["load", "recompute", "TTFT"]


def test_it_plans_for_the_embedded_model(texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing made up; only short, and however busy this machine is."""
    monkeypatch.setattr(profile, "MAX_SCATTER", float("inf"))
    monkeypatch.setattr(measure, "_PREFILL_TOKENS", (64, 128))
    monkeypatch.setattr(measure, "_LOADS", ((1, 64), (4, 8)))
    outcome = pic("plan", *texts, "--check")
    assert outcome.code == 0 and outcome.out.startswith("prompt ") and "recompute " in outcome.out
    assert not list(Path.cwd().glob(".pic-*"))


# `pic link --ratio auto`


def auto(model: Path, *arguments: object) -> Outcome:
    return pic("link", "a.txt", "b.txt", "-q", "why?", "--max-new-tokens", 2, "-m", model, "--json", *arguments)


def test_auto_is_the_ratio_of_the_plan(plan: Any, model: Path, machine: Machine) -> None:
    machine.load_s = 1.5 * TOKEN_S
    planned = plan("a.txt", "b.txt", "-q", "why?", "--json").json
    outcome = auto(model, "--algo", "cacheblend", "--ratio", "auto")
    ratio = outcome.json["params"]["ratio"]
    assert 0.15 < ratio < 1 and ratio == planned["choice"]["ratio"]
    load, prefill = (1e3 * seconds for seconds in (planned["tiers"][-1]["load_s"], planned["prefill"]["context_s"]))
    assert f"pic: ratio {ratio:g} (load {load:.0f} ms, prefill {prefill:.0f} ms)\n" in outcome.err


def test_auto_knows_the_codec(plan: Any, model: Path, machine: Machine) -> None:
    machine.load_s = TOKEN_S
    planned = plan("a.txt", "b.txt", "-q", "why?", "--codec", "int8", "--json").json
    plain, coded = (
        auto(model, "--algo", "cacheblend", "--ratio", "auto", "--codec", codec).json for codec in ("none", "int8")
    )
    assert plain["params"]["ratio"] < coded["params"]["ratio"] == planned["choice"]["ratio"]


def test_auto_measures_once_and_says_so(
    model: Path, texts: tuple[Path, Path], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("PIC_SEPARATOR", "")
    first, second = (auto(model, "--algo", "cacheblend", "--ratio", "auto") for _ in range(2))
    assert machine.measured == 2
    assert "measuring prefill" in first.err and "measuring" not in second.err
    assert second.err == "pic: ratio 0.15 (load 5 ms, prefill 73 ms)\n"


def test_a_profile_that_a_link_disagrees_with_is_measured_again(
    model: Path, texts: tuple[Path, Path], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "MAX_DISAGREEMENT", 1e-6)
    first, second = (auto(model, "--algo", "cacheblend", "--ratio", "auto") for _ in range(2))
    assert first.err.splitlines()[-1].endswith("it is measured again next time")
    assert "measuring prefill" in second.err and machine.measured == 3  # the loads are kept


def test_a_field_may_say_auto(model: Path, texts: tuple[Path, Path], machine: Machine) -> None:
    assert auto(model, "--algo", "cacheblend", "-p", "ratio=auto").json["params"]["ratio"] == 0.15


def test_a_number_is_a_number(model: Path, texts: tuple[Path, Path]) -> None:
    assert auto(model, "--algo", "cacheblend", "--ratio", ".25").json["params"]["ratio"] == 0.25


@pytest.mark.parametrize("text", ["some", "", "0,5", "AUTO"])
def test_another_ratio_is_a_usage_error(model: Path, texts: tuple[Path, Path], text: str) -> None:
    outcome = auto(model, "--algo", "cacheblend", "--ratio", text)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"pic: error: --ratio {text}: must be a number from 0 to 1, or auto\n"


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_measured(
    model: Path, texts: tuple[Path, Path], machine: Machine
) -> None:
    outcome = auto(model, write("l.txt", "harbour " * 125), "--algo", "cacheblend", "--ratio", "auto")
    assert outcome.code == 1 and machine.measured == 0
    assert "512 positions" in outcome.err and "fewer or shorter" in outcome.err


def test_a_policy_without_a_ratio_is_planned_by_the_rows_that_it_chooses(plan: Any) -> None:
    found = plan("--tokens", 400, "--chunk-tokens", 100, "--algo", "legolink-16", "--json").json
    assert found["algo"] == "legolink" and found["ratio"] == pytest.approx(4 * 16 / 400)
    shares = [plan("--tokens", 400, "--algo", name, "--json").json["ratio"] for name in ("naive", "full")]
    assert shares == [0, 1]
    shown = plan("a.txt", "b.txt", "--algo", "legolink-16", "--check").out
    assert "as legolink chooses its rows" in shown


def test_a_policy_without_a_ratio_refuses_auto(model: Path, texts: tuple[Path, Path], machine: Machine) -> None:
    outcome = auto(model, "--algo", "legolink", "--ratio", "auto")
    assert outcome.code == 2 and outcome.err == "pic: error: legolink has no field 'ratio'; its fields are k\n"
    assert machine.measured == 0


# What a user can get wrong


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        ((), ("documents", "--tokens"), 2),
        (("a.txt", "--tokens", 5), ("--tokens", "documents"), 2),
        (("--tokens", 5, "--check"), ("--check", "--tokens"), 2),
        (("--tokens", 600), ("600 tokens of context", "512"), 1),
        (("nosuch.txt",), ("nosuch.txt", "no such file"), 1),
        (("a.txt", "-q", " "), ("query is empty",), 1),
        (("a.txt", "--algo", "nosuch"), ("nosuch", "cacheblend"), 2),
        (("a.txt", "--algo", "legolink", "--ratio", 0.2), ("legolink", "ratio"), 2),
        (("a.txt", "--ratio", 2), ("ratio", "from 0 to 1"), 2),
        (("a.txt", "-p", "ratio"), ("-p ratio", "FIELD=VALUE"), 2),
        (("a.txt", "--codec", "int9"), ("int9", "int8"), 2),
        (("a.txt", "-p", "depth=3"), ("cacheblend", "depth"), 2),
        (("a.txt", "--tiers", "nosuch.yaml"), ("nosuch.yaml", "cannot be read"), 1),
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


@pytest.mark.parametrize(
    ("tiers", "says"),
    [
        ("", ("tiers", "list")),
        ("tiers: fast", ("tiers", "list")),
        ("tiers: []", ("tiers", "list")),
        ("tier: []", ("unknown key tier",)),
        ("tiers: [fast]", ("tier 1", "mapping")),
        ("tiers: [{read_gb_s: 1}]", ("name of tier 1", "text")),
        ("tiers: [{name: 5, read_gb_s: 1}]", ("name of tier 1", "text")),
        ("tiers: [{name: a, speed: 1}]", ("tier a", "unknown key speed")),
        ("tiers: [{name: a, read_gb_s: 1}]", ("price_gb_month of tier a", "number", "None")),
        ("tiers: [{name: a, read_gb_s: 1, price_gb_month: -1}]", ("price_gb_month of tier a", "0 or more", "-1")),
        ("tiers: [{name: a, read_gb_s: 1, price_gb_month: .inf}]", ("price_gb_month of tier a",)),
        ("tiers: [{name: a, read_gb_s: 1, price_gb_month: 1" + 400 * "0" + "}]", ("price_gb_month of tier a",)),
        ("tiers: [{name: a, read_gb_s: 0, price_gb_month: 1}]", ("read_gb_s of tier a", "above 0")),
        ("tiers: [{name: a, read_gb_s: fast, price_gb_month: 1}]", ("read_gb_s of tier a", "'fast'")),
        ("tiers: [{name: a, read_gb_s: true, price_gb_month: 1}]", ("read_gb_s of tier a", "True")),
        ("tiers: [{name: a, read_gb_s: 1, latency_ms: -1, price_gb_month: 1}]", ("latency_ms of tier a",)),
        ("tiers: [{name: a, price_gb_month: 1}]", ("tier a", "read_gb_s", "path", "one of them")),
        ("tiers: [{name: a, read_gb_s: 1, path: ., price_gb_month: 1}]", ("tier a", "one of them")),
        ("tiers: [{name: a, path: ., latency_ms: 1, price_gb_month: 1}]", ("latency_ms of tier a", "read_gb_s")),
        ("tiers: [{name: a, path: [.], price_gb_month: 1}]", ("path of tier a", "text")),
        ("tiers: [{name: a, path: nosuch, price_gb_month: 1}]", ("path of tier a", "nosuch", "not a directory")),
        ("tiers: [{name: store, path: ., price_gb_month: 1}]", ("tier store", "path", "out")),
        ("tiers: [{name: a, read_gb_s: 1, price_gb_month: 1}]", ("no tier named store",)),
        (TIERS + "  - {name: fast, read_gb_s: 1, price_gb_month: 1}", ("fast", "two tiers")),
    ],
)
def test_a_tier_that_makes_no_sense_is_named(plan: Any, tiers: str, says: tuple[str, ...]) -> None:
    outcome = plan("a.txt", "--tiers", write("t.yaml", tiers))
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("pic: error: t.yaml: ") and outcome.err.count("\n") == 1
    assert all(word in outcome.err for word in says), outcome.err
