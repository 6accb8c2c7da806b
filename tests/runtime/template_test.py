from __future__ import annotations

import copy

import pytest
import tiny
from transformers import PreTrainedTokenizerFast

from pictool.errors import InputError, ModelError
from pictool.runtime.chat.template import make_frame
from pictool.runtime.model import Model, wrap_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ bos_token }}[INST] {{ messages[0].content | trim }} [/INST]"
)
TWICE = "{{ messages[0].content }} again: {{ messages[0].content }}"
LOST = "nothing of {{ messages | length }} messages"


@pytest.fixture(scope="module")
def plain() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())


def with_template(plain: Model, template: str) -> Model:
    tokenizer: PreTrainedTokenizerFast = copy.deepcopy(plain.tokenizer)
    tokenizer.chat_template = template
    return wrap_model(plain.module, tokenizer, "chat")


def test_without_a_chat_template_the_head_is_bos(plain: Model) -> None:
    assert make_frame(plain, "why?").head == "<s>"
    assert make_frame(plain, "why?").tail == "Question: why?\nAnswer:"
    assert make_frame(plain, "why?", "You are.").head == "<s>You are."
    assert make_frame(plain, "why?", query_template="Q: {query} A:").tail == "Q: why? A:"


@pytest.mark.parametrize("system", [None, "You answer."])
@pytest.mark.parametrize("template", [CHATML, LLAMA2])
def test_head_documents_and_tail_are_the_rendered_chat(plain: Model, template: str, system: str | None) -> None:
    model = with_template(plain, template)
    if template == LLAMA2 and system:
        with pytest.raises(ModelError, match="no system"):
            make_frame(model, "why?", system)
        return
    frame = make_frame(model, "why? {braces}", system, "\nQ: {query}")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "one. two.\nQ: why? {braces}"})
    rendered = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert frame.head + "one. two." + frame.tail == rendered


@pytest.mark.parametrize("template", [TWICE, LOST])
def test_a_template_that_cannot_be_split_is_refused(plain: Model, template: str) -> None:
    with pytest.raises(ModelError, match="cannot be split"):
        make_frame(with_template(plain, template), "why?")


def test_bad_queries_are_refused(plain: Model) -> None:
    with pytest.raises(InputError, match="empty"):
        make_frame(plain, " \n")
    with pytest.raises(InputError, match="must contain"):
        make_frame(plain, "why?", query_template="no place")
