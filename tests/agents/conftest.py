"""These tests need the agents (`make test-agents`); elsewhere they are not collected."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

AGENTS = Path(__file__).parent / "node_modules" / ".bin"
AIDER = Path(os.environ.get("PIC_AIDER", Path(__file__).parents[2] / ".venv-aider")).absolute() / "bin" / "aider"
collect_ignore_glob = [] if AGENTS.exists() and AIDER.exists() else ["*_test.py"]
RUNS: list[dict[str, Any]] = []


def pytest_sessionfinish() -> None:
    """Write the runs to the file that PIC_AGENTS_OUT names."""
    if RUNS and (path := os.environ.get("PIC_AGENTS_OUT")):
        results = {"command": "PIC_AGENTS_OUT=FILE make test-agents", "runs": RUNS}
        Path(path).write_text(json.dumps(results, indent=1) + "\n")
