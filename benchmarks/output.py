"""What the scripts share: results are written with the command and the machine that made them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pictool.runtime.machine import machine


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write a results file as JSON."""
    script = Path(sys.argv[0])
    name = script.parent.name if script.name == "__main__.py" else script.stem
    arguments = [Path(each).name if Path(each).is_absolute() else each for each in sys.argv[1:]]
    command = " ".join(["python -m", f"benchmarks.{name}", *arguments])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"command": command, "machine": machine(), **results}, indent=1) + "\n")
