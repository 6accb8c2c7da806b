"""Settings: where they come from, which comes first, and that they are read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands.run import pic, write
from pictool.commands import settings
from pictool.commands.settings import Settings, read_settings
from pictool.errors import InputError


def test_without_anything_they_are_the_defaults() -> None:
    assert read_settings() == Settings()


def test_the_environment_comes_before_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        "pic.yaml",
        "{model: a, store: s, dtype: bfloat16, max_size: 10K, memory: 1M, remote_rate: 2K, head: You know., "
        "codec: int8}",
    )
    monkeypatch.setenv("PIC_MODEL", "b")
    monkeypatch.setenv("PIC_STORE", "")
    monkeypatch.setenv("PIC_MAX_SIZE", "2K")
    assert read_settings() == Settings(
        model="b",
        store="s",
        dtype="bfloat16",
        max_size=2000,
        memory=10**6,
        remote_rate=2000,
        head="You know.",
        codec="int8",
    )


def test_the_command_line_comes_before_both() -> None:
    named = Settings(model="a", remote="r", dtype="float16").override(model="b", store=None, remote="")
    assert (named.model, named.remote, named.dtype, named.store) == ("b", "", "float16", None)
    assert (named.option("model"), named.option("remote"), named.option("dtype")) == ("b", "", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("named: x", "pic.yaml: unknown key named; known are model, store"),
        ("memory: 5", "pic.yaml: memory must be a text; put it in quotes"),
        ("head: [x]", "pic.yaml: head must be a text"),
        ('store: "a\\0b"', "pic.yaml: store has a character that no text has"),
        ('remote: "\\udfff"', "pic.yaml: remote has a character that no text has"),
        ("max_size: much", "max_size 'much': must be a size such as"),
    ],
)
def test_what_makes_no_sense_is_refused_whatever_the_command_needs(text: str, message: str) -> None:
    write("pic.yaml", text)
    with pytest.raises(InputError) as caught:
        read_settings()
    assert message in str(caught.value)
    outcome = pic("store", "ls")
    assert outcome.code == 1 and message in outcome.err


def test_a_command_reads_them_once(model: Path, texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    write("pic.yaml", f"{{model: '{model}', head: You know all.}}")
    count, read_yaml = 0, settings.read_yaml

    def counted(path: Path, keys: tuple[str, ...]) -> dict[str, object]:
        nonlocal count
        count += 1
        return read_yaml(path, keys)

    monkeypatch.setattr(settings, "read_yaml", counted)
    assert pic("link", "a.txt", "-q", "why?", "--max-new-tokens", 1).code == 0
    assert count == 1
