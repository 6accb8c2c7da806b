"""What a spec says of a prompt: head and tail, and which objects its documents and head are."""

from __future__ import annotations

import copy

import pytest
import tiny
from subjects import subject

import pictool
from pictool.compiler.compile import CODEC
from pictool.core import CompileOptions, Message
from pictool.errors import InputError, ModelError
from pictool.linker.policies import make_policy, object_kinds, policies
from pictool.linker.spec import Spec
from pictool.runtime.model import Model, wrap_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = (Message("user", "Hello."), Message("assistant", "Hello!"), Message("user", "why?"))


@pytest.fixture(scope="module")
def plain() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())


@pytest.fixture(scope="module")
def chat(plain: Model) -> Model:
    tokenizer = copy.deepcopy(plain.tokenizer)
    tokenizer.chat_template = CHATML  # type: ignore[attr-defined]
    return wrap_model(plain.module, tokenizer, "chat")


@pytest.mark.parametrize("system", [None, "You answer."])
@pytest.mark.parametrize("messages", [CHAT, CHAT[2:], (*CHAT, Message("assistant", "Because"))])
def test_documents_come_before_the_text_of_the_last_message_of_the_user(
    chat: Model, messages: tuple[Message, ...], system: str | None
) -> None:
    frame = Spec(messages=messages, head=system).frame(chat)
    listed = [{"role": "system", "content": system}] if system else []
    listed += [{"role": message.role, "content": message.content} for message in messages]
    last = max(i for i, message in enumerate(listed) if message["role"] == "user")
    listed[last]["content"] = "one. two.\n\nwhy?"
    rendered = chat.tokenizer.apply_chat_template(listed, tokenize=False, add_generation_prompt=True)
    assert frame.head.text + "one. two." + frame.tail_after("one. two.", "\n\n").text == rendered


def test_a_chat_with_a_system_message_keeps_its_own(chat: Model) -> None:
    own = Spec(messages=(Message("system", "Mine."), *CHAT), head="Not this.").frame(chat)
    assert "Mine." in own.head.text and "Not this." not in own.head.text


def test_a_message_and_a_query_ask_alike(chat: Model) -> None:
    assert Spec("why?").frame(chat) == Spec(messages=(Message("user", "why?"),)).frame(chat)


def test_chats_that_cannot_be_asked(chat: Model, plain: Model) -> None:
    with pytest.raises(InputError, match="user"):
        Spec(messages=CHAT[1:2]).frame(chat)
    with pytest.raises(InputError, match="user"):
        Spec(messages=(Message("user", " "),)).frame(chat)
    with pytest.raises(InputError, match=f"^{plain.name}: "):
        Spec(messages=CHAT).frame(plain)
    with pytest.raises(InputError, match="'no place'"):
        Spec(messages=CHAT, query_template="no place").frame(chat)
    tokenizer = copy.deepcopy(chat.tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }}"  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=r"^first: "):
        Spec(messages=CHAT).frame(wrap_model(chat.module, tokenizer, "first"))


def test_raw_texts_are_the_prompt(chat: Model, plain: Model) -> None:
    for model in (chat, plain):
        frame = Spec.raw(["a.txt"], " why?", make_policy("naive"), "<s>You.").frame(model)
        assert (frame.head.text, frame.tail.text) == ("<s>You.", " why?")


@pytest.mark.parametrize("name", policies())
def test_documents_are_compiled_as_the_policy_needs(name: str) -> None:
    needs = make_policy(name).needs
    options = Spec(policy=make_policy(name), codec="int8").objects
    assert options.codec == "int8"
    assert options.after == ("previous" if needs.objects else "none")


def test_the_head_is_always_kept_without_loss() -> None:
    model = subject("llama").model
    assert Spec(codec="int8").head_object_for(model) == CompileOptions()
    assert Spec(codec="zstd").head_object_for(model).codec == "zstd"


def test_a_set_of_policies_needs_each_kind_of_object_once() -> None:
    named = [make_policy(name) for name in ("full", "naive", "legolink", "cacheblend", "prefix")]
    assert object_kinds(named, CODEC) == [CompileOptions(CODEC, after="previous")]
    assert object_kinds(named[:1], CODEC) == [] == object_kinds(named[4:], CODEC)


def test_a_policy_is_named_in_python_as_on_the_command_line() -> None:
    legolink = pictool.make_policy("legolink", {"k": 16})
    assert Spec(policy="legolink-16").policy == pictool.make_policy("legolink-16") == legolink  # type: ignore[arg-type]
    assert pictool.make_policy("legolink-16", {"k": 3}) == pictool.make_policy("legolink", {"k": 3})
    for unknown in ("lego", "lego-3", "lego:k=3"):
        with pytest.raises(InputError, match=f"'{unknown}'"):
            pictool.make_policy(unknown)


def test_the_package_lists_its_names() -> None:
    assert {"compile", "link", "answer", "make_policy", "Spec", "wrap_model", "__version__"} <= set(dir(pictool))
