"""What `pic tune` leaves for the start-up check: short prompts of the user's own, as long as the made-up ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from pictool.core import Chunk
from pictool.errors import InputError
from pictool.fidelity.divergence import check_prompts
from pictool.fidelity.sample import FILE, SamplePrompt, keep_sample, read_sample
from pictool.linker.policies import make_policy
from pictool.runtime.model import Model, wrap_model

TEXTS = tuple(f"Page {i}: the harbour was quiet, and nobody knows why. " * 40 for i in range(6))
NAIVE = make_policy("naive")


@pytest.fixture(scope="module")
def model() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer(), "tiny")


def test_a_few_prompts_are_kept_with_the_beginnings_of_their_documents(tmp_path: Path) -> None:
    assert read_sample(tmp_path) == []
    keep_sample(tmp_path, (SamplePrompt(TEXTS, f"Why {i}?", "Be brief.", "{query}:") for i in range(9)))
    kept = read_sample(tmp_path)
    assert [prompt.query for prompt in kept] == ["Why 0?", "Why 1?", "Why 2?", "Why 3?"]
    for prompt in kept:
        assert (prompt.head, prompt.query_template, len(prompt.documents)) == ("Be brief.", "{query}:", 4)
        for piece, text in zip(prompt.documents, TEXTS, strict=False):
            assert text.startswith(piece) and 300 < len(piece) <= 400 and text[len(piece)].isspace()


def test_a_prompt_of_one_document_is_over_its_pieces_and_others_are_left_out(tmp_path: Path) -> None:
    long, short = "東京" * 500, "Too short."
    keep_sample(tmp_path, [
        SamplePrompt((short,), "Why?"), SamplePrompt(TEXTS, "Why? " * 400), SamplePrompt((long,), "Who?"),
    ])  # fmt: skip
    (prompt,) = read_sample(tmp_path)
    assert (prompt.query, "".join(prompt.documents)) == ("Who?", long[:1000])


def test_the_check_links_them(tmp_path: Path, model: Model) -> None:
    keep_sample(tmp_path, [SamplePrompt(TEXTS, "Why?", query_template="Q {query} A")])
    (spec,) = check_prompts(model, NAIVE, model.max_positions, read_sample(tmp_path))
    room = model.max_positions
    assert spec.frame(model).tail.text == "Q Why? A" and len(spec.documents) >= 2
    assert sum(len(part) for part in spec.documents if isinstance(part, Chunk)) < room
    assert len(check_prompts(model, NAIVE, room)) == 4, "without a sample they are made up"


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"prompts": 5}', b'{"prompts": [{"query": "x"}]}', b"\xff", b"[" * 100_000,
     b'{"prompts": [{"documents": [1], "query": "x", "head": null, "query_template": null}]}',
     b'{"prompts": [{"documents": ["\\ud800"], "query": "x", "head": null, "query_template": null}]}'],
)  # fmt: skip
def test_a_damaged_file_is_named_with_the_remedy(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(InputError, match=r"check\.json: .*; run pic tune again, or remove it") as error:
        read_sample(tmp_path)
    assert "\n" not in str(error.value)
