"""The logs that `pic serve` wrote until 0.3 are read: keyed hashes of blocks, and no text. And pipes, as any log."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pictool.errors import InputError
from pictool.estimate.bodies import FormError
from pictool.estimate.forms import Forms
from pictool.estimate.measure import Measure
from pictool.estimate.readers import LogReader

RIVER = [["f71c6e619ffb1986", 147], ["eec89c885628f0e1", 104], ["58e2fa7ac4e8f91c", 132], ["93a1316c41f62c93", 86]]
HARBOUR = [["17c8e468afd1aa9d", 244], ["811e7e783d39aed8", 109], ["ece955cb4d1a4e39", 79], ["8aeec58e9760496d", 157]]
OF_B = [["2942e3978d22e3c7", 99], ["633fcd00ed266f80", 67], ["0e1f88f787b0c5a1", 101]]  # under another key


def line(tenant: str, documents: list[object], tokens: int) -> str:
    """A request as it was logged."""
    segments = [["template", False, [["ad893ab02a645873", 9]]], *(["document", True, blocks] for blocks in documents)]
    record = {"pic_request": 1, "time": 1.7e9, "tenant": tenant, "tokens": tokens, "linked": 0, "seconds": 0.5}
    return json.dumps(record | {"segments": [*segments, ["user", False, [["e0bb098e2463ef40", 6]]]]})


def test_a_server_s_log_tells_what_its_requests_repeat(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    lines = [line("a", [HARBOUR, RIVER], 264), line("a", [RIVER, HARBOUR], 264), line("b", [OF_B], 147)]
    path.write_text("\n".join(lines))
    measure = Measure()
    for prompt in LogReader().read([str(path)]):
        measure.add(prompt)
    totals = measure.finish()
    assert 240 < totals.tokens.linked + totals.tokens.prefix <= 264  # in the server's own tokens
    assert totals.tenants["b"].linked == 0


def test_a_segment_of_no_known_kind_is_told_and_not_counted(tmp_path: Path) -> None:
    record = {"pic_request": 1, "segments": [["odd", False, [["ff", 4]]]]}
    with pytest.raises(FormError, match="'odd'"):
        Forms().prompts(record)


@pytest.mark.filterwarnings("error")
def test_tokens_that_no_prompt_has_are_an_error() -> None:
    record = {"pic_request": 1, "tokens": 1e30, "segments": [["document", False, [["ff", 4]]]]}
    with pytest.raises(FormError, match=r"1e\+30"):
        Forms().prompts(record)


def test_a_pipe_that_nobody_writes_to_is_at_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(InputError, match="log: "):
        list(LogReader().read([str(tmp_path / "log")]))


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"prompt": "Who knows why?"}\n')
    os.close(writing)
    assert len(list(LogReader().read([f"/dev/fd/{reading}"]))) == 1
    os.close(reading)
