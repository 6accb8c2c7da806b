"""A tiny model that says given texts: real weights in a directory, for an unmodified `pic serve`.

A user's text has `(say NAME)`; the answer is then the text `replies[NAME][i]`, where i counts the model's own turns
since, or `replies[NAME + " without tools"][i]` where a request offers no tools. All other prompts get what a random
Llama says.

Each piece of a text is a token of its own, which no text is tokenized to. A token of a script writes its number into
dimensions that no layer reads or writes, and the head reads the next token from there.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tiny
import torch
from serve.live import END, RESPONSES
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

_GOES_ON = " and so on"  # of a text without END, until something ends it
_LEAST = 5  # characters of a piece
TEMPLATE = (
    "{{ bos_token }}{% if tools %}[tools]{{ tools | tojson }}\n{% endif %}"
    "{% set said = namespace(name='', turns=0) %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' and '(say ' in message.content %}"
    "{% set said.name = message.content.split('(say ')[-1].split(')')[0] %}{% set said.turns = 0 %}"
    "{% elif message.role == 'assistant' %}{% set said.turns = said.turns + 1 %}{% endif %}"
    "[{{ message.role }}]{{ message.content | default('', true) | trim }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}\n{% endfor %}"
    "[assistant]<say {{ said.name }} {% if tools %}{{ said.turns }}{% else %}without tools {{ said.turns }}{% endif %}>"
)
_RESPONSES = {"start_anchor_pattern": r"\[assistant\](<say [\w ]+>)?", "fields": RESPONSES["fields"]}


def save_scripted(
    directory: Path, replies: Mapping[str, Sequence[str]], positions: int = 2048, layers: int = 2
) -> Path:
    """Write the model. A text ends with END, or goes on."""
    texts = {f"<say {name} {turn}>": text for name, said in replies.items() for turn, text in enumerate(said)}
    used = set(json.loads(_backend().to_str())["model"]["vocab"])
    chains = {name: list(_pieces(text, used)) for name, text in texts.items()}
    goes_on = _encoded(_GOES_ON)
    tokenizer = _tokenizer([goes_on, *(piece for pieces in chains.values() for piece in pieces)], list(chains))
    ids = tokenizer.convert_tokens_to_ids
    follows = {ids(goes_on): ids(goes_on)}
    for name, pieces in chains.items():
        last = tokenizer.eos_token_id if texts[name].endswith(END) else ids(goes_on)
        chain = [ids(name), *map(ids, pieces), last]
        follows |= dict(pairwise(chain))
    _module(follows, len(tokenizer), positions, layers).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _backend() -> Tokenizer:
    backend: Tokenizer = tiny.tokenizer().backend_tokenizer
    return backend


def _encoded(text: str) -> str:
    """A text as a byte-level vocabulary writes it."""
    ((encoded, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return str(encoded)


def _pieces(text: str, used: set[str]) -> Iterator[str]:
    """The text in tokens that nothing else has."""
    rest, pieces = text.removesuffix(END), list[str]()
    while rest:
        sizes = range(min(_LEAST, len(rest)), len(rest) + 1)
        size = next((size for size in sizes if _encoded(rest[:size]) not in used), len(rest))
        while _encoded(rest[:size]) in used:  # its end is a token already: a longer one, then
            assert pieces, f"{text!r} is in the script twice"
            used.discard(_encoded(pieces[-1]))
            rest = pieces.pop() + rest
            size = len(rest)
        pieces.append(rest[:size])
        used.add(_encoded(rest[:size]))
        rest = rest[size:]
    return map(_encoded, pieces)


def _tokenizer(pieces: Sequence[str], starts: Sequence[str]) -> PreTrainedTokenizerFast:
    described = json.loads(_backend().to_str())
    vocab = described["model"]["vocab"]
    for piece in pieces:  # without merges, no text is tokenized to it
        assert vocab.setdefault(piece, len(vocab)) == len(vocab) - 1, piece
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)), bos_token="<s>", eos_token=END, pad_token="<pad>"
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken(start, special=True) for start in starts])
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, copy.deepcopy(_RESPONSES)
    return tokenizer


def _module(follows: Mapping[int, int], vocabulary: int, positions: int, layers: int) -> Any:
    """A random Llama in its first dimensions; in the others, the token that each token of a script is followed by."""
    size, script = int(tiny.SIZE["hidden_size"]), list(follows)
    more = {"vocab_size": vocabulary, "hidden_size": size + -(-len(script) // 4) * 4, "num_hidden_layers": layers}
    module = tiny.random_module(LlamaConfig(**tiny.SIZE | more | {"max_position_embeddings": positions}))
    with torch.no_grad():
        for layer in module.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for weight in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                weight.weight[:, size:] = 0
            for weight in (attention.o_proj, mlp.down_proj):
                weight.weight[size:] = 0
        embedding, head = module.model.embed_tokens.weight, module.lm_head.weight
        embedding[:, size:] = head[:, size:] = 0
        module.model.norm.weight[size:] = 1
        head[script, :size] = 0  # a random answer has none of them
        for number, token in enumerate(script):
            embedding[token] = 0
            embedding[token, size + number] = 1000.0
            head[follows[token], size + number] = 10.0
    return module
