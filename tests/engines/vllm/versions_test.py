"""What differs between versions of vLLM, without vLLM: which are supported, and whose routes answer."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pictool.engines.vllm.versions import INSTALL, SUPPORTED, cache_hit_source, replace_routes, require_version
from pictool.errors import InputError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A version that `import vllm` seems to find."""
    version = str(request.param)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))  # type: ignore[arg-type]
    return version


@pytest.mark.parametrize("installed", ["0.31.0", "0.31.2+cpu", "0.32.0", "0.32.1rc1"], indirect=True)
def test_both_versions_are_supported(installed: str) -> None:
    assert installed.startswith(SUPPORTED)
    require_version()


@pytest.mark.parametrize("installed", ["0.3.1", "0.30.0", "0.310.0", "0.33.0", "1.31.0"], indirect=True)
def test_others_are_refused_in_one_line(installed: str) -> None:
    with pytest.raises(InputError, match=rf"vLLM {re.escape(installed)} is not .* 0\.31\.\* and 0\.32\.\*") as error:
        require_version()
    assert "\n" not in str(error.value) and str(error.value).endswith(INSTALL)


@pytest.mark.parametrize("installed", ["0.31.0"], indirect=True)
def test_0_31_counts_no_sources_of_cache_hits(installed: str) -> None:
    assert cache_hit_source() is None


def app_of_both() -> tuple[FastAPI, int]:
    """Routes of vLLM's, then ours, of which one is new; and the number of vLLM's."""
    app = FastAPI()
    app.add_api_route("/both", lambda: "vllm", methods=["POST"])
    app.add_api_route("/half", lambda: "vllm", methods=["GET", "POST"])
    app.add_api_route("/{any}", lambda: "vllm", methods=["GET"])
    number = len(app.router.routes)
    for path in ("/both", "/half", "/new"):
        app.add_api_route(path, lambda: "ours", methods=["POST"])
    return app, number


@pytest.mark.parametrize("installed", ["0.31.0"], indirect=True)
def test_our_routes_answer_in_0_31(installed: str) -> None:
    app, number = app_of_both()
    assert TestClient(app).post("/both").json() == "vllm"  # else nothing had to be replaced
    app, number = app_of_both()
    replace_routes(app.router.routes, number)
    client = TestClient(app)
    posted = [client.post(path).json() for path in ("/both", "/half", "/new")]
    assert posted == ["ours"] * 3
    assert [client.get(path).json() for path in ("/half", "/other")] == ["vllm"] * 2
    assert client.get("/both").json() == "vllm"  # of /{any}, as before
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths["/half"]) == {"get", "post"} and set(paths["/both"]) == {"post"}


@pytest.mark.parametrize("installed", ["0.32.0"], indirect=True)
def test_0_32_replaces_routes_itself(installed: str) -> None:
    app, number = app_of_both()
    before = list(app.router.routes)
    replace_routes(app.router.routes, number)
    assert app.router.routes == before
