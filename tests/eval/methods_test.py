"""MapReduce and MapRerank against the same calls made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from eval.shared import A, B, C, model

from pictool.api import answer
from pictool.compiler.chunking import make_chunk
from pictool.core import Sampling
from pictool.engines.base import Answer
from pictool.eval.methods import MapReduce, MapRerank, MeasuredAnswer
from pictool.linker.policies import make_policy
from pictool.linker.spec import Spec
from pictool.runtime.model import Model
from pictool.store.store import Store

FULL = make_policy("full", {})


@pytest.fixture(scope="module")
def opened() -> Model:
    return model()


class RecordedCalls:
    """Calls the model, and keeps the specs and the answers."""

    def __init__(self, model: Model, store: Store, **texts: str) -> None:
        self._model, self._store, self._texts = model, store, texts
        self.specs: list[Spec] = []
        self.answers: list[Answer] = []

    def __call__(self, spec: Spec) -> Answer:
        self.specs.append(spec)
        made = answer(self._model, self._store, spec)
        if self._texts:
            made = replace(made, generated=replace(made.generated, text=self._texts.pop(min(self._texts))))
        self.answers.append(made)
        return made


def make_spec(opened: Model, *texts: str) -> Spec:
    chunks = [make_chunk(opened, text, "test") for text in texts]
    return Spec("Who knows?", chunks, FULL, "You are.", "{query}!", 5, Sampling(stop=("qqq",)))


def prompt_of(answer: Answer) -> str:
    layout = answer.linked.image.layout
    return str(model().tokenizer.decode(layout.tokens.tolist()))


def test_mapreduce_asks_for_summaries_and_then_the_question_over_them(opened: Model, store: Store) -> None:
    calls = RecordedCalls(opened, store, a=" one ", b="", c="three")
    measured = MapReduce(summary_tokens=3).answer(opened, calls, make_spec(opened, A, B, C))
    prompts = [prompt_of(each) for each in calls.answers]
    asks = ['<s>Write a concise summary of the following:\n\n\n"' + text for text in (A, B, C)]
    assert prompts[:3] == [prompt + '"\n\n\nCONCISE SUMMARY:' for prompt in asks]
    assert prompts[3] == "<s>You are.\n\none\n\nthree\n\nWho knows?!"
    assert [spec.max_new_tokens for spec in calls.specs] == [3, 3, 3, 5]
    assert [spec.sampling.stop for spec in calls.specs] == [(), (), (), ("qqq",)]
    assert {spec.policy for spec in calls.specs} == {FULL}
    assert measured.text == calls.answers[3].text and measured.tokens == calls.answers[3].generated.tokens


def test_mapreduce_without_a_word_in_any_summary_asks_without_context(opened: Model, store: Store) -> None:
    calls = RecordedCalls(opened, store, a="", b=" \n", c="end")
    measured = MapReduce().answer(opened, calls, make_spec(opened, A, B))
    assert prompt_of(calls.answers[2]) == "<s>You are.\n\nWho knows?!" and measured.text == "end"


def test_costs_are_those_of_all_calls(opened: Model, store: Store) -> None:
    for method in (MapReduce(summary_tokens=2), MapRerank()):
        calls = RecordedCalls(opened, store)
        measured = method.answer(opened, calls, make_spec(opened, A, B))
        timings, decodes = (
            [answer.linked.timing for answer in calls.answers],
            [answer.decode_s for answer in calls.answers],
        )
        last = decodes[-1] if isinstance(method, MapReduce) else 0.0
        assert measured.times.ttft_s == pytest.approx(sum(timing.ttft_s for timing in timings) + sum(decodes) - last)
        assert measured.times.decode_s == pytest.approx(last)
        assert measured.times.recompute_s == pytest.approx(sum(timing.recompute_s for timing in timings))
        assert measured.rows == sum(answer.linked.image.layout.num_context for answer in calls.answers)
        assert measured.bytes_read == 0 and measured.image is None


def log_probability(opened: Model, given: Answer) -> float:
    """Mean of the answer's tokens, by one forward of transformers' model over prompt and answer."""
    prompt, tokens = given.linked.image.layout.tokens.tolist(), list(given.generated.tokens)
    module: Any = type(opened.module)(opened.config).eval()
    module.load_state_dict(opened.module.state_dict())
    with torch.inference_mode():
        logits = module(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1)[range(len(tokens)), tokens].mean())


def test_maprerank_takes_the_answer_of_highest_probability(opened: Model, store: Store) -> None:
    calls = RecordedCalls(opened, store)
    measured = MapRerank().answer(opened, calls, make_spec(opened, A, B, C))
    assert [prompt_of(each) for each in calls.answers] == [f"<s>You are.\n\n{text}\nWho knows?!" for text in (A, B, C)]
    by_hand = [log_probability(opened, answer) for answer in calls.answers]
    assert [MeasuredAnswer.from_answer(answer).confidence for answer in calls.answers] == pytest.approx(
        by_hand, abs=1e-4
    )
    best = calls.answers[by_hand.index(max(by_hand))]
    assert (measured.text, measured.tokens) == (best.text, best.generated.tokens)
    assert measured.confidence == pytest.approx(max(by_hand), abs=1e-4)


def test_of_equal_answers_the_first_counts(opened: Model, store: Store) -> None:
    calls = RecordedCalls(opened, store, a="first", b="second")
    assert MapRerank().answer(opened, calls, make_spec(opened, A, A)).text == "first"


def test_prompts_can_be_others(opened: Model, store: Store) -> None:
    calls = RecordedCalls(opened, store)
    MapRerank("Read: {text}. Now {query}").answer(opened, calls, make_spec(opened, A))
    MapReduce("Read {text} and sum up").answer(opened, calls, make_spec(opened, A))
    assert prompt_of(calls.answers[0]) == f"<s>Read: {A}. Now Who knows?"
    assert prompt_of(calls.answers[1]) == f"<s>Read {A} and sum up"


def test_no_documents_at_all(opened: Model, store: Store) -> None:
    for method in (MapReduce(), MapRerank()):
        calls = RecordedCalls(opened, store)
        method.answer(opened, calls, make_spec(opened))
        assert [prompt_of(each) for each in calls.answers] == ["<s>You are.\n\nWho knows?!"]
