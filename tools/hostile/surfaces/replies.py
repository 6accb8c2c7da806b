"""Hostile servers of links: what answers `pic link --server` is no `pic serve`, or one whose events are spoilt."""

from __future__ import annotations

import copy
import random
from typing import Any, ClassVar
from unittest import mock

from hostile.judge import Case, Step
from hostile.server import Answer, HostileServer, Request, draw_answer
from hostile.surfaces.base import Surface
from hostile.values import dumps, mutate_bytes, mutate_tree

_NUMBERS = dict.fromkeys(("load_s", "select_s", "recompute_s", "ttft_s", "decode_s"), 0.1)
_COMPARE = {
    "answer": "x", "ttft_s": 0.1, "speedup": 1.0, "kl": 0.0, "same_first_token": True, "same_answer": True,
    "common_prefix": 1, "answer_kl": 0.0,
}  # fmt: skip
_EVENTS: tuple[dict[str, Any], ...] = (
    {"compiled": {"source": "a.txt", "tokens": 5}},
    {"text": "x"},
    {
        "report": {
            "answer": "x", "algo": "naive", "params": {}, "model": "m", "engine": "torch", "timing": _NUMBERS,
            "tokens": {"head": 1, "context": 2, "tail": 3, "prompt": 5, "recomputed": 0.5, "generated": 1},
            "compare": _COMPARE,
        },
        "origin": {"model": "m", "objects": []},
    },
)  # fmt: skip


class Replies(Surface):
    """A loopback server answers a link: with events of which values were exchanged, with bytes that were, or by HTTP
    that is none.
    """

    name: ClassVar[str] = "replies"
    weight: ClassVar[int] = 3

    def make(self, draw: random.Random) -> Case:
        self.scene.write_texts()
        what, answer = self._draw(draw)
        server = HostileServer({}, answer)
        self.opened.enter_context(mock.patch("pictool.commands.linking.server._TIMEOUT_S", 1.0))
        self.opened.callback(server.close)
        more = draw.choice(((), ("--json",), ("--compare",), ("--verify", "1", "--max-kl", "1")))
        link = ("link", "a.txt", "-q", "Who?", "--server", server.url, *more)
        return Case(what, (Step(link, (server.url, "a.txt")),), {}, ())

    def _draw(self, draw: random.Random) -> tuple[str, Answer]:
        if draw.random() < 0.2:
            return draw_answer(draw)
        events, what = copy.deepcopy(_EVENTS), "events as they are"
        if draw.random() < 0.8:
            what = mutate_tree(draw.choice(events), draw)
        lines = b"".join(b"data: %b\n\n" % dumps(event).encode(errors="surrogatepass") for event in events)
        if draw.random() < 0.3:
            lines, more = mutate_bytes(lines, draw)
            what = f"{what}; {more}"

        status = draw.choice((200, 200, 200, 200, 400, 500))

        def answer(request: Request) -> None:
            request.send_head(status, "Connection: close")
            request.send(lines + b"data: [DONE]\n\n")
            request.connection.close()

        return what, answer
