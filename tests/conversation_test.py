"""Questions over a library in an engine that keeps prefixes: each computes only what is new, and answers as without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pytest import approx
from serve.live import DOCS, TEMPLATE, tiny_model

from pictool.conversation import Conversation
from pictool.core import Message
from pictool.documents.library import LibraryReader
from pictool.engines.torch import TorchEngine
from pictool.linker.policies import make_policy
from pictool.linker.prefixes import BLOCK
from pictool.linker.spec import Spec
from pictool.store.store import Store

QUESTIONS = ["Why is the harbour quiet?", "Who asked for the tabs?", "What of numbers?", "Which lines?", "A festival?"]


@pytest.mark.parametrize("algo", ["full", "legolink", "cacheblend"])
def test_a_question_computes_what_is_new_of_the_head_and_answers_as_a_fresh_computation(
    algo: str, tmp_path: Path
) -> None:
    model, files = tiny_model(TEMPLATE), [tmp_path / f"{number}.txt" for number in range(len(DOCS))]
    for path, text in zip(files, DOCS, strict=True):
        path.write_text(text)
    spec = Spec(policy=make_policy(algo), head="You are kind, and quiet in the harbour.", max_new_tokens=6)
    stores = [Store(tmp_path / name) for name in ("kept", "plain")]
    engines = [TorchEngine(model, store, pool) for store, pool in zip(stores, (None, 0), strict=True)]
    with LibraryReader(model) as reader:
        library, earlier = reader.read(files), list[int]()
        talks = [Conversation(engine, library, spec, 2) for engine in engines]
        for question in QUESTIONS:
            own, fresh = (talk.ask(question).answer for talk in talks)
            tokens, head = own.link.layout.tokens.tolist(), own.link.layout.head[1]
            assert own.text == fresh.text and tokens == fresh.link.layout.tokens.tolist()
            torch.testing.assert_close(own.logits, fresh.logits, atol=1e-4, rtol=0)
            same = next((i for i, pair in enumerate(zip(tokens, earlier, strict=False)) if pair[0] != pair[1]), 0)
            assert own.linked.rows[:, :head].sum(1).mean() == approx(head - min(same, head) // BLOCK * BLOCK)
            earlier = tokens
            del own, fresh
        assert same > 3 * BLOCK
    keys = [{path.name for path in store.root.rglob("*.kvo")} for store in stores]
    assert len(keys[0]) <= len(DOCS) and keys[0] <= keys[1]  # no heads


def test_a_comparison_is_of_fresh_computations(tmp_path: Path) -> None:
    model = tiny_model(TEMPLATE)
    with TorchEngine(model, Store(tmp_path / "objects"), None) as engine:
        spec = Spec(policy=make_policy("full"), messages=(Message("user", DOCS[0]),), max_new_tokens=2)
        rows = [int(engine.answer(spec, compare=compare).linked.rows[0].sum()) for compare in (False, False, True)]
        assert rows[1] < BLOCK + 1 and rows[0] == rows[2]


def test_an_answer_that_was_stopped_leaves_no_trace(tmp_path: Path) -> None:
    model, file = tiny_model(TEMPLATE), tmp_path / "all.txt"
    file.write_text("\n\n".join(DOCS))
    spec = Spec(policy=make_policy("legolink"), max_new_tokens=6)
    stores = [Store(tmp_path / name) for name in ("kept", "plain")]
    with (
        LibraryReader(model) as reader,
        TorchEngine(model, stores[0], None) as kept,
        TorchEngine(model, stores[1]) as plain,
    ):
        library, pieces = reader.read([file]), list[str]()
        talks = [Conversation(engine, library, spec, 2) for engine in (kept, plain)]

        def stop(text: str) -> None:
            pieces.append(text)
            raise ZeroDivisionError

        for question in QUESTIONS:
            with pytest.raises(ZeroDivisionError):
                talks[0].ask(f"Or else: {question}", on_text=stop)
            own, fresh = (talk.ask(question).answer for talk in talks)
            torch.testing.assert_close(own.logits, fresh.logits, atol=1e-4, rtol=0)
        assert len(pieces) == len(QUESTIONS)
