from __future__ import annotations

import copy
from datetime import date

import pytest
import tiny
from transformers import PreTrainedTokenizerFast

from pictool.compiler.contexts import beginning
from pictool.errors import InputError, ModelError
from pictool.runtime.chat.template import has_date, make_frame
from pictool.runtime.model import Model, wrap_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ bos_token }}[INST] {{ messages[0].content | trim }} [/INST]"
)
# The structure of gpt-oss's: today's date, channels, and the system message as the developer's.
HARMONY = (
    "<|start|>system<|message|>You are ChatGPT.\nCurrent date: {{ strftime_now('%Y-%m-%d') }}\n\n"
    "# Valid channels: analysis, commentary, final.<|end|>"
    "{% if messages[0].role == 'system' %}<|start|>developer<|message|># Instructions\n\n{{ messages[0].content }}"
    "<|end|>{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Qwen3's and DeepSeek's: earlier thoughts are left out, and the answer begins with one.
THINK = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}"
    "{% elif m.role == 'system' %}{{ m.content }}{% else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
# Gemma's: no system role; its text is put before the first user's.
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set prefix = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set prefix = '' %}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ prefix if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
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
    assert make_frame(plain, "why?").head.text == "<s>"
    assert make_frame(plain, "why?").tail.text == "Question: why?\nAnswer:"
    assert make_frame(plain, "why?", "You are.").head.text == "<s>You are.\n\n"
    assert make_frame(plain, "why?", "You are.\n", separator="\n").head.text == "<s>You are.\n"
    assert make_frame(plain, "why?", query_template="Q: {query} A:").tail.text == "Q: why? A:"


@pytest.mark.parametrize("system", [None, "You answer."])
@pytest.mark.parametrize("template", [CHATML, LLAMA2, HARMONY, THINK, NO_SYSTEM])
def test_head_documents_and_tail_are_the_rendered_chat(plain: Model, template: str, system: str | None) -> None:
    model = with_template(plain, template)
    if template == LLAMA2 and system:
        with pytest.raises(ModelError, match=r"^chat: .*\(no system\)"):
            make_frame(model, "why?", system)
        return
    frame = make_frame(model, "why? {braces}", system, "\nQ: {query}")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "one. two.\nQ: why? {braces}"})
    rendered = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert frame.head.text + "one. two." + frame.tail.text == rendered


@pytest.mark.parametrize("template", [TWICE, LOST])
def test_a_template_that_cannot_be_split_is_refused(plain: Model, template: str) -> None:
    with pytest.raises(ModelError, match=r"^chat: "):
        make_frame(with_template(plain, template), "why?")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}", "{% for %}", "{% include '/etc/passwd' %}", "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}", "{{ nothing.at.all }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception('roles\n must alternate') }}",
    ],
)  # fmt: skip
def test_a_template_that_fails_is_one_line_that_names_it(plain: Model, template: str) -> None:
    with pytest.raises(ModelError, match=r"^chat: .*tokenizer_config.json") as caught:
        make_frame(with_template(plain, template), "why?")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_bad_queries_are_refused(plain: Model) -> None:
    with pytest.raises(InputError):
        make_frame(plain, " \n")
    with pytest.raises(InputError, match=r"'no place': .*\{query\}"):
        make_frame(plain, "why?", query_template="no place")


def test_a_template_with_a_date_is_known(plain: Model) -> None:
    """Its head is another one each day, and compiled anew; documents are not, as no context has it."""
    dated = with_template(plain, HARMONY)
    assert len(beginning(dated)) <= 1 < len(beginning(with_template(plain, THINK)))
    assert has_date(dated) and f"{date.today():%Y-}" in make_frame(dated, "why?").head.text
    assert not has_date(with_template(plain, THINK)) and not has_date(plain)


def test_the_answer_begins_after_the_channel_or_the_thought_is_opened(plain: Model) -> None:
    assert make_frame(with_template(plain, HARMONY), "why?").tail.text.endswith("why?<|end|><|start|>assistant")
    assert make_frame(with_template(plain, THINK), "why?").tail.text.endswith("why?<｜Assistant｜><think>\n")
