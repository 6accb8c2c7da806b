"""Generated objects: the KV of an output as it was computed while it was generated, un-rotated, token by token.

In the store a generated object is a block whose `parent` names all that its KV follows from: the prompt's tokens,
where its spans begin, the objects that were linked there, the rows that were computed, and its codec. Its own key is
over that and the tokens. So equal names mean equal KV, no text names such an object, and nothing of it is ever taken
for the object that compiling the same tokens gives.

An output's KV is kept from the image of a link, so by engines that show one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from pictool.core import Identity
from pictool.engines.base import Answer, Engine, LinkResult
from pictool.errors import PicError
from pictool.linker.spec import Spec
from pictool.runtime.decode import generate
from pictool.runtime.memory.image import Image
from pictool.runtime.tensors import require_finite, to_bytes
from pictool.store.objects.format import CompiledChunk, ObjectMeta
from pictool.store.store import Store


def answer_and_keep(engine: Engine, spec: Spec, on_text: Callable[[str], None] | None = None) -> Answer:
    """Link and decode; the image keeps the output's keys before rotation.

    Args:
        engine: one that shows the image of a link.
    """
    engine.require_supported(spec)
    return _decode_and_keep(engine, spec, engine.link(spec), on_text)


def answer_all_and_keep(engine: Engine, specs: Sequence[Spec]) -> Iterator[tuple[int, Answer | PicError]]:
    """As `answer_and_keep`, of several specs, which are linked as `Engine.link_all` does."""
    for spec in specs:
        engine.require_supported(spec)

    def answer(linked: tuple[int, LinkResult | PicError]) -> tuple[int, Answer | PicError]:
        index, result = linked
        if isinstance(result, PicError):
            return index, result
        try:
            return index, _decode_and_keep(engine, specs[index], result)
        except PicError as error:
            return index, error

    return map(answer, engine.link_all(specs))  # map holds no image


def _decode_and_keep(
    engine: Engine, spec: Spec, result: LinkResult, on_text: Callable[[str], None] | None = None
) -> Answer:
    image = _image(result)
    image.keep_keys()
    started = time.perf_counter()
    text = generate(engine.model, image, spec.max_new_tokens, spec.sampling, on_text)
    return Answer(text, result, time.perf_counter() - started, engine.model, engine.name)


def keep_output(
    store: Store, answer: Answer, tokens: Sequence[int], seam: Sequence[int], text: str, codec: str
) -> str | None:
    """Store an output's KV as a generated object.

    Args:
        tokens: what was generated, less the end token. seam: what is read after it; computed here, in its place.
        text: of both.

    Returns:
        its key; None if the model has no position left for its last tokens, or these are not those of the image, or
        for a hybrid: its states would be needed, too.
    """
    model, image = answer.loaded, _image(answer.link)
    own = [*tokens, *seam]
    start, end = image.layout.num_tokens, image.layout.num_tokens + len(own)
    if (
        not own
        or model.geometry.states is not None
        or end > model.max_positions
        or list(answer.generated.tokens[: len(tokens)]) != list(tokens)
    ):
        return None
    for token in own[image.num_tokens - start :]:
        image.append(token)
    assert image.fresh_keys is not None
    steps = image.fresh_keys[: image.stack.num_layers * len(own)]  # token by token, each through all layers
    keys = [  # by layer the un-rotated keys of the output, [kv_heads, tokens, head_dim]
        torch.cat([key[0] for key in steps[layer :: image.stack.num_layers]], dim=1)
        for layer in range(image.stack.num_layers)
    ]
    layers = [image.unrotated(layer, key, start, end) for layer, key in enumerate(keys)]
    require_finite(f"an output of {model.name}", model.dtype, *(part for parts in layers for part in parts))
    pairs = [tuple(map(to_bytes, parts)) for parts in layers]
    ids = np.asarray(own, dtype=np.int32)
    parent, rotation = _parent(answer, codec), model.stack.rotation_id(image.layout.num_tokens)
    identity = model.target.identify_block(ids, parent, rotation, model.salt)
    meta = ObjectMeta(
        identity.key, model.target, len(own), codec, parent=parent, rotation=rotation or None,
        salted=identity.salted,
    )  # fmt: skip
    model.require_storable()
    store.put(CompiledChunk(meta, text, ids, pairs))
    return identity.key


def _image(result: LinkResult) -> Image:
    assert result.linked is not None, "the engine shows no image"
    return result.linked.image


def _parent(answer: Answer, codec: str) -> str:
    """Names all that determines the KV after which an output was generated, and how the output's is kept."""
    linked, layout, model = answer.linked, answer.link.layout, answer.loaded
    policy, keys, rows = linked.policy, list[str](), b""
    if policy.needs.objects:  # a policy without is exact: its KV is that of the tokens, wherever it came from
        keys, rows = [part.keys(model)[0] for part in linked.parts], np.packbits(linked.rows).tobytes()
    identity = [model.target.fields, policy.name, policy.params, list(layout.starts), keys, codec]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    for data in (layout.tokens.astype("<i4").tobytes(), rows):
        digest.update(data)
    return Identity.of(digest.hexdigest(), model.salt).key
