"""Answers of trained models of kinds that the embedded ones are not (`training/zoo.py`), and their exactness."""

from __future__ import annotations

import random
from functools import cache

import pytest
import reference
import torch
from alone import link

from pictool import Chunk, Model, Sampling, generate, load_model, make_policy
from pictool.linker.link import Linked
from pictool.runtime.chat.template import make_frame
from pictool.store.store import Store
from training.score import HELD_OUT
from training.world.generate import PageShape, Question, WorldPrompt, write_prompt
from training.zoo import HYBRIDS, KINDS, MEMBERS, MODELS

EXACT = 1e-4


@cache
def trained(name: str) -> Model:
    return load_model(str(MODELS / name), "cpu", "float32")


def prompts(name: str, count: int) -> list[WorldPrompt]:
    """Prompts that nothing was trained on."""
    draws = (random.Random(f"{HELD_OUT}-answers-{index}") for index in range(count))
    return [write_prompt(draw, 5, PageShape(max_filler_sentences=2), MEMBERS[name].world) for draw in draws]


def ask(model: Model, store: Store, prompt: WorldPrompt, question: Question, policy: str) -> Linked:
    chunks = [Chunk(page, model.encode(page), "page") for page in prompt.pages]
    frame = make_frame(model, question.text)
    fields = {"legolink-16": {"k": 16}, "everything": {"k": 1000}}.get(policy, {})
    return link(
        model, store, chunks, frame.tail, make_policy("legolink" if fields else policy, fields), head=frame.head
    )


@pytest.mark.parametrize("name", [*KINDS, *HYBRIDS])
def test_linked_answers_are_right_and_blind_reuse_answers_fewer(name: str, store: Store) -> None:
    model, right, asked = trained(name), {"full": 0, "legolink-16": 0, "naive": 0}, 0
    for prompt in prompts(name, 6):
        for question in [question for question in prompt.questions if question.kind == "carried"][:4]:
            asked += 1
            for policy in right:
                image = ask(model, store, prompt, question, policy).image
                right[policy] += generate(model, image, 8, Sampling(stop=("\n",))).text.strip() == question.answer
    assert asked >= 20 and right["full"] >= 0.7 * asked
    assert right["legolink-16"] >= 0.9 * right["full"] and right["naive"] <= 0.5 * right["full"]


@pytest.mark.parametrize("policy", ["full", "everything"])
@pytest.mark.parametrize("name", [*KINDS, *HYBRIDS])
def test_policies_are_exact_on_trained_weights(name: str, policy: str, store: Store) -> None:
    model, (prompt,) = trained(name), prompts(name, 1)
    linked = ask(model, store, prompt, prompt.questions[0], policy)
    dense = reference.full(reference.eager(model.module), linked.image.layout.tokens.tolist())
    assert linked.image.logits is not None
    torch.testing.assert_close(linked.image.logits, dense.logits, atol=EXACT, rtol=0)
    for layer, (key, value) in enumerate(dense.kv):
        torch.testing.assert_close(linked.image.key(layer), key, atol=EXACT, rtol=0)
        torch.testing.assert_close(linked.image.value(layer), value, atol=EXACT, rtol=0)
