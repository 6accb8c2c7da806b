"""Write what is installed in this environment as a lock: `python tests/write_lock.py constraints.txt`.

The comment at the head of the file stays. Build tags are left out: a CPU build and the ordinary one both satisfy a pin.
So is what was installed from a file: whoever installs it names its version.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main(path: Path) -> None:
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    freeze = [sys.executable, "-m", "pip", "freeze", "--all", "--exclude-editable"]
    installed = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout.splitlines()
    pins = [line.partition("+")[0] for line in installed if " @ " not in line]
    path.write_text("\n".join([*comment, *pins]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
