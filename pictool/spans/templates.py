"""The chat templates by which spnl writes single messages, chosen by words in the model's name.

They are spnl's reading of the templates (0.22.1), without what a template says about a whole chat: to be compatible
with its tokenizer id by id, and for nothing else. Prompts that our engines run use the model's own template.
"""

from __future__ import annotations

from dataclasses import dataclass

from pictool.errors import InputError
from pictool.spans.query import Message, Role

# White_Space of Unicode; Python's own has four control characters more
_WHITE = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and c not in "\x1c\x1d\x1e\x1f")


@dataclass(frozen=True)
class Template:
    """How one message is written. `{}` stands for its text.

    Fields:
        prompt: what comes before an answer.
        strips: the roles whose texts lose the white space around them.
    """

    system: str
    user: str
    assistant: str
    prompt: str
    strips: frozenset[Role] = frozenset()

    def render(self, message: Message) -> str:
        """A message with its role."""
        text = message.text.strip(_WHITE) if message.role in self.strips else message.text
        before, _, after = str(getattr(self, message.role)).partition("{}")
        return before + text + after


_ALL: frozenset[Role] = frozenset(("system", "user", "assistant"))


def _uniform(form: str, prompt: str, roles: tuple[str, str, str] = ("system", "user", "assistant"),
             strips: frozenset[Role] = frozenset()) -> Template:  # fmt: skip
    """A template that writes every role alike; `ROLE` stands for its name."""
    system, user, assistant = (form.replace("ROLE", role) for role in roles)
    return Template(system, user, assistant, prompt, strips)


# In this order: the first whose word is in the model's name.
TEMPLATES: tuple[tuple[tuple[str, ...], Template], ...] = (
    (("chatml", "Qwen"), _uniform("<|im_start|>ROLE\n{}<|im_end|>", "<|im_start|>assistant")),
    (("mistral-v7",), Template("[SYSTEM_PROMPT] {}[/SYSTEM_PROMPT]", "[INST] {}[/INST]", " {}</s>", "")),
    (("phi3",), _uniform("<|ROLE|>\n{}<|end|>", "<|assistant|>")),
    (("phi4",), _uniform("<|im_start|>ROLE<|im_sep|>{}<|im_end|>", "<|im_start|>assistant<|im_sep|>")),
    (("falcon3",), _uniform("<|ROLE|>\n{}", "<|assistant|>")),
    (("zephyr",), _uniform("<|ROLE|>\n{}<|endoftext|>", "<|assistant|>")),
    (("monarch",), _uniform("ROLE\n{}</s>", "<s>assistant")),
    (
        ("gemma",),
        _uniform(
            "<start_of_turn>ROLE\n{}<end_of_turn>", "<start_of_turn>model", ("user", "user", "model"), _ALL
        ),
    ),
    (("orion",), Template("Human: {}\n\nAssistant: </s>", "Human: {}\n\nAssistant: </s>", "{}</s>", "")),
    (
        ("openchat",),
        Template(
            "{}<|end_of_turn|>", "GPT4 Correct User: {}<|end_of_turn|>",
            "GPT4 Correct Assistant: {}<|end_of_turn|>", "GPT4 Correct Assistant:",
        ),
    ),
    (("vicuna",), Template("{}", "USER: {}", "ASSISTANT: {}</s>", "ASSISTANT:")),
    (
        ("deepseek",),
        Template("{}", "### Instruction:\n{}", "### Response:\n{}n<|EOT|>", "### Response:"),
    ),
    (
        ("command-r",),
        _uniform(
            "<|START_OF_TURN_TOKEN|><|ROLE_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", ("SYSTEM", "USER", "CHATBOT"), _ALL,
        ),
    ),
    (
        ("llama3",),
        _uniform(
            "<|start_header_id|>ROLE<|end_header_id|>\n\n{}<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n", strips=_ALL,
        ),
    ),
    (("chatglm3",), _uniform("[gMASK]sop<|ROLE|>\n{}", "[gMASK]sop<|assistant|>")),
    (("chatglm4",), _uniform("[gMASK]sop<|ROLE|>\n{}", "[gMASK]sop<|assistant|>\n")),
    (("Tulu", "glmedge"), _uniform("\n<|ROLE|>\n{}", "\n<|assistant|>\n")),
    (("minicpm",), Template("{}", "<用户>{}<AI>", "{}", "", _ALL)),
    (
        ("exaone3", "exaone4"),
        Template(
            "[|system|]{}[|endofturn|]\n", "[|user|]{}\n", "[|assistant|]{}[|endofturn|]\n", "[|assistant|]", _ALL
        ),
    ),
    (
        ("rwkv-world",),
        Template("System: {}\n\n", "User: {}\n\nAssistant:", "Assistant: {}\n\n", "", _ALL),
    ),
    (
        ("granite",),
        _uniform(
            "<|start_of_role|>ROLE<|end_of_role|>{}<|end_of_text|>", "<|start_of_role|>assistant<|end_of_role|>"
        ),
    ),
    (
        ("megrez",),
        _uniform("<|role_start|>ROLE<|role_end|>{}<|turn_end|>", "<|role_start|>assistant<|role_end|>"),
    ),
    (
        ("yandex",),
        Template(" Пользователь: {}\n\n", " Пользователь: {}\n\n", " Ассистент: {}\n\n", " Ассистент:[SEP]"),
    ),
    (
        ("bailing",),
        _uniform("<role>ROLE</role>{}", "<role>ASSISTANT</role>", ("SYSTEM", "HUMAN", "ASSISTANT")),
    ),
    (
        ("llama4",),
        _uniform(
            "<|header_start|>ROLE<|header_end|>\n\n{}<|eot|>", "<|header_start|>assistant<|header_end|>\n\n",
            strips=_ALL,
        ),
    ),
    (
        ("smolvlm",),
        Template(
            "<|im_start|>{}\n\n", "<|im_start|>User: {}<end_of_utterance>\n",
            "<|im_start|>Assistant: {}<end_of_utterance>\n", "<|im_start|>Assistant:",
        ),
    ),
    (
        ("hunyuan-moe",),
        Template("<|startoftext|>{}<|extra_4|>", "<|startoftext|>{}<|extra_0|>", "{}<|eos|>", ""),
    ),
    (
        ("gpt-oss",),
        Template(
            "<|start|>system<|message|>{}<|end|>", "<|start|>user<|message|>{}<|end|>",
            "<|start|>assistant<|message|>{}<|return|>", "<|start|>assistant",
        ),
    ),
    (
        ("hunyuan-dense",),
        Template(
            "{}<｜hy_place▁holder▁no▁3｜>", "<｜hy_User｜>{}<｜hy_Assistant｜>",
            "<｜hy_Assistant｜>{}<｜hy_place▁holder▁no▁2｜>", "",
        ),
    ),
    (
        ("kimi-k2",),
        _uniform("<|im_ROLE|>ROLE<|im_middle|>{}<|im_end|>", "<|im_assistant|>assistant<|im_middle|>"),
    ),
    (
        ("seed_oss",),
        _uniform("<seed:bos>ROLE\n{}<seed:eos>", "<seed:bos>assistant\n", strips=frozenset(("assistant",))),
    ),
)  # fmt: skip


def template_of(model: str) -> Template:
    """The template that spnl chooses for a model's name.

    Raises:
        InputError: none of the words is in the name.
    """
    for words, template in TEMPLATES:
        if any(word in model for word in words):
            return template
    known = ", ".join(word for words, _ in TEMPLATES for word in words)
    raise InputError(f"model {model!r}: spnl knows no chat template for it; its name has to contain one of {known}")
