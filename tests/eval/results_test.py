"""Results files: what is written lasts, what is torn is dropped, and nothing else is continued."""

from __future__ import annotations

import fcntl
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eval.shared import CASES, CaseList, case, model

from pictool.errors import InputError
from pictool.eval.cases import SpecOptions
from pictool.eval.results import MEASURED, CaseResult, ResultsHeader, Times, make_header, open_results, settings_of

PATH = Path("out/results.jsonl")
ROW = CaseResult(
    "one", "naive", "x", "naive", {}, None, "f1", {"f1": 0.5, "em": 0.0}, "naïve 🙂\u2028", 0.25, 0.5, 1.0, 3, 4, 20,
    15, 0.0, 960, Times(0.1, 0.2, 0.3, 0.4, 0.5), 4096,
)  # fmt: skip
ROWS = [ROW, replace(ROW, label="mapreduce", kl=None, answer_kl=None, peak_bytes=None), replace(ROW, id="two")]
GOLDEN = [  # of a header and two rows
    '{"format": "pictool-eval", "version": 2, "pictool": "0.1.0", "torch": "2.13.0", '
    '"dataset": {"name": "world", "params": {"seed": 0}, "cases": 4, "sha256": "ab"}, '
    '"model": {"name": "embedded", "fingerprint": "cd", "tokenizer": "ef", "prompts": "01", "dtype": "float32", '
    '"device": "cpu"}, "settings": {"chunk_tokens": 64, "head": "Hé.", "query_template": null, '
    '"max_new_tokens": null, "codec": "none"}, "threads": 2, "machine": {"cpu": "x", "cores": 8, "gpu": null}}',
    '{"id": "one", "label": "naive", "kind": "x", "algo": "naive", "params": {}, "other_model": null, '
    '"metric": "f1", "scores": {"f1": 0.5, "em": 0.0}, "answer": "naïve 🙂\u2028", "kl": 0.25, "answer_kl": 0.5, '
    '"agreement": 1.0, "common_prefix": 3, "generated": 4, "tokens": 20, "context": 15, "rows": 0.0, '
    '"bytes_read": 960, "timing": {"ttft_s": 0.1, "load_s": 0.2, "select_s": 0.3, '
    '"recompute_s": 0.4, "decode_s": 0.5}, '
    '"peak_bytes": 4096}',
    '{"id": "one", "label": "mapreduce", "kind": "x", "algo": "naive", "params": {}, "other_model": null, '
    '"metric": "f1", "scores": {"f1": 0.5, "em": 0.0}, "answer": "naïve 🙂\u2028", "kl": null, "answer_kl": null, '
    '"agreement": 1.0, "common_prefix": 3, "generated": 4, "tokens": 20, "context": 15, "rows": 0.0, '
    '"bytes_read": 960, "timing": {"ttft_s": 0.1, "load_s": 0.2, "select_s": 0.3, '
    '"recompute_s": 0.4, "decode_s": 0.5}, '
    '"peak_bytes": null}',
]  # fmt: skip


@pytest.fixture(scope="module")
def header() -> ResultsHeader:
    return make_header(model(), CaseList(), CASES, SpecOptions())


@pytest.fixture
def written(header: ResultsHeader) -> bytes:
    """The bytes of a file of two appends."""
    with open_results(PATH, header) as file:
        file.append(ROWS[:2])
        file.append(ROWS[2:])
    return PATH.read_bytes()


def reopen(header: ResultsHeader) -> tuple[list[CaseResult], list[str]]:
    notes: list[str] = []
    with open_results(PATH, header, on_note=notes.append) as file:
        return list(file.results.values()), notes


def refusal(header: ResultsHeader) -> str:
    with pytest.raises(InputError) as caught:
        reopen(header)
    return str(caught.value)


def test_rows_come_back_as_they_were_written(header: ResultsHeader, written: bytes) -> None:
    assert reopen(header) == (ROWS, [])
    assert PATH.read_bytes() == written


def test_it_is_jsonl_with_a_header(header: ResultsHeader, written: bytes) -> None:
    first, *others = [json.loads(line) for line in written.decode().rstrip("\n").split("\n")]
    assert (first["format"], first["version"], first["threads"]) == ("pictool-eval", 2, 1)
    assert [line["label"] for line in others] == ["naive", "mapreduce", "naive"]
    assert set(ROW.report()) - set(ROW.numbers) == set(MEASURED) == {"timing", "peak_bytes"}


def test_the_format_is_fixed_byte_by_byte() -> None:
    """Version 2: keys and their order, and what names an experiment."""
    fixed = ResultsHeader(
        "pictool-eval", 2, "0.1.0", "2.13.0", {"name": "world", "params": {"seed": 0}, "cases": 4, "sha256": "ab"},
        {"name": "embedded", "fingerprint": "cd", "tokenizer": "ef", "prompts": "01", "dtype": "float32",
         "device": "cpu"},
        settings_of(SpecOptions(chunk_tokens=64, head="Hé.")), 2, {"cpu": "x", "cores": 8, "gpu": None},
    )  # fmt: skip
    with open_results(PATH, fixed) as file:
        file.append(ROWS[:2])
    assert PATH.read_text(encoding="utf-8").split("\n") == [*GOLDEN, ""]
    assert fixed.digest == "6beffc1fbb62d5e629eaad3742bdc14eb687d580e2875da5affb0cd73dcd4336"


