"""An engine in processes of its own: asks the cases of a file, and writes the log-probabilities beside it."""

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

    given: dict[str, Any] = json.loads(path.read_text())
    model = load_model(given["model"], "cpu", "float32")
    world = rig.World(Path(given["model"]), Store(given["store"]), model)
    engine = rig.Engine(world, **given["options"])
    asked = [rig.Case(tokens, params, None) for tokens, params in given["cases"]]  # type: ignore[arg-type]
    answers = engine.ask(*asked, num_tokens=given["num_tokens"])
    if given["break"]:
        broken = Path(given["break"])
        broken.write_bytes(broken.read_bytes()[:-1000])
        answers += engine.ask(asked[0])
    torch.save([(one.tokens, one.logprobs, one.report) for one in answers], path.with_suffix(".pt"))
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":  # engines start processes, which import this module
    main(Path(sys.argv[1]))
