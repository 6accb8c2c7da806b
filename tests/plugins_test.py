"""Classes of other packages, by entry points."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import pictool.linker.policies as package
from pictool.engines import engine_class, engine_names
from pictool.errors import InputError
from pictool.linker.policies.base import Policy
from pictool.plugins import PluginError, find_classes
from pictool.store.codecs import codecs

MODULE = """
from pictool.engines.base import Engine
from pictool.linker.policies.base import Policy, Selection, no_rows
from pictool.store.codecs.none import Uncoded

class Mine(Policy):
    name = "mine"
    def select(self, prompt):
        return Selection(no_rows(prompt.layout))

class Twin(Mine):
    name = "naive"

class Copy(Uncoded):
    name = "copy"

class Echo(Engine):
    name = "echo"

nothing = 3
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on the path; what is written to entry_points.txt in it is installed."""
    (tmp_path / "their_module.py").write_text(MODULE)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield info / "entry_points.txt"
    codecs.cache_clear()


def found() -> dict[str, type[Policy]]:
    return find_classes(package.__name__, package.__path__, "pictool.policies", Policy)  # type: ignore[type-abstract]


def test_a_policy_of_another_package_stands_beside_ours(install: Path) -> None:
    assert "mine" not in found()
    install.write_text("[pictool.policies]\nwhatever = their_module:Mine\n")
    assert "mine" in found() and "naive" in found() and list(found()) == sorted(found())


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("x = their_module:Twin", "'naive'"),
        ("x = their_module:nothing", "Policy"),
        ("x = their_module:Copy", "Policy"),
        ("x = their_module:Missing", "'Missing'"),
        ("x = no_such_module:Mine", "'no_such_module'"),
    ],
)
def test_an_entry_point_that_cannot_be_used_is_named(install: Path, entry: str, named: str) -> None:
    install.write_text(f"[pictool.policies]\n{entry}\n")
    with pytest.raises(PluginError, match=f" x of pictool.policies: .*{named}"):
        found()


def test_codecs_and_engines_of_another_package(install: Path) -> None:
    install.write_text("[pictool.codecs]\nc = their_module:Copy\n[pictool.engines]\necho = their_module:Echo\n")
    codecs.cache_clear()
    assert codecs()["copy"].name == "copy" and "int8" in codecs()
    assert engine_names() == ["echo", "llamacpp", "torch"] and engine_class("echo").name == "echo"
    install.write_text("[pictool.engines]\necho = their_module:Copy\nlost = no_such_module:Echo\n")
    for name in ("echo", "lost"):
        with pytest.raises(PluginError, match=f" {name} of pictool.engines: "):
            engine_class(name)
    install.write_text("[pictool.engines]\necho = their_module:Echo\n")
    with pytest.raises(InputError, match=r"^engine 'onnx': "):
        engine_class("onnx")
