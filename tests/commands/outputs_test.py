"""Files that options name: who may read them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from traces import make_trace

from pictool.commands.console.outputs import write_json
from pictool.trace.format import write_trace


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("umask", [0o022, 0o077], indirect=True, ids=oct)
def test_what_an_option_names_has_the_permissions_of_the_umask(umask: int) -> None:
    write_trace(Path("out.trace"), make_trace())
    write_json("out.json", {})
    for name in ("out.trace", "out.json"):
        assert Path(name).stat().st_mode & 0o777 == 0o666 & ~umask
