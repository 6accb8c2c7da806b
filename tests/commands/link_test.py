"""`pic link`: the contracts of docs/design.md §6 on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from commands.conftest import MORE, TEXT
from commands.run import Outcome, flip, pic, without_timing, write
from pictool.commands.link import Stream
from pictool.errors import UnwritableStoreError
from pictool.store.store import Store
from pictool.trace.format import read_trace

QUERY = ("-q", "Who knows why?", "--max-new-tokens", 12)
REPORT = ["answer", "finish_reason", "algo", "params", "model", "engine", "tokens", "timing", "compare", "request"]
TOKENS = ["head", "context", "tail", "prompt", "recomputed", "generated"]
TIMING = ["load_s", "select_s", "recompute_s", "ttft_s", "decode_s"]


@pytest.fixture
def link(model: Path, texts: tuple[Path, Path]) -> Any:
    """Runs `pic link` on the tiny model, where a.txt and b.txt stand."""
    return lambda *arguments, **more: pic("link", *arguments, "-m", model, **more)


def report(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = without_timing(outcome.json)
    return found


def test_json_has_exactly_the_contract_s_keys(link: Any, model: Path) -> None:
    found = link("a.txt", "b.txt", *QUERY, "--algo", "legolink-3", "--json").json
    assert list(found) == REPORT and list(found["tokens"]) == TOKENS and list(found["timing"]) == TIMING
    assert (found["algo"], found["params"], found["engine"]) == ("legolink", {"k": 3}, "torch")
    assert (found["model"], found["compare"]) == (str(model), None)
    tokens = found["tokens"]
    assert tokens["prompt"] == tokens["context"] + tokens["tail"]
    assert isinstance(tokens["recomputed"], float) and tokens["recomputed"] == 7.0  # 3 rows of both, 1 between
    assert 1 <= tokens["generated"] <= 12
    assert found["timing"]["ttft_s"] >= found["timing"]["recompute_s"] > 0


def test_a_text_is_compiled_first_and_says_so_once(link: Any) -> None:
    first, second = link("a.txt", "b.txt", *QUERY), link("a.txt", "b.txt", *QUERY)
    for name in ("a.txt", "b.txt"):
        assert sum(f"compiled first: {name}" in line for line in first.err.splitlines()) == 1
    assert len(second.err.splitlines()) == 1 and "context rows recomputed" in second.err
    assert first.out == second.out


def test_the_streamed_answer_is_that_of_the_json(link: Any) -> None:
    for more in ((), ("--temperature", 1.5, "--seed", 4)):
        outcome = link("a.txt", *QUERY, *more)
        assert outcome.out == link("a.txt", *QUERY, *more, "--json").json["answer"] + "\n"


def test_a_stream_holds_back_the_white_space_around(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Stream()
    for piece in (" \n", " Gul", "fair", " ", "\n", " and\t", "x ", "\n"):
        stream(piece)
    assert capsys.readouterr().out == "Gulfair \n and\tx"


def test_objects_keys_and_texts_give_the_same(link: Any, model: Path) -> None:
    key = pic("compile", "a.txt", "-o", "a.kvo", "-m", model, "--json").json["objects"][0]["key"]
    reports = [report(link(document, *QUERY, "--json")) for document in ("a.txt", "a.kvo", key, key[:8])]
    assert all(one == reports[0] for one in reports)


def test_a_document_or_the_query_is_read_from_stdin(link: Any, model: Path) -> None:
    asked = report(link("a.txt", "b.txt", *QUERY, "--json"))
    found = link("a.txt", "-", *QUERY, "--json", stdin=MORE)
    assert report(found) == asked and found.json["request"]["documents"] == ["a.txt", "-"]
    more = QUERY[2:]
    assert report(link("a.txt", "b.txt", "-q", "-", *more, "--json", stdin=f"{QUERY[1]}\n")) == asked
    write("-", TEXT)
    assert report(link("./-", "b.txt", *QUERY, "--json", stdin="unused")) == asked


@pytest.mark.parametrize(
    ("asked", "data", "code", "error"),
    [
        (("-", "-q", "-"), b"x", 2, "-: only one of documents and query"),
        (("-", "-", "-q", "x"), b"x", 2, "-: only one of documents and query"),
        (("-", "-q", "x"), b"", 1, "stdin: is empty"),
        (("a.txt", "-q", "-"), b"\xff", 1, "stdin: not UTF-8 at byte 0"),
    ],
)
def test_what_stdin_cannot_be_is_refused(link: Any, asked: tuple[str, ...], data: bytes, code: int, error: str) -> None:
    found = link(*asked, stdin=data)
    assert found.code == code and f"pic: error: {error}" in found.err


def test_compare_tells_speedup_and_agreement(link: Any) -> None:
    outcome = link("a.txt", "b.txt", *QUERY, "--algo", "naive", "--compare")
    answer, full, speedup, agreement = outcome.out.splitlines()[-4:]
    assert full.startswith("full ") and speedup.startswith("speedup ") and agreement.startswith("agreement ")
    found = link("a.txt", "b.txt", *QUERY, "--algo", "naive", "--compare", "--json").json
    assert found["answer"] == answer
    assert found["compare"]["answer"] == link("a.txt", "b.txt", *QUERY, "--algo", "full", "--json").json["answer"]
    assert found["compare"]["speedup"] > 0 and found["compare"]["kl"] > 0


def test_full_agrees_with_itself(link: Any) -> None:
    compare = link("a.txt", *QUERY, "--algo", "full", "--compare", "--json").json["compare"]
    assert compare["same_answer"] and compare["same_first_token"] and compare["kl"] < 1e-9


def test_a_trace_has_the_contract_s_tensors(link: Any) -> None:
    found = link("a.txt", "b.txt", *QUERY, "--algo", "legolink-3", "--trace", "out/t.safetensors", "--json").json
    tensors = load_file("out/t.safetensors")
    n, context = found["tokens"]["prompt"], found["tokens"]["context"]
    shapes = {name: (str(tensor.dtype), tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "tokens": ("int32", (n,)), "starts": ("int32", (5,)), "rows": ("bool", (3, n)), "logits": ("float32", (320,))
    }  # fmt: skip
    assert tensors["starts"].tolist()[:2] == [0, found["tokens"]["head"]] and tensors["starts"][-1] == context
    assert tensors["rows"][:, context:].all() and tensors["rows"][:, :context].sum(1).mean() == 7
    assert np.isfinite(tensors["logits"]).all()
    with safe_open("out/t.safetensors", "np") as file:
        assert json.loads(file.metadata()["report"]) == {key: found[key] for key in REPORT if key != "request"}


def test_a_stop_string_ends_the_answer(link: Any) -> None:
    whole = link("a.txt", *QUERY, "--json").json["answer"]
    stop = whole[3:5]
    outcome = link("a.txt", *QUERY, "--stop", "nowhere", "--stop", stop, "--json")
    assert outcome.json["answer"] == whole[: whole.index(stop)].strip()
    assert outcome.json["tokens"]["generated"] < 12


def test_sampling_is_reproducible_by_its_seed(link: Any) -> None:
    sampled = ("a.txt", *QUERY, "--temperature", 1.5, "--top-p", 0.9, "--json")
    answers = [report(link(*sampled, "--seed", seed))["answer"] for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_output_is_the_report_and_nothing_is_printed(link: Any) -> None:
    outcome = link("a.txt", *QUERY, "-o", "out/a.json")
    assert outcome.out == ""
    assert list(json.loads(Path("out/a.json").read_text())) == REPORT


def test_pic_yaml_gives_head_and_template(link: Any) -> None:
    options = ("a.txt", *QUERY, "--json")
    given = report(link(*options, "--head", "You know all.", "--query-template", "{query}!"))
    write("pic.yaml", 'head: You know all.\nquery_template: "{query}!"\n')
    assert report(link(*options)) == given
    assert report(link(*options, "--head", ""))["tokens"]["head"] == 1


def test_the_separator_is_a_setting(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("a.txt", "b.txt", *QUERY, "--json", "--trace", "t")

    def text(*more: Any) -> str:
        assert link(*options, *more).code == 0
        return "".join(read_trace(Path("t")).texts)

    blank = text()
    write("pic.yaml", 'separator: "\\n***\\n"\n')
    stars = text()
    monkeypatch.setenv("PIC_SEPARATOR", "")
    joined = text()
    assert stars.count("***\n") == blank.count("\n\n") == 2
    assert stars.replace("***\n", "") == blank.replace("\n\n", "\n") == joined
    assert text("--separator", "\n\n") == blank


@pytest.mark.parametrize("algo", ["fixup", "fixup-10", "fixup:fallback=legolink"])
def test_a_policy_that_left_is_one_line(link: Any, algo: str) -> None:
    refused = link("a.txt", *QUERY, "--algo", algo)
    assert refused.code == 2 and len(refused.err.splitlines()) == 1 and f"{algo!r}: was removed" in refused.err


# Several policies, a store that cannot be written, texts in memory


def test_several_policies_are_compared_side_by_side(link: Any) -> None:
    outcome = link("a.txt", "b.txt", *QUERY, "--algo", "legolink-3", "--algo", "naive", "--algo", "full")
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["policy", "TTFT", "ms", "speedup", "rows", "KL", "KL", "all", "same", "answer"]
    assert [line.split()[0] for line in lines[1:]] == ["legolink-3", "naive", "full", "full"]
    assert all(len(line) <= 80 for line in lines)
    reports = link("a.txt", "b.txt", *QUERY, "--algo", "legolink-3", "--algo", "naive", "--json").json
    alone = link("a.txt", "b.txt", *QUERY, "--algo", "legolink-3", "--compare", "--json").json
    for name in ("answer", "algo", "params", "tokens"):
        assert reports[0][name] == alone[name]
    assert reports[0]["compare"]["kl"] == pytest.approx(alone["compare"]["kl"], abs=1e-6)
    assert reports[1]["algo"] == "naive"


@pytest.mark.parametrize("more", [("--auto-ratio",), ("--trace", "t")])
def test_what_is_of_one_policy_is_refused_beside_several(link: Any, more: tuple[Any, ...]) -> None:
    outcome = link("a.txt", *QUERY, "--algo", "naive", "--algo", "legolink-3", *more)
    assert outcome.code == 2 and outcome.err.startswith(f"pic: error: {more[0]}: applies to")


def test_a_grid_is_several_policies(link: Any) -> None:
    reports = link("a.txt", *QUERY, "--algo", "legolink:k=2,3", "--json").json
    assert [report["params"]["k"] for report in reports] == [2, 3]


def test_the_report_has_what_is_needed_to_ask_again(link: Any, model: Path) -> None:
    asked = link("a.txt", *QUERY, "--temperature", 1, "--seed", 4, "--json").json["request"]
    (compiled,) = pic("compile", "a.txt", "-m", model, "--json").json["objects"]
    assert asked["objects"] == [{"source": "a.txt", "key": compiled["key"]}] and asked["documents"] == ["a.txt"]
    assert (asked["query"], asked["sampling"]["seed"], asked["store"]) == (QUERY[1], 4, ".pic")


@pytest.mark.parametrize("policy", ["legolink-3", "cacheblend-30", "prefix"])
def test_a_store_that_cannot_be_written_costs_a_warning(
    link: Any, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = link("a.txt", "b.txt", *QUERY, "--algo", policy, "--store", "good", "--json").json

    def full(*_: object, **__: object) -> None:
        raise UnwritableStoreError(".pic: cannot be written (No space left on device); nothing was changed")

    whole = Store.put

    def put(store: Store, *arguments: Any, **more: Any) -> Any:
        return full() if store.root == Path("bad") else whole(store, *arguments, **more)

    monkeypatch.setattr(Store, "put", put)
    outcome = link("a.txt", "b.txt", *QUERY, "--algo", policy, "--store", "bad", "--json")
    assert without_timing(outcome.json) == without_timing(expected)
    assert sum("No space left on device" in line for line in outcome.err.splitlines()) == 1
    assert list(Path("bad").rglob("*.kvo")) == [] and not list(Path("/dev/shm").glob(".pic-scratch-*/objects/*/*"))


def test_a_damaged_object_in_a_store_that_cannot_be_written_is_compiled_into_memory(
    link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = link("a.txt", *QUERY, "--algo", "legolink-3", "--json").json
    for path in Path(".pic").rglob("*.kvo"):
        flip(path)
    before = {path: path.read_bytes() for path in Path(".pic").rglob("*.kvo")}

    def stuck(*_: object) -> None:
        raise UnwritableStoreError("is damaged, and cannot be removed (Read-only file system)")

    monkeypatch.setattr("pictool.linker.objects.take_out", stuck)
    outcome = link("a.txt", *QUERY, "--algo", "legolink-3", "--json")
    assert without_timing(outcome.json) == without_timing(expected) and "its text is compiled again" in outcome.err
    assert {path: path.read_bytes() for path in Path(".pic").rglob("*.kvo")} == before


def test_without_documents_the_summary_says_so(link: Any) -> None:
    assert "no documents, nothing linked" in link(*QUERY).err


def test_what_is_no_document_is_told_before_a_model_is_opened(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object) -> None:
        raise AssertionError("a model was opened")

    monkeypatch.setattr("pictool.commands.link.open_model", opened)
    write("e.txt", "")
    for name, says in (
        ("e.txt", "e.txt: "),
        ("gone.txt", "gone.txt: "),
        ("The harbour was quiet.", "pictool.Text("),
        ("The harbour was quiet. " * 500, "pictool.Text("),
    ):
        outcome = link(name, *QUERY)
        assert outcome.code == 1 and says in outcome.err
