"""The settings of a server with the vLLM connector; without vLLM."""

from __future__ import annotations

import pytest

from pictool.engines.vllm.client.setup import parse_settings
from pictool.errors import InputError
from pictool.linker.policies import make_policy


def test_what_settings_may_be() -> None:
    settings = parse_settings({"store": "x"})
    assert (settings.recognise, settings.compile, settings.policy) == (False, False, make_policy("legolink", {}))
    assert parse_settings({"store": "x", "codec": "int8"}).codec == "int8"
    assert parse_settings({"store": "x", "decline": True, "show_problems": True}) == settings  # of earlier versions
    values: tuple[tuple[str, object], ...] = (("codec", "nosuch"), ("start_s", 0), ("plan_s", 1e400))
    for field, value in values:
        with pytest.raises(InputError, match=field):
            parse_settings({"store": "x", field: value})
    for wrong in ({}, {"store": 1}, {"store": "x", "recognise": 1}, {"store": "x", "refresh_s": 0}, {"sotre": "x"}):
        with pytest.raises(InputError):
            parse_settings(wrong)
