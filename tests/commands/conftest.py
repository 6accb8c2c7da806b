from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny
from traces import make_trace
from transformers import LlamaConfig

from commands.run import Objects, pic, write
from pictool.trace.format import write_trace

TEXT = "The harbour was quiet. It holds a festival in the spring; nobody knows why.\n"
MORE = "Numbers such as 1,024 or 3.14 stand here too, and words.\n"


def save(directory: Path, seed: int = 0, positions: int = 512) -> Path:
    return tiny.save_model(directory, LlamaConfig(**{**tiny.SIZE, "max_position_embeddings": positions}), seed)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a model directory, shared: nothing writes to it."""
    return save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def objects(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Objects]:
    """Objects of this model, of another one and of another dtype, and a store; shared: nothing writes to them."""
    root = tmp_path_factory.mktemp("objects")
    other = save(root / "other", seed=1)
    text, store = write(root / "a.txt", TEXT), root / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        for name, more in (("mine", ("-m", model)), ("foreign", ("-m", other)), ("half", ("-m", model))):
            dtype = "bfloat16" if name == "half" else "float32"
            done = pic("compile", text, *more, "--dtype", dtype, "-o", root / f"{name}.kvo", "--store", store)
            assert done.code == 0, done.err
    yield Objects(root / "mine.kvo", root / "foreign.kvo", root / "half.kvo", store)


@pytest.fixture
def texts() -> tuple[Path, Path]:
    """Two documents in the working directory."""
    return write("a.txt", TEXT), write("b.txt", MORE)


POLICIES = {"naive": ("--algo", "naive"), "lego": ("--algo", "legolink-3"), "blend": ("--algo", "cacheblend-30")}
Traces = Callable[[str], Path]


@pytest.fixture(scope="session")
def linked(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a trace of every policy over a.txt and b.txt, and the store `st`; nothing writes to it."""
    root = tmp_path_factory.mktemp("linked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.chdir(root)
        write("a.txt", TEXT), write("b.txt", MORE)
        for name, policy in POLICIES.items():
            query = ("-q", "Who knows why?", "--max-new-tokens", 4)
            done = pic(
                "link", "a.txt", "b.txt", *query, *policy, "-m", model, "--store", "st", "--trace", f"{name}.trace"
            )
            assert done.code == 0, done.err
    return root


@pytest.fixture
def traces(linked: Path) -> Traces:
    """The trace of a policy, in the working directory with all that it needs."""
    shutil.copytree(linked, ".", dirs_exist_ok=True)
    return lambda name: Path(f"{name}.trace")


@pytest.fixture
def by_hand() -> Path:
    write_trace(Path("hand.trace"), make_trace([(1, 2, 5), (2, 5), (5,)], scores=np.arange(10, dtype=np.float32)))
    return Path("hand.trace")