def test_wherever_it_is_cut_off_whole_lines_are_kept_and_the_rest_can_be_done_again(
    header: ResultsHeader, written: bytes
) -> None:
    ends = [i + 1 for i, byte in enumerate(written) if byte == ord("\n")]
    for size in [*range(0, len(written), 37), *ends, *(end - 1 for end in ends)]:
        PATH.write_bytes(written[:size])
        kept = max(0, sum(end <= size for end in ends) - 1)
        with open_results(PATH, header) as file:
            assert list(file.results.values()) == ROWS[:kept]
            file.append(ROWS[kept:])
        assert PATH.read_bytes() == written


def test_a_dropped_line_is_told(header: ResultsHeader, written: bytes) -> None:
    PATH.write_bytes(written[:-9])
    rows, (note,) = reopen(header)
    assert rows == ROWS[:2] and "the last line is incomplete" in note
    PATH.write_bytes(written[: written.rindex(b"{")] + b"\0\0\0\n")
    assert reopen(header)[0] == ROWS[:2]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"label": "mapreduce"', b'"label": mapreduce', "line 3: is not JSON"),
        (b'"label": "mapreduce"', b'"labels": "mapreduce"', "line 3: is not a row of this version"),
        (b'"label": "mapreduce"', b'"label": 7', "line 3: label has the invalid value 7"),
        (b'"load_s": 0.2', b'"load_s": "0.2"', "line 2: timing.load_s has the invalid value '0.2'"),
        (b'"label": "mapreduce"', b'"label": "naive"', "line 3: case one under naive"),
        (b'"agreement": ', b'"agreement": NaN, "kl": ', "line 2: is not JSON"),
        (b'"agreement": ', b'"agreement": 1e999, "kl": ', "line 2: is not JSON"),
        (b'"scores": {', b'"scores": {"x": [1], ', "line 2: scores.x has the invalid value [1]"),
        (b'"ttft_s": 0.', b'"ttft_s": -0.', "line 2: timing.ttft_s has the invalid value -0."),
        (b'"metric": "f1"', b'"metric": "f2"', "line 2: has no score for its metric 'f2'"),
    ],
)
def test_a_line_that_is_damaged_in_the_middle_is_refused(
    header: ResultsHeader, written: bytes, old: bytes, new: bytes, message: str
) -> None:
    PATH.write_bytes(written.replace(old, new, 1))
    assert f"{PATH}: {message}" in refusal(header)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pictool": "0.0"}, "pictool"),
        ({"torch": "1.0"}, "torch"),
        ({"settings": {**vars(SpecOptions()), "codec": "int8"}}, "codec"),
        ({"settings": {**vars(SpecOptions()), "head": "Hey."}}, "head"),
    ],
)
def test_another_experiment_is_refused(
    header: ResultsHeader, written: bytes, change: dict[str, Any], message: str
) -> None:
    found = refusal(replace(header, **change))
    assert message in found.partition("differs in ")[2]
    assert PATH.read_bytes() == written


def test_other_cases_and_other_models_are_told_apart_by_content(header: ResultsHeader, written: bytes) -> None:
    cases = [*CASES[:-1], replace(CASES[-1], answers=("he",))]
    assert "differs in dataset;" in refusal(make_header(model(), CaseList(), cases, SpecOptions()))
    other = model()
    other.dtype = "bfloat16"
    assert "differs in model;" in refusal(make_header(other, CaseList(), CASES, SpecOptions()))
    ends = model()
    ends.eos_ids = frozenset([5])
    assert "differs in model;" in refusal(make_header(ends, CaseList(), CASES, SpecOptions()))


def test_names_threads_and_machines_are_no_part_of_an_experiment(header: ResultsHeader, written: bytes) -> None:
    other = replace(header, threads=8, machine={}, model={**header.model, "name": "x"})
    with open_results(PATH, other) as file:
        assert file.header == header and len(file.results) == 3
    assert header.digest == other.digest != make_header(model(), CaseList(), [case("1")], SpecOptions()).digest


def test_results_from_before_codecs_are_those_of_none(header: ResultsHeader) -> None:
    old = {name: value for name, value in header.settings.items() if name != "codec"}
    assert replace(header, settings=old).digest == header.digest
    assert replace(header, settings={**old, "codec": "int4"}).digest != header.digest


@pytest.mark.parametrize("content", [b"\n", b'{"query": "mine"}\n', b"text", b'{"format": "other", "version": 1}\n'])
def test_a_file_of_somebody_else_is_never_written(header: ResultsHeader, content: bytes) -> None:
    PATH.parent.mkdir()
    PATH.write_bytes(content)
    assert refusal(header).startswith(f"{PATH}: is not a results file")
    assert PATH.read_bytes() == content


def test_a_header_that_cannot_be_read_is_refused(header: ResultsHeader, written: bytes) -> None:
    for damaged in (
        written.replace(b"1", b"2", 1),
        written.replace(b"sha256", b"sha", 1),
        written.replace(b":", b"", 2),
        re.sub(rb'"machine": \{[^}]*\}', b'"machine": 1e300', written, count=1),
    ):
        PATH.write_bytes(damaged)
        assert refusal(header).startswith(f"{PATH}: ")


def test_a_second_process_is_refused(header: ResultsHeader, written: bytes) -> None:
    with PATH.open("rb") as file:  # flock is of the open file: another one is as another process
        fcntl.flock(file, fcntl.LOCK_EX)
        assert f"{PATH}: another process is writing it" in refusal(header)
    assert reopen(header) == (ROWS, [])


def test_no_device_is_a_results_file(header: ResultsHeader) -> None:
    with pytest.raises(InputError, match=r"^/dev/null: "), open_results(Path("/dev/null"), header):
        pass
