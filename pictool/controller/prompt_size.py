"""The size of a prompt for the cost model: tokens, objects, and the bytes that these have or will have."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pictool.compiler.compile import CODEC
from pictool.controller.calibration import OnMeasure, decoding
from pictool.controller.cost import Decoding, PromptSize
from pictool.controller.measuring import stored_bytes, token_bytes
from pictool.errors import InputError, ObjectError
from pictool.linker.resolve import Part, resolve_prompt
from pictool.linker.spec import Spec
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model


def measure_size(
    model: Model, store: Store, spec: Spec, *, again: bool = False, on_measure: OnMeasure | None = None
) -> PromptSize:
    """The size of a prompt; nothing is compiled. Objects that are there have the bytes that they have.

    Raises:
        PicError: an unusable document, or a prompt that is too long for the model.
    """
    with ExitStack() as opened:
        prompt = resolve_prompt(model, store, spec, opened)
        parts, num_context = prompt.objects, sum(len(part.chunk) for part in (prompt.head, *prompt.parts))
        size = PromptSize(num_context, len(model.encode(prompt.tail)), len(parts), token_bytes(model))
        require_room(model, size)
        codecs = [part.options.codec for part in parts]
        if all(codec == CODEC for codec in codecs):
            return size
        costs = {codec: decoding(model, codec, again, on_measure) for codec in sorted(set(codecs))}
        stored, decode_s = 0, 0.0
        for part, codec in zip(parts, codecs, strict=True):
            kv_bytes = len(part.chunk) * size.token_bytes
            stored += _stored_bytes(model, store, part) or round(costs[codec].stored * kv_bytes)
            decode_s += costs[codec].seconds(kv_bytes, 1)
        return replace(size, coded_bytes=stored, decode_s=decode_s)


def _stored_bytes(model: Model, store: Store, part: Part) -> int | None:
    """Bytes that a part's KV takes in its object; None if it is still to be compiled."""
    with suppress(ObjectError):
        return stored_bytes(part.path(model, store))
    return None


def coded_size(size: PromptSize, cost: Decoding) -> PromptSize:
    """The size of a prompt whose objects have one codec; none of them needs to exist."""
    return replace(
        size, coded_bytes=round(cost.stored * size.num_bytes), decode_s=cost.seconds(size.num_bytes, size.objects)
    )


def require_room(model: Model, size: PromptSize) -> None:
    """Refuse what no link would take.

    Raises:
        InputError: more tokens than the model has positions.
    """
    if size.num_tokens > model.max_positions:
        raise InputError(
            f"{size.context} tokens of context and {size.tail} of the query, but {model.name} takes "
            f"{model.max_positions} positions; use fewer or shorter documents"
        )
