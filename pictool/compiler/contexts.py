"""What a chunk is computed after: tokens whose KV is dropped, so that it begins no prompt and has something before it.

Star Attention (arXiv 2411.17116) puts the first block of a prompt before every other one, as an anchor; EPIC §5.4 puts
dummy tokens there. Attention sinks stay on what comes first, and what a chunk has in common with most texts before it
need not be recomputed. docs/studies/real.md has what each leaves of naive's divergence.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

from pictool.core import Chunk, CompileOptions, Contexts
from pictool.errors import InputError, ModelError

if TYPE_CHECKING:
    from pictool.runtime.model import Model

PREVIOUS, MEAN = "previous", "mean"
LEAST = 512  # tokens of a fixed context, which is repeated until it has them: rows behind it see no BOS in most windows
_PROSE = """The library is open from nine in the morning. Visitors can borrow up to six books at a time, and keep \
them for three weeks. Who wants to keep a book for longer asks at the desk, or writes a letter. The reading room on \
the second floor has newspapers, maps and a collection of old photographs of the harbour. In winter the heating is \
switched on at eight, and the doors to the garden stay closed.

"""
_CODE = '''def read_lines(path, encoding="utf-8"):
    """The lines of a file, without those that are empty."""
    with open(path, encoding=encoding) as file:
        lines = [line.strip() for line in file]
    return [line for line in lines if line]


class Counter:
    def __init__(self, start=0):
        self.value = start

    def add(self, number=1):
        self.value += number
        return self.value


'''
_RECORDS = """{"id": 1042, "name": "lamp", "price": 12.5, "tags": ["home", "light"], "stock": {"north": 4, "south": 0}}
{"id": 1043, "name": "table", "price": 89.0, "tags": ["home", "wood"], "stock": {"north": 1, "south": 7}}
{"id": 1044, "name": "chair", "price": 31.0, "tags": ["home"], "stock": {"north": 12, "south": 3}}

"""
TEXTS = {"text": (_PROSE,), "code": (_CODE,), "records": (_RECORDS,), MEAN: (_PROSE, _CODE, _RECORDS)}
NAMES = ("none", "head", PREVIOUS, *TEXTS)


def contexts_of(model: Model, chunk: Chunk, options: CompileOptions) -> Contexts:
    """The tokens that a chunk is computed after, under the name or the tokens that its options have.

    `previous` are the last tokens of its own text before it, or `text` if it begins one; none of a hybrid, whose chunks
    begin with its states. `head` is what a prompt of the model begins with, and so does every context. It is shorter
    where the model has no room for it and the chunk.

    Raises:
        InputError: an unknown name, or another one for a hybrid.
    """
    name = options.after
    if not isinstance(name, str):
        return name
    if name not in NAMES:
        raise InputError(f"after {name[:40]!r}: must be one of {', '.join(NAMES)}")
    if model.geometry.states is not None and name not in ("none", PREVIOUS):
        raise InputError(f"after {name}: {model.name} is a hybrid, whose chunks have no context; use none or previous")
    if name == "none" or model.geometry.states is not None:
        return ()
    begin = beginning(model)
    room = model.max_positions - len(chunk) - len(begin)
    if name == PREVIOUS and chunk.before:
        found: Contexts = (chunk.before,)
    else:
        texts = ("",) if name == "head" else TEXTS["text" if name == PREVIOUS else name]
        found = tuple(tokens * math.ceil(LEAST / max(1, len(tokens))) for tokens in map(model.encode, texts))
    both = [(*begin, *(tokens[-room:] if room > 0 else ())) for tokens in found]
    return tuple(filter(None, both)) if room >= 0 else ()


def own_contexts(model: Model, chunk: Chunk) -> Contexts:
    """Every single context that is of the model alone, whoever asks for it: none holds a text of a user."""
    names = [name for name in NAMES if name not in ("none", PREVIOUS)]
    return tuple(context for name in names for context in contexts_of(model, chunk, CompileOptions(after=name)))


def beginning(model: Model) -> tuple[int, ...]:
    """The tokens that a prompt of the model begins with: its template's, or BOS alone where these hold today's date."""
    from pictool.runtime.chat.template import has_date, make_frame

    with suppress(ModelError):  # a template that keeps documents in no one place
        if not has_date(model):
            return model.encode(make_frame(model, "?").head)
    bos = model.bos_id
    return () if bos is None or bos >= model.config.vocab_size else (bos,)
