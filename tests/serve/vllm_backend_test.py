"""The backend inside vLLM's server, as far as it needs no vLLM (else tests/in_vllm/backend_test.py)."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import tiny
from fastapi import APIRouter, FastAPI
from fastapi.responses import PlainTextResponse

from pictool.engines.vllm import plugin
from pictool.engines.vllm.client import serving
from pictool.engines.vllm.client.online import coarse_kl
from pictool.engines.vllm.request import LinkParams, RequestError, parse_request
from pictool.errors import InputError
from pictool.linker.grid import label_of, parse_policy
from pictool.runtime.encoder import Encoder
from pictool.serve.backends.vllm.backend import VllmBackend
from pictool.serve.backends.vllm.options import PluginOptions, parse_options
from pictool.serve.backends.vllm.router import Guard
from pictool.serve.backends.vllm.routes import _as_it_is
from pictool.serve.service import Service
from pictool.serve.tenants import Keys, Tenant
from pictool.serve.work import Linking

POLICY = parse_policy("legolink-4")


def test_the_plugin_is_allowed_and_switches_no_other_off(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm.general_plugins": ["theirs", "pictool"], "vllm.platform_plugins": ["chip"]}
    monkeypatch.setattr(plugin, "_names", lambda group: installed.get(group, []))
    assert plugin.allowed_plugins(None) == "theirs,pictool,chip"
    assert plugin.allowed_plugins("theirs") == "theirs,pictool" and plugin.allowed_plugins("") == "pictool"
    assert not plugin.are_installed()
    installed["vllm.endpoint_plugins"] = ["pictool"]
    assert plugin.are_installed()


def test_the_routers_secret_is_one_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIC_ROUTER_SECRET", "")
    monkeypatch.delenv("PIC_ROUTER_SECRET")
    assert not plugin.is_router("") and not plugin.is_router("x")
    plugin.register()
    secret = plugin.router_secret()
    plugin.register()
    assert len(secret) == 64 and plugin.is_router(secret) and plugin.router_secret() == secret
    assert not plugin.is_router("") and not plugin.is_router("ö\ud800")


_PARENT = """
import multiprocessing, os, time
from pictool.engines.vllm import plugin
from pictool.engines.vllm.client import serving

def child():
    plugin.register()
    print(os.getpid(), flush=True)
    time.sleep(60)

