"""A prompt's head and tail: from a chat template, split where the documents go, or plain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pictool.errors import InputError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pictool.runtime.model import Model

PLAIN_QUERY = "Question: {query}\nAnswer:"
CHAT_QUERY = "\n\n{query}"
_MARK = "\x02documents\x03"


@dataclass(frozen=True)
class Frame:
    """The texts around the documents."""

    head: str
    tail: str


def make_frame(model: Model, query: str, head: str | None = None, query_template: str | None = None) -> Frame:
    """The head and tail of a prompt for `query`.

    With a chat template, `head` is the system message and the user's message is documents + query. Without one, the
    head is BOS (if the model has one) and `head`.

    Args:
        query_template: how the query is put behind the documents; `{query}` stands for it.

    Raises:
        InputError: a template without `{query}`, or an empty query.
        ModelError: a chat template that does not keep the documents in one place.
    """
    default = CHAT_QUERY if model.tokenizer.chat_template else PLAIN_QUERY
    template = default if query_template is None else query_template
    if "{query}" not in template:
        raise InputError(f"query template {template!r}: must contain {{query}}")
    if not query.strip():
        raise InputError("the query is empty")
    ask = template.replace("{query}", query)
    if model.tokenizer.chat_template:
        return _chat_frame(model.tokenizer, model.name, head, ask)
    return Frame((model.tokenizer.bos_token or "") + (head or ""), ask)


def _chat_frame(tokenizer: PreTrainedTokenizerBase, name: str, system: str | None, ask: str) -> Frame:
    from jinja2 import TemplateError

    messages: list[dict[str, Any]] = [{"role": "user", "content": _MARK + ask}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ModelError(f"{name}: its chat template refuses these messages ({error}); leave --head out") from error
    head, mark, tail = str(text).partition(_MARK)
    if not mark or _MARK in tail or not tail.startswith(ask.rstrip()):
        raise ModelError(f"{name}: its chat template changes the user's message; it cannot be split into head and tail")
    return Frame(head, tail)
