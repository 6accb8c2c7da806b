"""What the programs of docs/recipes compute of their prompts, and how long they wait for the first text.

    OMP_NUM_THREADS=1 python -m benchmarks.recipes --python .venv-llamacpp/bin/python --out FILE

Each page's own program, file or command asks `pic serve -m smollm2` two questions about the same files; where it keeps
prefixes, the server is started again before the second. Where it links, `full` is the first question to a server that
links none. All numbers are those of the server's `/metrics`: `reused` prompt tokens were an exact prefix, or linked and
not recomputed; `ttft_s` is that of all requests of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks import agent_loop
from benchmarks.output import write_results

ROOT = Path(__file__).parents[1]
LOCAL = "http://localhost:8000"  # as pages have it
GUIDES, NOTE = ("laptop-gguf", "threat-model", "tutorial"), 1400  # characters of each
QUESTIONS = ("What is it for?", "Where does it end?")
LINKING, KEEPING = ("langchain", "llama-index", "llm"), ("opencode", "aider", "continue")
_METRIC = re.compile(r'^pic_(?:tokens_total\{kind="(\w+)"\}|ttft_seconds_(sum|count)) (\S+)$', re.MULTILINE)


def block(page: str, language: str, url: str = LOCAL) -> str:
    """The code in a language on a page of docs/recipes, for a server at this address."""
    text = (ROOT / "docs" / "recipes" / f"{page}.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return str(found).replace(LOCAL, url.rstrip("/"))


def commands(page: str, program: str) -> list[list[str]]:
    """The commands of a page that begin like this, as words after the program."""
    text = (ROOT / "docs" / "recipes" / f"{page}.md").read_text(encoding="utf-8")
    return [shlex.split(line, True)[1:] for line in re.findall(rf"^\$ ({program} .*)$", text, re.MULTILINE)]


def continue_request(config: dict[str, Any], files: dict[str, str], question: str) -> dict[str, Any]:
    """The arguments of `httpx.post` for a chat about files, as Continue's provider `openai` sends it."""
    pasted = "".join(f"```{name}\n{text}\n```\n\n" for name, text in files.items())
    options = config["defaultCompletionOptions"]
    chosen = {"model": config["model"], "max_tokens": options["maxTokens"], "temperature": options["temperature"]}
    body = chosen | {"messages": [{"role": "user", "content": pasted + question}], "stream": True}
    headers = {"Authorization": f"Bearer {config['apiKey']}", "api-key": config["apiKey"]}
    return {"url": f"{config['apiBase']}/chat/completions", "json": body, "headers": headers}


def serving(python: str, store: Path, *options: str) -> AbstractContextManager[httpx.Client]:
    """A client of `pic serve -m smollm2` on a store."""
    own = ("--check", "off", "--max-tokens", "16", "--store", str(store))
    return agent_loop.serving("smollm2", *own, *options, python=python)


def ask(page: str, home: Path, url: str, question: str) -> None:
    """Ask by the means of a page, in a directory that has `notes`."""
    variables = {"HOME": str(home), "LLM_USER_PATH": str(home), "LANGSMITH_TRACING": "false"}
    if page == "continue":
        (config,) = yaml.safe_load(block(page, "yaml", url))["models"]
        files = {f"notes/{path.name}": path.read_text() for path in sorted((home / "notes").iterdir())}
        httpx.post(**continue_request(config, files, question), timeout=900).raise_for_status()
        return
    if page == "llm":
        (home / "extra-openai-models.yaml").write_text(block(page, "yaml", url))
        *words, _ = commands(page, "llm -m")[QUESTIONS.index(question)]
        command = [sys.executable, "-m", "llm", *words, question, "--key", "none"]
    elif page == "opencode":
        config = json.loads(block(page, "json", url).replace("MODEL", "smollm2")) | {"tools": {"*": False}}
        variables |= {"OPENCODE_CONFIG_CONTENT": json.dumps(config | {"autoupdate": False, "share": "disabled"})}
        command = [str(ROOT / "tests" / "agents" / "node_modules" / ".bin" / "opencode"), "run", question]
    elif page == "aider":
        (home / "aider.yml").write_text(block(page, "yaml", url))
        options = ["--config", "aider.yml", "--yes-always", "--no-git", "notes/1.txt", "--message", question]
        command = [str(ROOT / ".venv-aider" / "bin" / "aider"), *options]
    else:
        command = [sys.executable, "-c", block(page, "python", url), question]
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "SSL_CERT_FILE") if name in os.environ}
    subprocess.run(command, cwd=home, env=environment | variables, stdin=subprocess.DEVNULL, check=True, timeout=900)


def measure(client: httpx.Client, run: Callable[[], object]) -> dict[str, Any]:
    """What a new server counts of a run."""
    run()
    found = {name or part: float(number) for name, part, number in _METRIC.findall(client.get("/metrics").text)}
    prompt, reused = found["exact"] + found["linked"] + found["recomputed"], found["prefix"] + found["linked"]
    return {"requests": round(found["count"]), "prompt_tokens": round(prompt), "reused": round(reused),
            "computed": round(prompt - reused), "ttft_s": round(found["sum"], 2)}  # fmt: skip


def make_notes(home: Path) -> Path:
    """A directory with the files that pages ask about."""
    (home / "notes").mkdir(parents=True)
    for number, guide in enumerate(GUIDES, 1):
        text = (ROOT / "docs" / "guides" / f"{guide}.md").read_text(encoding="utf-8")[:NOTE]
        (home / "notes" / f"{number}.txt").write_text(text)
    return home


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the server's; one with llama.cpp answers by it")
    parser.add_argument("--pages", default=",".join(LINKING + KEEPING))
    parser.add_argument("--out", type=Path, help="results file")
    options = parser.parse_args()
    rows = []
    for page in options.pages.split(","):
        with tempfile.TemporaryDirectory() as root:
            home, store = make_notes(Path(root, "home")), Path(root, "store")
            runs = [("full", QUESTIONS[0], Path(root, "other"))] if page in LINKING else []
            runs += [("first", QUESTIONS[0], store), ("second", QUESTIONS[1], store)]
            if page == "llm":
                words = ["compile", "-m", "smollm2", "--store", str(store), *map(str, (home / "notes").iterdir())]
                subprocess.run([options.python, "-m", "pictool", *words], check=True)
            for run, question, of in runs:
                more = ["--algo", "full"] if run == "full" else ["--keep-prefixes", "4G"] if page in KEEPING else []
                with serving(options.python, of, *more) as client:
                    found = measure(client, partial(ask, page, home, str(client.base_url), question))
                rows.append({"page": page, "run": run} | found)
                print(rows[-1], flush=True)
        if options.out is not None:
            write_results(options.out, {"model": "smollm2", "runs": rows})


if __name__ == "__main__":
    main()