ASK
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
"""


@pytest.mark.parametrize("asks", [True, False])
def test_an_engine_ends_with_a_process_that_is_killed_and_asked_for_it(asks: bool) -> None:
    script = _PARENT.replace("ASK", "plugin.end_with_this_process()" if asks else "")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        gone, left = psutil.wait_procs([child], 20 if asks else 0.5)
        for process in left:
            process.kill()
    assert bool(gone) == asks


@pytest.mark.parametrize(
    ("value", "word"),
    [({"key": "x"}, "no field 'key'"), ({"keys": 5}, "keys=5"), ({"check": "maybe"}, "check"), ({"ttl": True}, "ttl"),
     ({"ttl": 0}, "ttl"), ({"check_limit": math.nan}, "check_limit")],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(value: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        parse_options(value)
    assert parse_options(None) == PluginOptions() and parse_options({"ttl": 5}).ttl == 5


def test_the_divergence_over_likely_tokens_is_at_most_that_over_all() -> None:
    full, linked = [0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.1, 0.2]
    logs = [{i: math.log(value) for i, value in enumerate(values)} for values in (full, linked)]
    exact = sum(p * math.log(p / q) for p, q in zip(full, linked, strict=True))
    assert coarse_kl(*logs) == pytest.approx(exact)
    few = {token: logs[0][token] for token in (0, 1)}
    assert 0 < coarse_kl(few, logs[1]) < exact and coarse_kl(few, logs[0]) == pytest.approx(0, abs=1e-9)


def test_a_model_that_does_not_take_linking_answers_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = VllmBackend()
    backend.policy = POLICY
    monkeypatch.setattr(backend, "measure", lambda policy: 0.7)
    with pytest.raises(InputError, match=r"0\.7 nats"):
        asyncio.run(backend.check(0.5, refuses=True))
    asyncio.run(backend.check(0.7, refuses=False))
    assert backend.problem is None and label_of(backend.policy) == "legolink-4"
    asyncio.run(backend.check(0.5, refuses=False))
    status = backend.status()
    assert status.policy == "full" and status.divergence == {"legolink-4": 0.7} and "0.7 nats" in str(status.problem)
    assert backend.params(backend.policy, Linking()) is False
    assert backend.params(POLICY, Linking()) == {"policy": {"algo": "legolink", "k": 4}, "recognise": True}
    assert backend.params(POLICY, Linking(recognises=False)) is False


def test_documents_are_recognised_beside_named_ones() -> None:
    named = {"keys": ["ab"]}
    parsed = parse_request({"pic": {**named, "recognise": True}}, POLICY, False)
    assert isinstance(parsed, LinkParams) and parsed.recognises and parsed.objects is not None
    parsed = parse_request({"pic": {**named, "recognise": False}}, POLICY, True)
    assert isinstance(parsed, LinkParams) and not parsed.recognises
    for fields in ({**named, "recognise": 1}, {**named, "chunks": []}, {"compile": {}, "recognise": True}):
        with pytest.raises(RequestError):
            parse_request({"pic": fields}, POLICY, False)


def test_a_log_says_which_marker_vllm_reads_as_a_control_token(caplog: pytest.LogCaptureFixture) -> None:
    backend: Any = VllmBackend()
    backend.policy = POLICY
    backend.serving = SimpleNamespace(
        model=SimpleNamespace(encoder=Encoder(tiny.tokenizer())), settings=SimpleNamespace(policies=None)
    )
    for text in ("Fine.", "Fine.</s>"):
        body = {"messages": [{"role": "user", "content": text}]}
        _, rest = _as_it_is(backend, Tenant("default"), Linking(), body)
        assert rest["kv_transfer_params"]["pic"]["recognise"] and ("</s>" in caplog.text) == ("</s>" in text)


def test_a_model_is_called_as_vllm_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In errors of its template and length, too; never by its directory."""
    loaded = SimpleNamespace(name="/where/models/are")
    monkeypatch.setattr(serving, "load_target_model", lambda config, settings: loaded)
    monkeypatch.setattr(serving, "parse_settings", lambda extra: None)
    monkeypatch.setattr(serving, "require_uncoded", lambda config: None)
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    model = SimpleNamespace(max_logprobs=-1, logprobs_mode="raw_logprobs", max_model_len=64)
    paths = [SimpleNamespace(name="served"), SimpleNamespace(name="also")]
    handlers = {f"openai_serving_{kind}": SimpleNamespace() for kind in ("chat", "completion")}
    state = SimpleNamespace(openai_serving_models=SimpleNamespace(base_model_paths=paths), **handlers)
    made = serving.Serving(SimpleNamespace(vllm_config=config, model_config=model), state)
    assert made.model.name == "served" and made.names == ["served", "also"]


def test_vllms_own_routes_are_the_operators_where_keys_are_required(tmp_path: Path) -> None:
    keys = Keys({"k" * 16: Tenant("a", "salt"), "o" * 16: Tenant("operator")})
    service, router, app = Service(VllmBackend(), tmp_path, keys), APIRouter(), FastAPI()

    @router.get("/v1/caches/{name}")
    def ours(name: str) -> str:
        return name

    @app.get("/v1/models")
    @app.post("/v1/caches/{name}")
    @app.get("/load")
    @app.get("/ping")
    def theirs() -> str:
        return "theirs"

    app.include_router(router)
    app.add_middleware(Guard, service=service, router=router)  # type: ignore[arg-type]

    app.mount("/metrics", theirs_of_any_method)

    async def statuses(key: str, method: str = "", **more: str) -> list[int]:
        headers = more | ({"Authorization": f"Bearer {key}"} if key else {})
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            asked = [("GET", "/ping"), ("GET", "/v1/caches/x"), ("GET", "/v1/models"), ("POST", "/v1/caches/x")]
            asked = [(method, "/metrics/")] if method else [*asked, ("GET", "/load")]
            return [(await client.request(*entry)).status_code for entry in asked]

    assert asyncio.run(statuses("")) == [200, 200, 401, 401, 401]  # what is ours is the gate's
    assert asyncio.run(statuses("k" * 16)) == [200, 200, 200, 403, 403]
    assert asyncio.run(statuses("o" * 16)) == [200] * 5
    preflight = {"Origin": "http://x", "Access-Control-Request-Method": "GET"}
    assert asyncio.run(statuses("", "OPTIONS")) == asyncio.run(statuses("", "OPTIONS", **preflight)) == [401]
    assert asyncio.run(statuses("k" * 16, "OPTIONS")) == [403] and asyncio.run(statuses("o" * 16, "OPTIONS")) == [200]


async def theirs_of_any_method(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("all tenants'")(scope, receive, send)
