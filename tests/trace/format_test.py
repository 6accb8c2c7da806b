"""The trace file: what is written is read, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save
from traces import make_trace

from pictool.core import Layout
from pictool.errors import TraceError
from pictool.trace.format import Trace, _checksum, _metadata, _tensors, is_trace, read_trace, write_trace

PATH = Path("link.trace")
SCORES = np.arange(10, dtype=np.float32)


def assert_same(a: Trace, b: Trace) -> None:
    for name in (field.name for field in fields(Trace)):
        of_a, of_b = getattr(a, name), getattr(b, name)
        if name == "layout":
            assert np.array_equal(of_a.tokens, of_b.tokens) and of_a.starts == of_b.starts
        elif isinstance(of_a, np.ndarray):
            assert np.array_equal(of_a, of_b) and of_a.dtype == of_b.dtype
        else:
            assert of_a == of_b


@pytest.mark.parametrize("scores", [None, SCORES])
def test_what_is_written_is_read(scores: Any) -> None:
    trace = make_trace(scores=scores)
    write_trace(PATH, trace)
    assert is_trace(PATH)
    assert_same(read_trace(PATH), trace)


def test_text_of_any_kind_survives() -> None:
    pieces = ("<s>", "\x1b[31m", '"\\', "\x07", "\0", "東京", "\ufffd", "\n", " h", "?")
    trace = make_trace(pieces=pieces, texts=("", "\u2028", "$x^2$", "'"))
    write_trace(PATH, trace)
    assert_same(read_trace(PATH), trace)


def test_it_is_a_safetensors_file_with_the_contract_s_tensors() -> None:
    write_trace(PATH, make_trace(scores=SCORES))
    with safe_open(PATH, "numpy") as file:
        assert sorted(file.keys()) == ["logits", "rows", "scores", "starts", "tokens"]
        assert file.metadata()["answer"] == "yes" and json.loads(file.metadata()["report"])["algo"] == "legolink"


def test_no_flipped_bit_is_believed() -> None:
    """Every byte of the file: refused, or (white space of the header) read as the same."""
    trace = make_trace(scores=SCORES)
    write_trace(PATH, trace)
    whole = PATH.read_bytes()
    refused = 0
    for offset in range(0, len(whole), 7):
        PATH.write_bytes(whole[:offset] + bytes([whole[offset] ^ 4]) + whole[offset + 1 :])
        try:
            assert_same(read_trace(PATH), trace)
        except TraceError as error:
            refused += 1
            assert str(error).startswith("link.trace: ") and "\n" not in str(error)
    assert refused > 0.9 * len(whole) / 7


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_a_truncated_trace_is_refused(keep: float) -> None:
    write_trace(PATH, make_trace())
    PATH.write_bytes(PATH.read_bytes()[: int(keep * PATH.stat().st_size)])
    with pytest.raises(TraceError, match=r"^link\.trace: "):
        read_trace(PATH)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"version": "1"}, "trace version 1, but this pic reads version 2; link again"),
        ({"format": "pictool.kvo"}, "not a trace; "),
        ({"answer": "no"}, "does not match its checksum"),
    ],
)
def test_another_version_or_format_is_refused(metadata: dict[str, str], message: str) -> None:
    trace = make_trace()
    whole = _metadata(trace) | {"checksum": _checksum(_tensors(trace), _metadata(trace))}
    PATH.write_bytes(save(_tensors(trace), whole | metadata))
    with pytest.raises(TraceError, match=message):
        read_trace(PATH)


def other_rows(layer: int, position: int, value: bool) -> Any:
    rows = make_trace().rows.copy()
    rows[layer, position] = value
    return rows


LAYOUT = make_trace().layout
INCONSISTENT: dict[str, tuple[dict[str, Any], str]] = {
    "pieces": ({"pieces": ("a",)}, "its pieces are 1, not 10"),
    "texts": ({"texts": ("a",)}, "its texts are 1, not 4"),
    "scores": ({"scores": SCORES[:3]}, "its scores are 3, not 10"),
    "layers": ({"rows": make_trace().rows[:2]}, "its rows are"),
    "tail": ({"rows": other_rows(0, 9, False)}, "not those of a link"),
    "rows that come back": ({"rows": other_rows(2, 5, True)}, "not those of a link"),
    "starts": ({"layout": Layout(LAYOUT.tokens, (0, 4, 1, 8))}, "do not follow each other"),
    "no tail": ({"layout": Layout(LAYOUT.tokens, (0, 1, 4, 10))}, "do not follow each other"),
    "nothing generated": ({"generated": ()}, "logits or generated tokens are missing"),
    "logits": ({"logits": np.full(7, np.nan, dtype=np.float32)}, "its logits are not finite"),
    "dtype": ({"target": replace(make_trace().target, dtype="\0")}, "its dtype is not one"),
    "no logits": ({"logits": np.zeros(0, dtype=np.float32)}, "logits or generated tokens are missing"),
    "vocabulary": ({"logits": np.zeros(3, dtype=np.float32)}, "outside the vocabulary"),
    "types": ({"rows": make_trace().rows.astype(np.uint8)}, "other types"),
    "report": ({"report": {"answer": "yes"}}, "the form of a trace"),
}


@pytest.mark.parametrize("name", INCONSISTENT)
def test_what_does_not_fit_together_is_refused(name: str) -> None:
    changes, message = INCONSISTENT[name]
    write_trace(PATH, replace(make_trace(), **changes))
    with pytest.raises(TraceError, match=message):
        read_trace(PATH)


def test_what_is_no_trace_is_refused() -> None:
    PATH.write_text("hello")
    assert not is_trace(PATH)
    for path in (PATH, Path("missing"), Path("/")):
        with pytest.raises(TraceError):
            read_trace(path)


def test_another_model_is_refused_by_name() -> None:
    trace = make_trace()
    trace.require(trace.target, "t")
    changes: dict[str, Any] = {"model": "c" * 64, "dtype": "bfloat16", "tokenizer": "d" * 64}
    for field, other in changes.items():
        with pytest.raises(TraceError, match=f"^t: .* {field} .* {field} {other[:9]}.* -m"):
            trace.require(replace(trace.target, **{field: other}), "t")


def test_what_it_is_called() -> None:
    trace = make_trace()
    assert (trace.policy, trace.label, trace.answer) == ("legolink k=2", "legolink k=2", "yes")
    assert trace.sources == ("head", "a.txt", "b.txt", "tail")
