"""Agents, unmodified and headless, against `pic serve`: a task of several calls in a small repository.

The model is scripted (`scripted.py`): it looks, says a broken call before a good one, mends a file, runs its check, and
ends. In other tasks its only call is cut by the limit of tokens, or broken: nothing of it may be run.
opencode and aider run with the files of their recipes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted import save_scripted
from serve.live import END

from agents.conftest import AGENTS, AIDER, RUNS
from benchmarks.recipes import block

WRONG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
CHECK = "from sums import add\n\nassert add(2, 3) == 5\nprint('it', 'adds')\n"
LOOK, MEND, RUN = "cat sums.py", "sed -i 's/a - b/a + b/' sums.py", "python3 check.py"
MAX_TOKENS = 300
BLOCK = "sums.py\n```\n<<<<<<< SEARCH\n{before}\n=======\n    return a + b\n>>>>>>> REPLACE\n```\n"


def call(name: str, **arguments: str) -> str:
    return f"<call>{json.dumps({'name': name, 'arguments': arguments})}</call>"


def script(name: str, tool: str, field: str, **more: str) -> dict[str, list[str]]:
    """The turns of a model that works with a shell. `name` makes its texts others than those of another agent."""
    return {
        f"mend {name}": [
            f"<think>{name}, which file is it?</think>I read it as {name}. {call(tool, **{field: LOOK}, **more)}{END}",
            f"Now {name} mends it. <call>{{broken by {name}</call>{call(tool, **{field: MEND}, **more)}{END}",
            f"And {name} checks. {call(tool, **{field: RUN}, **more)}{END}",
            f"Mended by {name}, and its check passes.{END}",
        ],
        f"break {name}": [f'I break it. <call>{{"name": "{tool}", "arguments": {{"{field}": "rm sums.py</call>{END}'],
        f"cut {name}": [f'I cut it. <call>{{"name": "{tool}", "arguments": {{"{field}": "rm sums.py'],
        f"mend {name} without tools": [f"Sums of {name}{END}"],  # the title of a conversation
    }


OPENCODE = {"pic-chat": "chat", "pic-responses": "responses", "pic-messages": "messages"}
REPLIES = script("codex", "exec_command", "cmd")
for dialect in OPENCODE.values():
    REPLIES |= script(dialect, "bash", "command", description=f"What {dialect} does")
REPLIES |= {
    "mend aider without tools": [
        "It is this line.\n\n" + BLOCK.format(before="    return a * b") + END,  # no such line: it asks again
        *(f"Aider writes turn {number} itself.{END}" for number in (1, 2)),
        "Then this one.\n\n" + BLOCK.format(before="    return a - b") + END,
    ],
    "break aider without tools": [
        "I break it.\n\n" + BLOCK.format(before=f"    never {number}") + END
        if number % 3 == 0
        else f"Turn {number}.{END}"
        for number in range(10)
    ],
    "cut aider without tools": ["I cut it.\n\n" + BLOCK.format(before="    return a - b").partition("=======")[0]],
}


@dataclass(frozen=True)
class Agents:
    """A server, and a home for those that ask it."""

    url: str
    home: Path

    def requests(self) -> int:
        """How many were answered."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        counts = re.findall(
            r'^pic_requests_total\{route="[^"]*(?:completions|messages|responses)",status="200"\} (\S+)$', text, re.M
        )
        return round(sum(map(float, counts)))

    def run(
        self, agent: str, command: list[str], repository: Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A run of an agent in the repository, with no terminal."""
        keep = {name: os.environ[name] for name in ("PATH", "LANG", "SSL_CERT_FILE") if name in os.environ}
        before = self.requests()
        done = subprocess.run(
            command, cwd=repository, env=keep | {"HOME": str(self.home)} | variables, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        mended = (repository / "sums.py").read_text() == RIGHT
        RUNS.append({"agent": agent, "task": command[-1].split("(say ")[1].split(")")[0],
                     "requests": self.requests() - before, "exit": done.returncode, "mended": mended})  # fmt: skip
        return done


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    model = save_scripted(tmp_path_factory.mktemp("said") / "model", REPLIES, positions=1 << 17, layers=1)
    command = [sys.executable, "-m", "pictool", "serve", "-m", str(model), "--name", "said", "--port", "0", "--check",
               "off", "--store", str(tmp_path_factory.mktemp("store")), "--max-tokens", str(MAX_TOKENS)]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = next(found[1] for line in process.stderr if (found := re.search(r"on (http://\S+)/v1", line)))
            yield Agents(url, tmp_path_factory.mktemp("home"))
        finally:
            process.terminate()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    (root / "sums.py").write_text(WRONG)
    (root / "check.py").write_text(CHECK)
    who = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    for words in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "--message", "Sums"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    return root


def codex(agents: Agents, repository: Path, task: str) -> subprocess.CompletedProcess[str]:
    provider = {"name": "pic", "base_url": f"{agents.url}/v1", "wire_api": "responses"}
    options = {"model": "said", "model_provider": "pic", **{f"model_providers.pic.{k}": v for k, v in provider.items()}}
    settings = [word for name, value in options.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    command = [str(AGENTS / "codex"), "exec", "--dangerously-bypass-approvals-and-sandbox", *settings]
    return agents.run("codex", [*command, f"Mend the sum; (say {task} codex)"], repository)


def opencode(agents: Agents, repository: Path, task: str, provider: str) -> subprocess.CompletedProcess[str]:
    content: dict[str, Any] = json.loads(block("opencode", "json", agents.url).replace("MODEL", "said"))
    known = content["provider"].pop("pic")
    known["models"]["said"]["limit"]["context"] = 1 << 17  # as the scripted model has
    packages = {
        "pic-chat": known["npm"],
        "pic-responses": "@ai-sdk/openai",
        "pic-messages": "@ai-sdk/anthropic",
    }
    content["provider"] = {name: known | {"npm": package, "name": name} for name, package in packages.items()}
    content |= {"permission": {"*": "allow"}, "autoupdate": False, "share": "disabled"}
    command = [str(AGENTS / "opencode"), "run", "--model", f"{provider}/said"]
    return agents.run(
        f"opencode {OPENCODE[provider]}", [*command, f"Mend the sum; (say {task} {OPENCODE[provider]})"], repository,
        OPENCODE_CONFIG_CONTENT=json.dumps(content),
    )  # fmt: skip


def aider(agents: Agents, repository: Path, task: str) -> subprocess.CompletedProcess[str]:
    config = agents.home / "aider.yml"
    config.write_text(block("aider", "yaml", agents.url).replace("smollm2", "said"))
    options = ["--config", str(config), "--yes-always", "--no-auto-commits", "--no-gitignore", "--test-cmd", RUN,
               "--auto-test"]  # fmt: skip
    return agents.run(
        "aider", [str(AIDER), *options, "sums.py", "--message", f"Mend it; (say {task} aider)"], repository
    )


def test_codex(agents: Agents, repository: Path) -> None:
    done = codex(agents, repository, "mend")
    assert done.returncode == 0, done.stderr
    assert (repository / "sums.py").read_text() == RIGHT and "it adds" in done.stderr
    assert "Mended by codex" in done.stdout and "{broken by codex" in done.stderr


@pytest.mark.parametrize("provider", OPENCODE)
def test_opencode(agents: Agents, repository: Path, provider: str) -> None:
    done = opencode(agents, repository, "mend", provider)
    assert done.returncode == 0, done.stderr
    assert (repository / "sums.py").read_text() == RIGHT
    assert f"Mended by {OPENCODE[provider]}" in done.stdout


def test_aider(agents: Agents, repository: Path) -> None:
    done = aider(agents, repository, "mend")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (repository / "sums.py").read_text() == RIGHT and "it adds" in done.stdout


@pytest.mark.parametrize("task", ["break", "cut"])
@pytest.mark.parametrize("agent", ["codex", *OPENCODE, "aider"])
def test_a_call_that_is_none_is_not_run(agents: Agents, repository: Path, agent: str, task: str) -> None:
    """It is shown as the text that it is."""
    if agent == "codex":
        done = codex(agents, repository, task)
    elif agent == "aider":
        done = aider(agents, repository, task)
    else:
        done = opencode(agents, repository, task, agent)
    assert (repository / "sums.py").read_text() == WRONG
    shown = done.stdout + done.stderr
    assert {"break": "I break it", "cut": "I cut it."}[task] in shown, shown
