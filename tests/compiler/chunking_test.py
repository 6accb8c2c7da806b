from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pictool.compiler import chunking
from pictool.compiler.chunking import decode_text, is_foreign, make_chunks, read_text
from pictool.errors import InputError
from pictool.runtime.model import Model, load_model, wrap_model

MODEL = wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())


def texts(text: str, chunk_tokens: int | None, model: Model = MODEL) -> list[str]:
    return [chunk.text for chunk in make_chunks(model, text, "x", chunk_tokens)]


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=120), st.integers(4, 30))
@example("\U00010000\n", 4)  # a character of four tokens, and a sentence's end
def test_pieces_join_to_the_text_and_keep_to_the_limit(text: str, limit: int) -> None:
    chunks = make_chunks(MODEL, text, "x", limit)
    assert "".join(chunk.text for chunk in chunks) == text
    for chunk in chunks:
        assert 0 < len(chunk.tokens) <= limit
        assert chunk.tokens == MODEL.encode(chunk.text)


def test_one_chunk_per_text_by_default() -> None:
    assert texts(tiny.TEXT, None) == [tiny.TEXT]
    assert texts(tiny.TEXT, 10_000) == [tiny.TEXT]


def test_a_cut_prefers_a_sentence_end_in_the_last_tenth() -> None:
    sentence = "aaaa bbbb cccc dddd eeee ffff gggg hhhh iiii. "
    tokens = len(MODEL.encode(sentence))
    pieces = texts(sentence * 6, tokens + tokens // 20)
    assert pieces == [sentence] * 6


def test_a_cut_elsewhere_uses_the_whole_limit() -> None:
    text = "One. " + "abcdefgh " * 40
    first = make_chunks(MODEL, text, "x", 100)[0]
    assert len(first.tokens) >= 95


def test_more_than_the_positions_is_refused_with_numbers() -> None:
    with pytest.raises(InputError, match=r"^x: .* 512 .*--chunk-tokens"):
        texts("word " * 600, None)


def test_of_a_text_of_megabytes_only_the_beginning_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, encode = list[int](), MODEL.encode

    def counted(text: str) -> tuple[int, ...]:
        lengths.append(len(text))
        return encode(text)

    monkeypatch.setattr(MODEL, "encode", counted)
    with pytest.raises(InputError, match=r"^x: .* 1024 .* 512 .*--chunk-tokens"):
        texts("word " * 200_000, None)
    assert lengths == [16 * 512]
    with pytest.raises(InputError, match=r"^q: .* 1024 .* 512 "):
        chunking.encode_within(MODEL, "word " * 200_000, "q")


@pytest.mark.parametrize(
    "data",
    [b"", b"a\0b", "é".encode("latin-1") + b" x", "text".encode("utf-16")],
)
def test_what_is_not_utf8_text_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(data)
    with pytest.raises(InputError, match=f"^{path}: "):
        read_text(path)


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes("\ufeffline\n".encode())
    assert read_text(path) == "line\n"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_document_is_the_same_however_its_lines_end(tmp_path: Path, end: str) -> None:
    text = "One.\n\nTwo.\n"
    path = tmp_path / "a.txt"
    path.write_bytes(text.replace("\n", end).encode())
    assert read_text(path) == text == decode_text("stdin", path.read_bytes())


def test_a_huge_file_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.txt"
    path.write_text("much too long")
    monkeypatch.setattr(chunking, "MAX_FILE_BYTES", 5)
    with pytest.raises(InputError, match=f"^{path}: "):
        read_text(path)


def test_a_text_may_come_from_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `pic compile <(pdftotext a.pdf -)`; however long it takes, and no longer than a file may be."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def read(*pieces: bytes) -> str:
        with ThreadPoolExecutor(1) as thread:
            reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # so that the writer need not wait for the reader
            writing = os.open(pipe, os.O_WRONLY)
            text = thread.submit(read_text, pipe)
            for piece in pieces:
                time.sleep(0.05)
                with suppress(BrokenPipeError):
                    os.write(writing, piece)
            os.close(writing)
            os.close(reading)
            return text.result()

    assert read("häfen ".encode(), b"and ships") == "häfen and ships"
    monkeypatch.setattr(chunking, "MAX_FILE_BYTES", 1 << 10)
    with pytest.raises(InputError, match=f"^{pipe}: "):
        read(b"x" * 1025)
    with pytest.raises(InputError, match=f"^{pipe}: "):  # nobody writes to it
        read_text(pipe)


ROOT = Path(__file__).parents[2]
WORLD = sorted((ROOT / "fixtures" / "docs").glob("*.txt"))
OTHERS = [ROOT / "README.md", ROOT / "LICENSE", *sorted((ROOT / "docs").rglob("*.md"))]
CODE, CHINESE = "def find(path: str) -> int:\n    return len(path)\n" * 3, "首都，港口。" * 4


@pytest.mark.parametrize("name", ["embedded", "embedded-small"])
def test_the_embedded_model_knows_its_own_world(name: str) -> None:
    model = load_model(name)

    def foreign(text: str, to: Model = model) -> bool:
        return is_foreign(to, to.encode(text))

    assert WORLD and not any(foreign(read_text(path)) for path in WORLD)
    assert len(OTHERS) > 20 and all(foreign(read_text(path)) for path in OTHERS)
    assert foreign(CODE) and foreign(CHINESE)
    assert not foreign("Kubernetes?") and not foreign(read_text(OTHERS[0]), MODEL)
