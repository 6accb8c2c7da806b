"""What a process prepares once: a tiny model, documents, and honest objects, traces and answers to compare with."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from commands.run import Outcome as Done
from commands.run import pic, write
from safetensors.numpy import load
from transformers.utils import logging

import pictool.runtime.model as model_module
from hostile.judge import Judge, Outcome
from pictool.store.store import Store

TEXTS = {
    "a.txt": "The harbour was quiet. It holds a festival in the spring; nobody knows why.\n",
    "b.txt": "Numbers such as 1,024 or 3.14 stand here too, and words.\n",
}
QUERY = "Who knows why?"
CODECS = ("none", "zstd", "int8", "int4", "fp8")
HYBRID = "hybrid"  # objects with states, under codec "none"
POLICIES = {"naive": ("--algo", "naive"), "lego": ("--algo", "legolink-3"), "blend": ("--algo", "cacheblend-30")}
ATOL = 1e-4  # of a logit


@dataclass(frozen=True)
class Answer:
    """An answer with its logits."""

    text: str
    tokens: dict[str, Any]
    logits: np.ndarray[Any, Any]

    def differs(self, other: Answer) -> str | None:
        """What is different, in words; None if nothing is."""
        if self.tokens != other.tokens:
            return f"tokens {other.tokens}, not {self.tokens}"
        if self.logits.shape != other.logits.shape or not np.allclose(self.logits, other.logits, atol=ATOL):
            return "other logits"
        return None if self.text == other.text else f"{other.text!r}, not {self.text!r}"


class Scene:
    """Honest files, each as its bytes; the models' directories are the only ones that cases read in place.

    A kind of objects is a codec, or `HYBRID`.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.model, self.hybrid = root, root / "model", root / "hybrid"
        tiny.save_model(self.model, tiny.CONFIGS["llama"]())
        tiny.save_model(self.hybrid, tiny.CONFIGS["qwen3_5"]())
        self.objects: dict[str, dict[str, bytes]] = {}  # by kind: path within a store → content
        self.keys: dict[str, dict[str, str]] = {}  # by kind: document → key
        self.traces: dict[str, bytes] = {}
        self.answers: dict[str, Answer] = {}  # by kind
        share_models(self.model, self.hybrid)
        with inside(root / "prepared"):
            for name, text in TEXTS.items():
                write(name, text)
            for kind in (*CODECS, HYBRID):
                self._compile(kind)
            self._chains()
            for name, policy in POLICIES.items():
                self.traces[name] = self._trace(policy)
            self.archive = self._archive()
        (root / "outside").mkdir()
        (root / "what").touch()
        self.judge = Judge(root)

    def model_of(self, kind: str) -> Path:
        """The model of a kind of objects."""
        return self.hybrid if kind == HYBRID else self.model

    def link(self, kind: str, *documents: object, more: tuple[object, ...] = ()) -> tuple[object, ...]:
        """The arguments of the link that `answers` has, from documents of a kind."""
        codec, policy = kind if kind in CODECS else "none", "legolink-16" if kind == HYBRID else "naive"
        return (
            "link", *(documents or TEXTS), "-q", QUERY, "--codec", codec, "-m", self.model_of(kind), "--store", "st",
            *(() if "--algo" in more else ("--algo", policy)), "--max-new-tokens", 3, "--trace", "x.trace", "--json",
            *more,
        )  # fmt: skip

    def check_answer(self, kind: str, outcome: Outcome | Done) -> str | None:
        """What is wrong with the answer of `link`."""
        return self.answers[kind].differs(_answer(outcome))

    def write_store(self, kind: str, name: str = "st") -> dict[Path, bytes]:
        """Write the honest store of a kind; returns its files."""
        files = {Path(name, path): content for path, content in self.objects[kind].items()}
        for path, content in files.items():
            write(path, content)
        return files

    def write_texts(self) -> None:
        for name, text in TEXTS.items():
            write(name, text)

    def _compile(self, kind: str) -> None:
        codec = () if kind == HYBRID else ("--codec", kind)
        linked = pic(*self.link(kind))
        self.answers[kind] = _answer(linked)
        store, model = Store("st"), self.model_of(kind)
        compiling = ("compile", *TEXTS, "-m", model, "--store", "st", *codec, "--json")
        self.keys[kind] = {done["source"]: done["key"] for done in _require(pic(*compiling)).json["objects"]}
        self.objects[kind] = {
            str(path.relative_to("st")): path.read_bytes() for path in sorted(Path("st/objects").rglob("*.kvo"))
        }
        assert set(self.keys[kind].values()) < set(store.keys())
        shutil.rmtree("st")

    def _chains(self) -> None:
        _require(pic(*self.prefix_link()))
        self.chain = {
            str(path.relative_to("st")): path.read_bytes() for path in sorted(Path("st/objects").rglob("*.kvo"))
        }
        shutil.rmtree("st")

    def prefix_link(self, model: Path | None = None) -> tuple[object, ...]:
        """A link that reuses a stored chain, and compares itself with full recompute: it must agree."""
        return (
            "link",
            *TEXTS,
            "-q",
            QUERY,
            "--algo",
            "prefix:block=4",
            "-m",
            model or self.model,
            "--store",
            "st",
            "--max-new-tokens",
            2,
            "--compare",
            "--json",
        )

    def _trace(self, policy: tuple[object, ...]) -> bytes:
        _require(pic(
            "link", *TEXTS, "-q", QUERY, *policy, "-m", self.model, "--store", "st", "--max-new-tokens", 3,
            "--trace", "t.trace",
        ))  # fmt: skip
        return Path("t.trace").read_bytes()

    def _archive(self) -> bytes:
        _require(pic("store", "push", "all", "-o", "x.kva", "--store", "st"))
        return Path("x.kva").read_bytes()


def check_agreement(outcome: Outcome) -> str | None:
    """What is wrong with an exact link that compared itself with full recompute."""
    compare = json.loads(outcome.out)["compare"]
    is_equal = compare["same_answer"] and abs(compare["kl"]) < ATOL
    return None if is_equal else f"KL {compare['kl']}, same answer: {compare['same_answer']}"


def _answer(outcome: Outcome | Done) -> Answer:
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    return Answer(report["answer"], report["tokens"], load(Path("x.trace").read_bytes())["logits"])


def _require(done: Done) -> Done:
    assert done.code == 0, done.err
    return done


def share_models(*directories: Path) -> None:
    """Load the scene's models once in this process; all others are loaded whenever they are named."""
    real = model_module.load_model
    shared = functools.lru_cache(16)(real)

    def load_model(name: str | None = None, device: str = "auto", dtype: str = "auto", salt: str = "") -> Any:
        return (shared if name is not None and Path(name) in directories else real)(name, device, dtype, salt)

    model_module.load_model = load_model


@contextmanager
def inside(directory: Path) -> Iterator[None]:
    """Work in a new directory, with caches and temp files of its own; it is removed afterwards."""
    before = Path.cwd()
    (directory / "temp").mkdir(parents=True)
    os.environ["XDG_CACHE_HOME"], tempfile.tempdir = str(directory / "cache"), str(directory / "temp")
    os.environ["MPLCONFIGDIR"] = str(directory / "cache")
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)
        shutil.rmtree(directory)


def quiet() -> None:
    """One thread, and no settings or advice from elsewhere."""
    for name in [name for name in os.environ if name.startswith("PIC_")]:
        del os.environ[name]
    os.environ["COLUMNS"], os.environ["HF_HUB_OFFLINE"] = "100", "1"
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
