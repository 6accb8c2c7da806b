"""The edited prompts of `benchmarks.edited_prompts`, and the edited requests of `benchmarks.recorded_agent`."""

from __future__ import annotations

from itertools import takewhile

import pytest

from benchmarks import edited_prompts, recorded_agent
from pictool.runtime.model import Model, load_model
from pictool.serve.work import PlainText, Turn


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("embedded-small", device="cpu")


def text_of(turn: Turn) -> str:
    return "".join(piece.text for piece in turn.pieces if isinstance(piece, PlainText))


@pytest.mark.parametrize("index", [0, 1])
def test_an_edit_changes_the_early_turns_or_the_first_line_alone(model: Model, index: int) -> None:
    read = list(edited_prompts.files(model, 6))[: edited_prompts.TURNS]
    old, prompts = edited_prompts.edits(index, read, edited_prompts.recorded_results())
    dropped, compacted, system = (prompt.turns for prompt in prompts)
    assert [turn.role for turn in old] == ["system", "user", *["assistant", "tool"] * edited_prompts.TURNS, "user"]
    assert [text_of(turn) for turn in dropped].count(edited_prompts.STUB) == edited_prompts.TURNS // 2
    for turns, kept, num_same in ((dropped, 6, 3), (compacted, 6, 2), (system, 11, 0)):
        pairs = zip(old, turns, strict=False)
        assert turns[-1 - kept : -1] == old[-1 - kept : -1]
        assert len([*takewhile(lambda pair: pair[0] == pair[1], pairs)]) == num_same
    assert text_of(system[0]).partition("\n")[2] == text_of(old[0]).partition("\n")[2]
    assert bool(prompts[0].gold) == (index % 2 == 0)
    for file in read:
        assert file.begin in file.text and file.gold in file.text
        assert sum(file.text in text_of(turn) for turn in old) == 1


@pytest.mark.parametrize("shape", recorded_agent.SHAPES)
def test_a_recorded_request_keeps_what_an_edit_does_not_concern(shape: str) -> None:
    items = [{"type": "message", "text": "2026-11-26"}, *({"output": str(number)} for number in range(12))]
    found = recorded_agent.edited({"input": items, "model": "m"}, shape, 1)
    assert found["model"] == "m" and found["input"][-3:] == items[-3:]
    same = [item for item in items if item in found["input"]]
    assert len(same) == {"dropped": 10, "compacted": 4, "system": 12}[shape]
