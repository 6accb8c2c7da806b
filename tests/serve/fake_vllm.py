"""What `vllm serve` with PicConnector says over HTTP, by the torch engine: its streams, reports by name, failures."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from pictool.compiler.compile import CODEC, compile_chunks
from pictool.core import AnswerFormat, Chunk, CompileOptions, Sampling
from pictool.engines.vllm.request import CompileParams, LinkParams, ReportParams, is_proof, parse_request
from pictool.errors import PicError
from pictool.linker.link import link
from pictool.linker.plan import LinkPlan, make_plan, plan_without_objects
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.spec import Spec
from pictool.recognition.matches import NamedObject, locate
from pictool.runtime.chat.grammar import compiled
from pictool.runtime.decode import generate_steps
from pictool.runtime.model import Model
from pictool.serve.running import Server
from pictool.store.store import Store

NAME, POSITIONS = "served-by-vllm", 1024


@dataclass
class FakeVllm:
    """One server. `bodies` are of all completions that it got; the other fields say how it fails."""

    model: Model
    store: Store
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_running: int = 0
    status: int = 200  # of completions
    error: int | None = None  # in the stream, after a token
    breaks: bool = False  # the connection, after a token
    ends_with: str | None = None  # instead of "stop" or "length"
    delay_s: float = 0.0  # before each token
    keeps_reports: bool = True
    has_connector: bool = True

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        def health() -> Response:
            return Response()

        @app.get("/v1/models")
        def models() -> dict[str, Any]:
            return {"data": [{"id": NAME, "max_model_len": POSITIONS}]}

        @app.post("/v1/completions", response_model=None)
        async def complete(request: Request) -> Response:
            body = await request.json()
            parsed = parse_request(body.get("kv_transfer_params"), make_policy("naive", {}), False)
            if isinstance(parsed, ReportParams):
                report = self.reports.pop(parsed.name, {"state": "unknown", "problem": None})
                transfer = {"kv_transfer_params": {"pic": report}} if self.has_connector else {}
                return JSONResponse({"choices": [], **transfer})
            self.bodies.append(body)
            if self.status != 200:
                error = {"error": {"message": "it is refused", "type": "x", "param": None, "code": self.status}}
                return JSONResponse(error, self.status)
            return StreamingResponse(self._stream(body, parsed), media_type="text/event-stream")

        return app

    async def _stream(self, body: dict[str, Any], parsed: Any) -> AsyncGenerator[str, None]:
        self.num_running += 1
        try:
            cached = 0
            for number, (choice, cached) in enumerate(self._choices(body, parsed)):  # noqa: B007 (the last one counts)
                await asyncio.sleep(self.delay_s)
                yield _event({"choices": [choice]})
                if number == 1 and self.error is not None:
                    yield _event({"error": {"message": "no room", "type": "x", "param": None, "code": self.error}})
                    yield "data: [DONE]\n\n"
                    return
                if number == 1 and self.breaks:
                    raise OSError("the server dies")
            num_prompt, details = len(body["prompt"]), {"cached_tokens": cached}
            yield _event({"choices": [], "usage": {"prompt_tokens": num_prompt, "prompt_tokens_details": details}})
            yield "data: [DONE]\n\n"
        finally:
            self.num_running -= 1

    def _choices(self, body: dict[str, Any], parsed: Any) -> Iterator[tuple[dict[str, Any], int]]:
        """The choices of a request's chunks, and the tokens that were not computed."""
        if isinstance(parsed, CompileParams):
            self._compile(body["prompt"], parsed)
            yield _choice(0, "", [0], [], "length", None), 0
            return
        plan = self._plan(body["prompt"], parsed)
        model = self.model.with_salt(plan.salt)
        linked = link(model, self.store, Spec.planned(plan))
        if parsed is not None:
            self._report(parsed.report_as or "", linked, plan)
        sampling = Sampling(
            body["temperature"], body["top_p"], body["seed"], tuple(body["stop"]), body["frequency_penalty"],
            body["presence_penalty"], tuple((int(token), bias) for token, bias in (body["logit_bias"] or {}).items()),
        )  # fmt: skip
        schema = (body.get("structured_outputs") or {}).get("json")
        wanted = compiled(model, AnswerFormat(not body["skip_special_tokens"], schema))
        top = self.model.config.vocab_size if body.get("logprob_token_ids") else body["logprobs"] or 0
        for index in range(body["n"]):
            linked.image.rewind()
            own = replace(sampling, seed=body["seed"] + index)
            *steps, last = list(generate_steps(model, linked.image, body["max_tokens"], own, top, wanted))
            for step in steps:
                logprobs = _logprobs(body, step) if body["logprobs"] is not None else None
                yield _choice(index, step.text, [step.token], logprobs), 0
            reason = self.ends_with or ("stop" if last.is_complete else "length")
            stopped = last.stop or (steps[-1].token if last.is_complete else None)
            yield _choice(index, last.text, [], _LOGPROBS, reason, stopped), int(plan.num_context - linked.recomputed)

    def _plan(self, tokens: list[int], parsed: LinkParams | None) -> LinkPlan:
        import numpy as np

        ids = np.asarray(tokens, dtype=np.int32)
        if parsed is None:
            return plan_without_objects(make_policy(BASELINE), ids)
        named = []
        for each in parsed.objects or ():
            with self.store.peek(each.key) as file:
                assert file.meta.key_of(file.tokens(), parsed.salt or "") == each.key, "of another tenant"
                named.append(NamedObject(each.key, file.tokens(), each.start))
        found = locate(named, ids, lambda each: str(self.model.tokenizer.decode(list(each))))
        head_key = self.model.target.key(ids[: found[0].start], CODEC, parsed.salt or "")
        known = head_key if self.store.path(head_key).exists() else None
        return make_plan(parsed.policy, ids, found, known, parsed.salt or "")

    def _report(self, name: str, linked: Any, plan: LinkPlan) -> None:
        if not self.keeps_reports:
            return
        spans = [span for span in plan.spans[1:] if span.key is not None]
        rows = [float(linked.rows[:, span.start : span.end].sum(1).mean()) for span in spans]
        self.reports[name] = {
            "state": "linked", "problem": None, "chunks": len(spans), "recomputed": linked.recomputed,
            "document_tokens": sum(span.end - span.start for span in spans), "document_rows": sum(rows),
            "timing": {}, "documents": [[span.start, span.end, span.key, round(count)]
                                        for span, count in zip(spans, rows, strict=True)],
        }  # fmt: skip

    def _compile(self, prompt: list[int], parsed: CompileParams) -> None:
        report: dict[str, Any] = {"state": "compiled", "problem": None}
        model, before = self.model.with_salt(parsed.salt or ""), tuple(prompt[: parsed.before])
        if not is_proof(parsed.proof, parsed.text, before, parsed.salt or ""):
            report = {"state": "exact", "problem": "compile: disabled on this server"}
        else:
            try:
                chunk = Chunk(parsed.text, tuple(prompt[parsed.before : -1]), "x")
                options = CompileOptions(after=(before,) if before else "none")
                compile_chunks(model, self.store, [chunk], options)
            except PicError as error:
                report = {"state": "exact", "problem": str(error)}
        self.reports[parsed.report_as or ""] = report


_LOGPROBS: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}


def _logprobs(body: dict[str, Any], step: Any) -> dict[str, Any]:
    ids = body.get("logprob_token_ids")
    top = {f"token_id:{token}": value for token, value in step.top if ids is None or token in ids}
    return {"tokens": [f"token_id:{step.token}"], "token_logprobs": [step.logprob], "top_logprobs": [top]}


def _choice(
    index: int, text: str, tokens: list[int], logprobs: Any, finish: str | None = None, stop: object = None
) -> dict[str, Any]:
    return {
        "index": index, "text": text, "token_ids": tokens, "logprobs": logprobs, "finish_reason": finish,
        "stop_reason": stop,
    }  # fmt: skip


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


@contextmanager
def fake_vllm(model: Model, store: Store) -> Iterator[FakeVllm]:
    """A server that runs until the end."""
    fake = FakeVllm(model, store)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = Server(fake.app())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            yield fake
        finally:
            server.should_exit = True
            thread.join()
