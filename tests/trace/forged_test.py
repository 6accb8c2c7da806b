"""Forged traces: with a checksum that holds. Each is refused by one line, or every reader can show it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spoilt
from commands.run import pic
from safetensors.numpy import save
from traces import make_trace

from pictool.errors import TraceError
from pictool.trace.counts import count_rows
from pictool.trace.diff import diff_traces
from pictool.trace.format import _checksum, _metadata, _tensors, read_trace

CASES = 800
SHOWN = 12  # of those that are read, by the command
PATH = Path("forged.trace")
TRACE = make_trace(scores=np.arange(10, dtype=np.float32))
JSON = ("report", "target", "texts", "chunks", "pieces", "generated", "top")


def forge(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    PATH.write_bytes(save(tensors, metadata | {"checksum": _checksum(tensors, metadata)}))


def refusal() -> str | None:
    """The line with which the forged trace is refused; None if it is read."""
    try:
        read_trace(PATH)
    except TraceError as error:
        message = str(error)
        assert message.startswith("forged.trace: ") and "\n" not in message and "; " in message, message
        return message
    return None


def test_every_field_of_the_metadata() -> None:
    """What is accepted is shown, counted and compared."""
    tensors, metadata = _tensors(TRACE), _metadata(TRACE)
    cases = [(name, *case) for name in JSON for case in spoilt.mutations(json.loads(metadata[name]))]
    refused, read = 0, []
    for name, title, text in random.Random(0).sample(cases, CASES):
        try:
            forge(tensors, metadata | {name: text})
            if refusal() is None:
                trace = read_trace(PATH)
                count_rows(trace), diff_traces(trace, trace), trace.label, trace.policy
                read.append(PATH.read_bytes())
            else:
                refused += 1
        except Exception as error:
            raise AssertionError(f"{name}: {title}") from error
    assert refused > 0.8 * CASES
    for data in random.Random(0).sample(read, SHOWN):
        PATH.write_bytes(data)
        for options in ((), ("--text", "--json")):
            assert pic("inspect", PATH, *options).code == 0


@pytest.mark.parametrize("name", JSON)
def test_metadata_that_are_others(name: str) -> None:
    for text in ("", "{", "null", "7", "[" * 50_000, "NaN", '"x"', "[]", "{}"):
        forge(_tensors(TRACE), _metadata(TRACE) | {name: text})
        assert refusal(), text[:9]


ROWS = TRACE.rows
TENSORS: dict[str, dict[str, Any]] = {
    "no tokens": {"tokens": np.zeros(0, np.int32)},
    "a number for tokens": {"tokens": np.array(3, np.int32)},
    "a matrix of tokens": {"tokens": np.zeros((10, 2), np.int32)},
    "tokens below 0": {"tokens": np.full(10, -1, np.int32)},
    "tokens beyond the vocabulary": {"tokens": np.full(10, 7, np.int32)},
    "long tokens": {"tokens": np.zeros(10, np.int64)},
    "no starts": {"starts": np.zeros(0, np.int32)},
    "starts that wrap": {"starts": np.array([0, 2**31 - 1, -(2**31), 8], np.int32)},
    "starts that are NaN": {"starts": np.full(4, np.nan, np.float32)},
    "a matrix of starts": {"starts": np.zeros((4, 1), np.int32)},
    "no rows": {"rows": np.zeros((0, 10), bool)},
    "rows in one line": {"rows": ROWS.reshape(-1)},
    "rows that are neither": {"rows": (ROWS.view(np.uint8) * 2).view(bool)},
    "half logits": {"logits": np.zeros(7, np.float16)},
    "infinite logits": {"logits": np.full(7, np.inf, np.float32)},
    "one logit": {"logits": np.zeros(1, np.float32)},
    "a matrix of logits": {"logits": np.zeros((7, 7), np.float32)},
    "scores that are NaN": {"scores": np.full(10, np.nan, np.float32)},
    "a number for scores": {"scores": np.array(1, np.float32)},
    "a tensor that nobody reads": {"more": np.zeros(1, np.float32)},
    "tokens are missing": {"tokens": None},
    "logits are missing": {"logits": None},
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_not_those_of_a_link(name: str) -> None:
    tensors = {key: value for key, value in (_tensors(TRACE) | TENSORS[name]).items() if value is not None}
    forge(tensors, _metadata(TRACE))
    assert refusal()


@pytest.mark.parametrize("name", ["texts", "pieces", "top"])
def test_half_of_a_surrogate_pair_is_no_text(name: str) -> None:
    metadata = _metadata(TRACE)
    forge(_tensors(TRACE), metadata | {name: metadata[name].replace('"', '"\\ud800', 1).replace('\\ud800a"', 'a"')})
    assert refusal()


def test_an_answer_that_is_not_the_reports() -> None:
    forge(_tensors(TRACE), _metadata(TRACE) | {"answer": "no"})
    assert "its report is not that of a link" in str(refusal())


def test_a_file_that_claims_more_than_it_has_is_refused_at_once() -> None:
    forge(_tensors(TRACE), _metadata(TRACE))
    whole = PATH.read_bytes()
    for length in (0, 1, 2**31, 2**63, 2**64 - 1):
        PATH.write_bytes(length.to_bytes(8, "little") + whole[8:])
        assert refusal()
    with PATH.open("ab") as file:
        file.truncate(1 << 40)
    assert "larger than 256 MiB" in str(refusal())
