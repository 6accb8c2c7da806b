"""Requests of a fuzzer: good ones, hostile ones, and good ones of which something was changed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from hostile.values import dumps, mutate_tree, text, value

from pictool.compiler.contexts import contexts_of
from pictool.core import CompileOptions
from vllm_fuzz.scene import AFTER, SALTS, Prompt, Scene

Draw = random.Random
POLICIES = (
    "naive", "legolink-4", "legolink-16", "legolink-1", "legolink-1000", "cacheblend-15", "cacheblend-30:on=kv",
    "cacheblend-15:filter=single", "cacheblend-0", "cacheblend-100", "full", "auto",
)  # fmt: skip
BAD_POLICIES: tuple[Any, ...] = (
    "", "magic", "prefix", "speccache-15", "fixup-10", "legolink", "legolink-", "legolink--1", "legolink-1e9",
    "legolink:k=1,2", "cacheblend:ratio=" + ",".join(["0.1"] * 3000), "speccache-15:budget=inf",
    "speccache:" + ":".join(f"{name}={'.1,' * 300}.1" for name in ("ratio", "deep", "budget")), "legolink:k=16:k=17",
    {"algo": "legolink", "k": float("nan")}, {"algo": "cacheblend", "ratio": "<<raw:1e400>>"}, {"algo": 3},
    {"algo": "legolink", "k": 2**62}, {"algo": "speccache", "spec_model": "/etc"}, {"k": 3},
    {"algo": "fixup", "fallback": "legolink"}, "cacheblend:layers=1+2+3", "cacheblend-15:layers=9",
)  # fmt: skip
FOREIGN = ({"do_remote_prefill": True}, {"do_remote_decode": True}, {"remote_engine_id": "x", "remote_block_ids": [1]},
           {"do_remote_prefill": True, "remote_prefill_cached_tokens": 10**9})  # fmt: skip
_SURROGATE = re.compile(r"\\ud[89a-f]")
CODECS: tuple[Any, ...] = (None, "none", "int8", "nosuch", 3)
NUM_MANY = 1024  # keys that a request may name


@dataclass(frozen=True)
class Asked:
    """A request. `prompt` is None if its answer is not compared.

    vLLM 0.32 itself fails a request whose `vllm_xargs` have `kv_transfer_params` that are true and no object, or in
    which is half of a surrogate pair.
    """

    what: str
    path: str
    body: str
    prompt: Prompt | None
    salt: str = ""
    is_stream: bool = False
    leaves: bool = False  # the client hangs up
    compiles: bool = False
    is_no_object: bool = False  # what `vllm_xargs` has as `kv_transfer_params`
    method: str = "POST"

    @property
    def fails(self) -> bool:
        """Whether vLLM's own front end may fail it."""
        return self.is_no_object or _SURROGATE.search(self.body) is not None


