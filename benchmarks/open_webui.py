"""What Open WebUI's chats with three files compute, with `pic serve` started again between them.

    export OMP_NUM_THREADS=1
    python -m benchmarks.open_webui --python .venv-llamacpp/bin/python --out benchmarks/results/open_webui.json

`first` and `second` are the two questions of `benchmarks.recipes` by the program of docs/recipes/open-webui.md, which
uploads the files the first time. Open WebUI (`.venv-open-webui`) runs headless with the settings of that page.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx

from benchmarks.output import write_results
from benchmarks.recipes import QUESTIONS, ROOT, block, make_notes, measure, serving

PAGE, LOCAL = "open-webui", "http://localhost:8080"
WEBUI = Path(os.environ.get("PIC_OPEN_WEBUI", ROOT / ".venv-open-webui")).absolute() / "bin" / "open-webui"


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@contextmanager
def open_webui(home: Path, url: str) -> Iterator[str]:
    """The address of Open WebUI with the settings of the page, in front of a server at a URL."""
    lines = [line.split(" ")[0] for line in block(PAGE, "sh", url).splitlines() if not line.startswith("#")]
    settings = dict(line.split("=", 1) for line in lines)
    port = free_port()
    own = {"PATH": os.environ["PATH"], "HOME": str(home), "DATA_DIR": str(home), "WEBUI_SECRET_KEY": "none"}
    command = [str(WEBUI), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (home / "log").open("w") as log, subprocess.Popen(command, env=own | settings, stdout=log, stderr=log) as run:
        try:
            wait_for(f"http://127.0.0.1:{port}/health", run)
            yield f"http://127.0.0.1:{port}"
        finally:
            run.terminate()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            if httpx.get(url).is_success:
                return
        except httpx.TransportError:
            time.sleep(1)
    raise RuntimeError(f"ended with {process.returncode}")


def ask(home: Path, url: str, question: str, model: str = "smollm2") -> str:
    """A chat with the notes, by the program of the page."""
    program = block(PAGE, "python").replace(LOCAL, url).replace('"smollm2"', f'"{model}"')
    command = [sys.executable, "-c", program, question]
    return subprocess.run(command, cwd=home, check=True, timeout=900, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the server's; one with llama.cpp answers by it")
    parser.add_argument("--out", type=Path, help="results file")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as root:
        home, port = make_notes(Path(root, "home")), free_port()
        with open_webui(home, f"http://127.0.0.1:{port}") as url:
            for run, question in zip(("first", "second"), QUESTIONS, strict=True):
                with serving(
                    options.python, Path(root, "store"), "--keep-prefixes", "4G", "--port", str(port)
                ) as client:
                    rows.append({"run": run} | measure(client, partial(ask, home, url, question)))
                print(rows[-1], flush=True)
    if options.out is not None:
        write_results(options.out, {"model": "smollm2", "runs": rows})


if __name__ == "__main__":
    main()
