"""`pic tui` as a program: in a terminal of its own, without one, without textual; what it loads and what it sends."""

from __future__ import annotations

import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

import pytest
from terminal import open_terminal
from traces import make_trace

from pictool.store.store import Store
from pictool.trace.format import write_trace
from tui.drive import put_object

MAIN = "from pictool.commands import main; main()"
HEAVY = ("torch", "transformers", "tokenizers", "vllm")
COLOUR = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")

_ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")  # a word may be drawn in pieces


def in_terminal(source: str, *arguments: str, steps: Sequence[tuple[bytes, bytes]], **env: str) -> bytes:
    """What the program sends to a terminal of 100 × 30. A step: what is waited for, then typed. It must end with 0."""
    leader, follower = open_terminal()
    ioctl(follower, TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", source, "tui", *arguments], stdin=follower, stdout=follower, stderr=follower,
        env={"TERM": "xterm-256color", **os.environ, **env}, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    seen, done, began = b"", 0, time.monotonic()
    try:
        while time.monotonic() - began < 60:
            if select.select([leader], [], [], 0.1)[0]:
                try:
                    seen += os.read(leader, 1 << 16)
                except OSError:  # the other side is closed
                    break
            if done < len(steps) and steps[done][0] in _ESCAPE.sub(b"", seen):
                os.write(leader, steps[done][1])
                done += 1
        assert done == len(steps), seen[-2000:]
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        os.close(leader)
    return seen


REPORTS = f"""
import sys
try:
    {MAIN}
finally:
    open("loaded", "w").write(" ".join(sys.modules))
"""


def test_the_browser_loads_no_torch_and_not_even_numpy(store: Store) -> None:
    store.root.mkdir(exist_ok=True)
    in_terminal(REPORTS, str(store.root), steps=[(b"help", b"q")])
    loaded = set(Path("loaded").read_text().split())
    assert "textual.app" in loaded and not loaded & {*HEAVY, "numpy", "matplotlib"}


def test_no_screen_loads_torch(store: Store) -> None:
    put_object(store, "The harbour was quiet.", 5)
    for name in ("a.trace", "b.trace"):
        write_trace(Path(name), make_trace())
    in_terminal(REPORTS, str(store.root), "a.trace", "b.trace", steps=[(b"help", b"dmlt\x11")])
    loaded = set(Path("loaded").read_text().split())
    assert "pictool.tui.compare_screen" in loaded and not loaded & set(HEAVY)
    in_terminal(REPORTS, str(store.root), "a.trace", steps=[(b"help", b"mlt\x11")])
    loaded = set(Path("loaded").read_text().split())
    assert "pictool.tui.trace_screen" in loaded and not loaded & set(HEAVY)
    in_terminal(REPORTS, str(store.root), steps=[(b"harbour", b"\r"), (b"source text", b"tt\x11")])
    loaded = set(Path("loaded").read_text().split())
    assert "pictool.tui.object_screen" in loaded and not loaded & set(HEAVY)


@pytest.mark.parametrize("name", ["a.trace", "st"])
def test_without_colour_no_colour_is_sent(name: str) -> None:
    put_object(Store("st"), "The harbour was quiet.", 5)
    write_trace(Path("a.trace"), make_trace())
    with_colour = in_terminal(MAIN, name, steps=[(b"help", b"\x11")])
    assert COLOUR.search(with_colour)  # the pattern finds what is there
    without = in_terminal(MAIN, name, steps=[(b"help", b"\x11")], NO_COLOR="1")
    assert not COLOUR.search(without) and b"\x1b[" in without


def run_apart(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source, "tui", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def test_without_a_terminal_it_says_so_in_one_line(store: Store) -> None:
    store.root.mkdir(exist_ok=True)
    done = run_apart(MAIN, str(store.root))
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines() == [
        "pic: error: pic tui: needs a terminal; without one use pic inspect and pic store ls"
    ]


def test_without_textual_it_says_how_to_get_it(store: Store) -> None:
    store.root.mkdir(exist_ok=True)
    done = run_apart(f"import sys; sys.modules['textual'] = None; {MAIN}", str(store.root))
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines() == [
        "pic: error: pic tui needs textual, which is not installed; pip install 'pictool[tui]'"
    ]


def test_a_trace_that_is_none_is_refused_before_the_screen_is_taken(store: Store) -> None:
    Path("no.trace").write_text("no trace")
    leader, follower = open_terminal()
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "tui", "no.trace"], stdin=follower, stderr=follower, stdout=subprocess.PIPE,
        timeout=60, check=False,
    )  # fmt: skip
    said = os.read(leader, 1 << 16)
    os.close(leader)
    os.close(follower)
    assert done.returncode == 1 and not done.stdout
    assert said.startswith(b"pic: error: no.trace: not a trace") and said.count(b"\n") == 1 and b"\x1b" not in said