class Requests:
    """Requests of a scene: each is a function of the seed and its number."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self._scene, self._seed = scene, seed
        self._kinds: tuple[tuple[int, Callable[[Draw], Asked]], ...] = (
            (20, self._named), (14, self._recognised), (14, self._unsaid), (6, self._opted_out), (16, self._mutated),
            (8, self._of_bad_policies), (6, self._of_any_value), (5, self._compiled), (4, self._of_many),
            (3, self._by_xargs), (4, self._of_another_connector), (3, self._nested), (3, self._of_any_salt),
            (3, self._of_several), (2, self._of_another_method), (2, self._to_be_verified),
        )  # fmt: skip

    def make(self, number: int) -> Asked:
        draw = random.Random(f"{self._seed} {number}")
        (make,) = draw.choices([kind for _, kind in self._kinds], [weight for weight, _ in self._kinds])
        return make(draw)

    # What is asked for

    def _named(self, draw: Draw) -> Asked:
        prompt, salt = self._prompt(draw), self._salt(draw)
        fresh = {"fresh": True} if draw.random() < 0.2 else {}
        return self._asked("named", draw, prompt, salt, {"pic": self._names(draw, prompt, salt) | fresh})

    def _recognised(self, draw: Draw) -> Asked:
        fields: dict[str, Any] = {"recognise": True, "policy": draw.choice(POLICIES)}
        if draw.random() < 0.2:
            fields["codec"] = draw.choice(CODECS)
        return self._asked("recognised", draw, self._prompt(draw), self._salt(draw), {"pic": fields})

    def _unsaid(self, draw: Draw) -> Asked:
        return self._asked("unsaid", draw, self._prompt(draw), self._salt(draw), draw.choice((None, {}, {"pic": None})))

    def _opted_out(self, draw: Draw) -> Asked:
        params = draw.choice(({"pic": False}, {"pic": {"recognise": False}}))
        return self._asked("opted out", draw, self._prompt(draw), self._salt(draw), params)

    def _mutated(self, draw: Draw) -> Asked:
        prompt, salt = self._prompt(draw), self._salt(draw)
        params = {"pic": self._names(draw, prompt, salt)}
        done = [mutate_tree(params, draw) for _ in range(draw.choice((1, 1, 2, 3)))]
        return self._asked(f"mutated ({', '.join(done)})", draw, prompt, salt, params)

    def _of_bad_policies(self, draw: Draw) -> Asked:
        prompt, salt = self._prompt(draw), self._salt(draw)
        fields = {**self._names(draw, prompt, salt), "policy": draw.choice(BAD_POLICIES)}
        return self._asked("policy", draw, prompt, salt, {"pic": fields})

    def _of_any_value(self, draw: Draw) -> Asked:
        params = draw.choice((value(draw), {"pic": value(draw)}, {text(draw): value(draw)}))
        return self._asked("value", draw, self._prompt(draw), self._salt(draw), params)

    def _by_xargs(self, draw: Draw) -> Asked:
        """`kv_transfer_params` by vLLM's `vllm_xargs`, where it takes texts, numbers and lists of them."""
        params = draw.choice(("", 0, 0.0, [], "x", 1, ["pic"], "pic", -1.5))
        more = {"vllm_xargs": {"kv_transfer_params": params}}
        return self._asked("vllm_xargs", draw, self._prompt(draw), self._salt(draw), None, more)

    def _of_another_connector(self, draw: Draw) -> Asked:
        params: dict[str, Any] = dict(draw.choice(FOREIGN))
        prompt, salt = self._prompt(draw), self._salt(draw)
        if draw.random() < 0.5:
            params["pic"] = self._names(draw, prompt, salt)
        more = {"max_tokens": -1} if draw.random() < 0.2 else {}  # vLLM tells the connector of refused ones
        return self._asked("of another connector", draw, prompt, salt, params, more)

    # What once ended an engine, or showed what it should not

    def _nested(self, draw: Draw) -> Asked:
        """Transfer parameters within each other, deeper than parsers go."""
        depth = draw.choice((30, 900, 5000, 100_000))
        opened, closed = draw.choice((("[", "]"), ('{"pic":', "}"), ('{"keys":[', "]}")))
        nested = f"<<raw:{json.dumps(opened * depth + '1' + closed * depth)[1:-1]}>>"
        params = draw.choice((nested, {"pic": nested}, {"pic": {"keys": nested}}))
        return self._asked("nested", draw, self._prompt(draw), self._salt(draw), params)

    def _of_any_salt(self, draw: Draw) -> Asked:
        prompt, salt = self._prompt(draw), value(draw)
        params = {"pic": self._names(draw, prompt, draw.choice(SALTS))}
        own = salt if isinstance(salt, str) else ""
        return self._asked("salt", draw, prompt if own else None, own, params, {"cache_salt": salt})

    def _of_several(self, draw: Draw) -> Asked:
        prompt, salt = self._prompt(draw), self._salt(draw)
        more = {"n": draw.choice((-1, 0, 2, 3, 5))}
        return self._asked("several", draw, prompt, salt, {"pic": self._names(draw, prompt, salt)}, more)

    def _of_another_method(self, draw: Draw) -> Asked:
        prompt, salt, method = self._prompt(draw), self._salt(draw), draw.choice(("OPTIONS", "HEAD", "PUT", "DELETE"))
        asked = self._asked(method, draw, prompt, salt, {"pic": self._names(draw, prompt, salt)})
        return replace(asked, method=method, prompt=None)

    def _to_be_verified(self, draw: Draw) -> Asked:
        prompt, salt = self._prompt(draw), self._salt(draw)
        values: tuple[Any, ...] = (True, 1.0, "yes", [], None)
        name, said = draw.choice(("verify", "answer_kl")), draw.choice(values)
        return self._asked("verify", draw, prompt, salt, {"pic": self._names(draw, prompt, salt) | {name: said}})

    def _of_many(self, draw: Draw) -> Asked:
        """As much work as a request can ask for."""
        prompt, salt, keys = self._prompt(draw), self._salt(draw), self._scene.keys()
        kind = draw.randrange(4)
        of_kind: tuple[dict[str, Any], ...] = (
            {"keys": [draw.choice(keys)[: draw.randrange(4, 9)] for _ in range(NUM_MANY)]},
            {"keys": [f"{draw.randrange(16**6):06x}" for _ in range(NUM_MANY)]},
            {"chunks": [{"key": draw.choice(keys), "start": draw.randrange(2000)} for _ in range(20 * NUM_MANY)]},
            {"recognise": True},
        )
        fields = of_kind[kind]
        if kind == 3:  # equal tokens, and all of one document, again and again
            tokens = draw.choice(self._scene.documents).chunk.tokens if draw.random() < 0.5 else (40,)
            last = self._scene.prompts[0].tokens[-1]
            prompt = Prompt((*tokens * (700 // len(tokens)), last), ())
            return self._asked("equal tokens", draw, None, salt, {"pic": fields}, {"prompt": list(prompt.tokens)})
        return self._asked(f"many ({next(iter(fields))})", draw, prompt, salt, {"pic": fields})

    def _compiled(self, draw: Draw) -> Asked:
        """A text is compiled, anew or again; or what is asked for does not fit."""
        model, salt, after = self._scene.model, self._salt(draw), draw.choice(AFTER)
        texts = [document.chunk for document in self._scene.documents if salt in document.salts]
        chunk = draw.choice([*self._scene.uncompiled, *(chunk for chunk in texts if chunk.source != "test")])
        before = [*chain(*contexts_of(model, chunk, CompileOptions(after=after)))]
        fields: dict[str, Any] = {"text": chunk.text, "before": len(before)}
        is_wrong = draw.random() < 0.3
        if is_wrong:
            mutate_tree(fields, draw)
        tokens = [*before, *chunk.tokens, chunk.tokens[-1]]
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 1, "temperature": 0}
        body |= {"kv_transfer_params": {"pic": {"compile": fields}}} | ({"cache_salt": salt} if salt else {})
        what = f"compile{' (wrong)' if is_wrong else ''}"
        return Asked(what, "/v1/completions", dumps(body), None, salt, compiles=not is_wrong)

    # Parts of a request

    def _prompt(self, draw: Draw) -> Prompt:
        return draw.choice(self._scene.prompts)

    def _salt(self, draw: Draw) -> str:
        return draw.choice((*SALTS, "", "", "the salt of nobody"))

    def _names(self, draw: Draw, prompt: Prompt, salt: str) -> dict[str, Any]:
        """Objects of a prompt by keys or chunks; few of them are another tenant's or abbreviated."""
        after, places = draw.choice(AFTER), list(prompt.places)
        if len(places) > 1 and draw.random() < 0.2:
            places.remove(draw.choice(places))
        own = salt if draw.random() < 0.9 else draw.choice(SALTS)
        keys = [self._scene.key(place.document, own, after) for place in places]
        if draw.random() < 0.3:
            keys = [key[: draw.choice((4, 8, 12, 63))] for key in keys]
        policy = {} if draw.random() < 0.1 else {"policy": draw.choice(POLICIES)}
        if draw.random() < 0.5:
            return {"keys": keys, **policy}
        shifts = [draw.choice((0, 0, 0, 0, 1, -2, 9, 400)) for _ in keys]
        starts = [max(0, place.start - place.offset + shift) for place, shift in zip(places, shifts, strict=True)]
        return {"chunks": [{"key": k, "start": start} for k, start in zip(keys, starts, strict=True)], **policy}

    def _asked(
        self, what: str, draw: Draw, prompt: Prompt | None, salt: str, params: Any, more: dict[str, Any] | None = None
    ) -> Asked:
        """A completion, or a chat, with more of vLLM's own options."""
        is_stream = draw.random() < 0.2
        body: dict[str, Any] = {"model": "tiny", "max_tokens": draw.choice((1, 1, 2, 3, 5)), "temperature": 0}
        body |= {"ignore_eos": True, "return_tokens_as_token_ids": True, "return_token_ids": True}
        body |= {"stream": True} if is_stream else {}
        body |= {"cache_salt": salt} if salt else {}
        is_absent = params is None and draw.random() < 0.8
        body |= {} if is_absent else {"kv_transfer_params": params}
        body |= {"request_id": draw.choice(("same", "other"))} if draw.random() < 0.1 else {}
        body |= {"n": 2} if draw.random() < 0.05 else {}
        if prompt is not None and prompt.message is not None:
            body |= {"messages": [{"role": "user", "content": prompt.message}], "logprobs": True, "top_logprobs": 5}
            path = "/v1/chat/completions"
        else:
            body |= {"prompt": [] if prompt is None else list(prompt.tokens), "logprobs": 5}
            body |= {"prompt_logprobs": 1} if not is_stream and draw.random() < 0.03 else {}
            path = "/v1/completions"
        body |= more or {}
        is_no_object = bool(body.get("vllm_xargs", {}).get("kv_transfer_params"))
        leaves = draw.random() < 0.04
        return Asked(what, path, dumps(body), prompt, salt, is_stream, leaves, is_no_object=is_no_object)
