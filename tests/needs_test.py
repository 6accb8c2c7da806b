"""What another package must have: by name and parameter, whatever its version says."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from pictool.engines.vllm import needs
from pictool.engines.vllm.needs import CONNECTOR, INSTALL, WORKER, require_connector
from pictool.errors import InputError, ModelError
from pictool.needs import missing
from pictool.runtime.model import load_model
from pictool.runtime.support import require_transformers


@pytest.mark.parametrize(
    ("place", "parameters", "lack"),
    [
        ("json:dumps", ("obj", "indent"), None),
        ("json:dumps", ("obj", "colour"), None),  # it takes any
        ("json:JSONDecoder.decode", ("s", "colour"), "json.JSONDecoder.decode(colour)"),
        ("json:JSONDecoder.paint", (), "json.JSONDecoder.paint"),
        ("json.paint:decode", (), "json.paint.decode"),
    ],
)
def test_what_lacks_is_named(place: str, parameters: tuple[str, ...], lack: str | None) -> None:
    assert missing({place: parameters}) == ([] if lack is None else [lack])


def test_a_vllm_without_what_the_connector_is_made_of_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.99.1"))  # type: ignore[arg-type]
    monkeypatch.setattr(needs, "CONNECTOR", {"json:JSONConnector": ()})
    with pytest.raises(InputError, match=r"^vLLM 0\.99\.1 .*json\.JSONConnector") as error:
        require_connector()
    assert "\n" not in str(error.value) and str(error.value).endswith(INSTALL)


def test_a_model_is_not_read_by_a_transformers_that_lacks_what_links_call(monkeypatch: pytest.MonkeyPatch) -> None:
    require_transformers.cache_clear()
    monkeypatch.setattr("pictool.runtime.support.NEEDS", {"transformers:AutoLink": ()})
    with pytest.raises(ModelError, match=r"transformers\.AutoLink") as error:
        _ = load_model("embedded").module
    assert "\n" not in str(error.value)
    require_transformers.cache_clear()


def test_a_name_is_asked_for_once() -> None:
    assert not CONNECTOR.keys() & WORKER.keys()
