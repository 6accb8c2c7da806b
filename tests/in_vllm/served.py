"""An engine in processes of its own: answers the cases of a file, and writes the log-probabilities beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pictool.runtime.model import load_model
from pictool.store.store import Store


def main(path: Path) -> None:
    import torch
    import vllm_rig as rig

    job: dict[str, Any] = json.loads(path.read_text())
    model = load_model(job["model"], "cpu", "float32")
    world = rig.World(Path(job["model"]), Store(job["store"]), model)
    engine = rig.Engine(world, **job["options"])
    cases = [rig.Case(tokens, params, None) for tokens, params in job["cases"]]  # type: ignore[arg-type]
    answers = engine.ask(*cases, num_tokens=job["num_tokens"])
    if job["break"]:
        broken = Path(job["break"])
        broken.write_bytes(broken.read_bytes()[:-1000])
        answers += engine.ask(cases[0])
    accepted = engine.metric("spec_decode_num_accepted_tokens")
    fields = [(answer.tokens, answer.logprobs, answer.report) for answer in answers]
    torch.save((fields, accepted), path.with_suffix(".pt"))
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":  # engines start processes, which import this module
    main(Path(sys.argv[1]))
