"""One call starts vLLM, does its work, and stops it."""

from __future__ import annotations

from pathlib import Path

import vllm_rig as rig

from pictool.compiler.compile import object_key
from pictool.engines import torch as ours
from pictool.engines.vllm import engine as theirs

OPTIONS = {
    name: value for name, value in rig.default_options().items() if name not in ("max_model_len", "disable_log_stats")
}


def test_one_call_starts_and_stops(tmp_path: Path) -> None:
    world = rig.make_world(tmp_path, "llama")
    chunks = rig.text_chunks(world.model)
    done = theirs.compile(world.model, world.store, chunks, options=OPTIONS)
    assert [one.key for one in done] == [object_key(world.model, chunk) for chunk in chunks]
    assert not any(one.is_new for one in theirs.compile(world.model, world.store, chunks))
    asked = ours.Request("why?", chunks, rig.policy_of("legolink-4"), max_new_tokens=6)
    got = theirs.answer(world.model, world.store, asked, options=OPTIONS)
    want = ours.answer(world.model, world.store, asked)
    assert got.text == want.text
