"""The exactness rules of docs/design.md §2 on one model, its device and its dtype, against `transformers` itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from pictool.compiler.compile import compile_chunks
from pictool.core import Chunk
from pictool.doctor import reference
from pictool.doctor.verdict import Verdict, VerdictStatus, guarded, within
from pictool.errors import InputError, ObjectError
from pictool.fidelity.divergence import made_up_book
from pictool.fidelity.transformers_module import transformers_module
from pictool.linker.link import Linked, link
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.policies.base import Policy, Prompt, Selection
from pictool.linker.spec import Spec
from pictool.runtime.architectures import cache_name
from pictool.runtime.support import depends_on_length
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

SECTION = "exactness"
_LENGTHS = (1, 3, 29, 17, 29, 1024)  # of chunks: the third one is linked twice, the last one as far as there is room
_HEAD, _TAIL, _ROOM = "You answer questions.\n", "\nQuestion: why?\nAnswer:", 96
_STEPS = 8  # tokens that are decoded
# The difference (relative, in L2) that each dtype may have at least; and the most that its own noise may raise this to.
_LIMITS: Mapping[str, float] = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
_MAX_LIMIT, _NOISE_FACTOR = 0.1, 4.0
_ROUNDED = 2  # times that the input of experts is rounded anew
_REROUTED = 0.01  # of the rows: those that differ most may be routed another way
_SHIFTED = 5e-4  # float32 rounds the angles of position 1000 so much: a chunk compiled at 0 differs from one there


@dataclass(frozen=True)
class _Scattered(Policy):
    """Every third row, of the head and of every chunk."""

    name: ClassVar[str] = "every-third"
    reference: ClassVar[str] = "for checking only"

    def select(self, prompt: Prompt) -> Selection:
        return Selection(np.arange(prompt.layout.num_context) % 3 == 1)


class ExactnessSubject:
    """A model, a prompt of chunks, and what `transformers` computes of it."""

    def __init__(self, model: Model, store: Store) -> None:
        self.model, self.store = model, store
        self.chunks = _make_chunks(model)

    def link(self, policy: Policy, documents: list[Chunk | str | Path] | None = None) -> Linked:
        head = (self.model.tokenizer.bos_token or "") + _HEAD
        spec = Spec.raw(self.chunks if documents is None else documents, _TAIL, policy, head)
        return link(self.model, self.store, replace(spec, after="none"))  # as the reference computes chunks

    @cached_property
    def full(self) -> Linked:
        return self.link(make_policy(BASELINE))

    @property
    def tokens(self) -> list[int]:
        """The prompt's token ids."""
        ids: list[int] = self.full.image.layout.tokens.tolist()
        return ids

    @property
    def parts(self) -> list[list[int]]:
        """The token ids of head, chunks and tail."""
        layout = self.full.image.layout
        return [layout.tokens[start:end].tolist() for start, end in (layout.head, *layout.chunks, layout.tail)]

    def plain(self, attention: str | None = "eager") -> Any:
        """A fresh module of `transformers` over the same weights."""
        return transformers_module(self.model, attention)

    @cached_property
    def exact(self) -> reference.Dense:
        """What `transformers` computes of the whole prompt."""
        return reference.full(self.plain(), self.tokens)

    @cached_property
    def limit(self) -> float:
        """The largest difference that is noise, and more: what transformers' own answers differ by.

        Of two of its attention functions; scores that are squashed (Gemma 2) are computed by one of them alone.
        """
        least = _LIMITS[self.model.dtype]
        if getattr(self.model.config, "attn_logit_softcapping", None) is None:
            noise = largest_difference(reference.full(self.plain(None), self.tokens), self.exact)
            least = min(_MAX_LIMIT, max(least, _NOISE_FACTOR * noise))
        return self.limit_of(least, lambda module: reference.full(module, self.tokens), self.exact)

    def apart(self, ours: reference.Dense, exact: reference.Dense) -> float:
        """How far they are apart: without the few rows that may be routed another way."""
        return largest_difference(ours, exact, _REROUTED if self.model.is_routed_by_rounding else 0.0)

    def limit_of(self, least: float, run: Callable[[Any], reference.Dense], exact: reference.Dense) -> float:
        """The same for a run of `transformers` that gave `exact`: of experts what its input, rounded anew, changes."""
        for seed in range(_ROUNDED if self.model.is_routed_by_rounding else 0):
            with reference.rounded_anew(self.plain(), seed) as module:
                least = max(least, _NOISE_FACTOR * self.apart(run(module), exact))
        return least


def examine_exactness(model: Model, store: Store) -> Iterator[Verdict]:
    """Check every rule; objects go to `store`.

    Raises:
        InputError: a model that has no room for two chunks. PicError: one that cannot be loaded.
    """
    subject = ExactnessSubject(model, store)
    for check, run in CHECKS.items():
        yield from guarded(SECTION, check, lambda run=run, check=check: run(subject, check))  # type: ignore[misc]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The L2 norm of the difference as a share of that of `theirs`; inf if a number is not finite."""
    theirs = theirs.float()
    apart = float((ours.float() - theirs).norm() / theirs.norm().clamp(min=1e-12))
    return apart if np.isfinite(apart) else float("inf")


def largest_difference(ours: reference.Dense, exact: reference.Dense, left_out: float = 0.0) -> float:
    """Of the logits, and of K and V of any layer; of these without a share of the rows, those that differ most."""
    layers = zip(ours.kv, exact.kv, strict=True)
    pairs = [(x, y) for mine, theirs in layers for x, y in zip(mine, theirs, strict=True)]
    if left_out:
        pairs = [_without_the_most(x, y, left_out) for x, y in pairs]
    return max(difference(x, y) for x, y in [(ours.logits, exact.logits), *pairs])


def _without_the_most(ours: Tensor, theirs: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """K or V [1, kv_heads, n, head_dim] without the share of the positions at which they differ most."""
    apart = (ours.float() - theirs.float()).square().sum((0, 1, 3)).nan_to_num(nan=float("inf"))
    kept = apart.topk(len(apart) - int(share * len(apart)), largest=False).indices
    return ours[:, :, kept], theirs[:, :, kept]


def dense(linked: Linked) -> reference.Dense:
    """The logits and the KV of a link."""
    image = linked.image
    assert image.logits is not None
    return reference.Dense(image.logits, [(image.key(i), image.value(i)) for i in range(image.stack.geometry.layers)])


def check_full(subject: ExactnessSubject, check: str) -> Verdict:
    """Rule 2: `full` is the model's own forward."""
    apart = subject.apart(dense(subject.full), subject.exact)
    return _decided(check, apart, subject.limit, "logits, K and V of all layers, and those of transformers, are")


def check_layer_0(subject: ExactnessSubject, check: str) -> Verdict:
    """Rule 3: relocated keys and values of layer 0 are those of the model's own forward."""
    if subject.model.stack.kv_layers[0]:
        return Verdict(SECTION, check, VerdictStatus.SKIPPED, "its first layer keeps a state, and no keys")
    image = subject.link(make_policy("naive")).image
    pairs = zip((image.key(0), image.value(0)), subject.exact.kv[0], strict=True)
    apart = max(difference(ours, theirs) for ours, theirs in pairs)
    limit = 1e-5 if subject.model.dtype == "float32" else 4 * torch.finfo(subject.model.torch_dtype).eps
    return within(SECTION, check, apart, limit, "K and V of relocated chunks and of transformers are")


def check_everything(subject: ExactnessSubject, check: str) -> Verdict:
    """Rule 4: policies that recompute everything are `full`."""
    policies = [make_policy("legolink", {"k": 1 << 20}), make_policy("cacheblend", {"ratio": 1})]
    policies = [policy for policy in policies if subject.model.links(policy)]
    apart = max(subject.apart(dense(subject.link(policy)), subject.exact) for policy in policies)
    names = " and ".join(policy.name for policy in policies)
    return _decided(check, apart, subject.limit, f"{names} with all rows are")


def check_scattered(subject: ExactnessSubject, check: str) -> Verdict:
    """Rule 5: recomputed rows attend to every earlier position and to no later one."""
    if depends_on_length(subject.model.config):
        text = "its RoPE depends on the prompt's length: a chunk alone has other keys than in the prompt"
        return Verdict(SECTION, check, VerdictStatus.SKIPPED, text)
    if not subject.model.links(_Scattered()):
        text = "a hybrid: states are reused after a chunk's first rows alone"
        return Verdict(SECTION, check, VerdictStatus.SKIPPED, text)
    linked = subject.link(_Scattered())
    rows = torch.from_numpy(linked.rows[0])
    exact = reference.link(subject.plain(), subject.parts, rows)
    apart = subject.apart(dense(linked), exact)
    limit = subject.limit_of(
        max(subject.limit, _SHIFTED), lambda module: reference.link(module, subject.parts, rows), exact
    )
    return _decided(check, apart, limit, "every third row, and transformers over spliced KV, are")


def check_again(subject: ExactnessSubject, check: str) -> Verdict:
    """Rule 6: a second link gives the same, and no object has changed."""
    policy = make_policy("legolink", {"k": 4})
    first = subject.link(policy)
    before = _contents(subject.store)
    again = subject.link(policy)
    assert first.image.logits is not None and again.image.logits is not None
    if before != _contents(subject.store):
        return Verdict(SECTION, check, VerdictStatus.FAILED, "linking wrote to an object")
    apart = difference(again.image.logits, first.image.logits)
    return _decided(check, apart, subject.limit, "objects are unchanged; two links are")


def check_damage(subject: ExactnessSubject, check: str) -> Verdict:
    """Rule 7: an object with one flipped bit is refused."""
    (damaged_chunk,) = compile_chunks(subject.model, subject.store, subject.chunks[2:3])
    whole, damaged = bytearray(damaged_chunk.path.read_bytes()), subject.store.root / "damaged.kvo"
    whole[len(whole) * 9 // 10] ^= 1
    damaged.write_bytes(whole)
    try:
        subject.link(make_policy("legolink"), [damaged])
    except ObjectError:
        return Verdict(SECTION, check, VerdictStatus.OK, "an object with one flipped bit is refused")
    finally:
        damaged.unlink()
    return Verdict(SECTION, check, VerdictStatus.FAILED, "an object with one flipped bit was linked")


def check_decode(subject: ExactnessSubject, check: str) -> Verdict:
    """Rule 2: logits of the tokens that follow are those of the model's own steps."""
    image, module = subject.link(make_policy(BASELINE)).image, subject.plain()
    assert image.logits is not None
    cache, token, apart = DynamicCache(config=module.config), int(image.logits.argmax()), 0.0
    _step(module, subject.tokens, 0, cache)
    for _ in range(min(_STEPS, subject.model.max_positions - image.num_tokens)):
        position, logits = image.num_tokens, image.append(token)
        apart = max(apart, difference(logits, _step(module, [token], position, cache)))
        token = int(logits.argmax())
    return _decided(check, apart, subject.limit, f"logits of {_STEPS} decoded tokens are")


Check = Callable[[ExactnessSubject, str], Verdict]
CHECKS: Mapping[str, Check] = {
    "full recompute is the model's own forward": check_full,
    "layer 0 is exact": check_layer_0,
    "recomputing everything is full": check_everything,
    "scattered rows attend causally": check_scattered,
    "linking writes to no object": check_again,
    "damage is refused": check_damage,
    "decoding is the model's own": check_decode,
}


def _decided(check: str, apart: float, limit: float, what: str) -> Verdict:
    """A verdict on a difference, unless `transformers` alone differs from itself by so much that none is one."""
    if limit > _MAX_LIMIT < apart:
        text = f"its router decides near ties by rounding: transformers alone is {limit / _NOISE_FACTOR:.1e} apart"
        return Verdict(SECTION, check, VerdictStatus.SKIPPED, f"{text}; use --dtype float32")
    return within(SECTION, check, apart, limit, what)


def _make_chunks(model: Model) -> list[Chunk]:
    """Chunks of text about made-up places, of `_LENGTHS` tokens; equal lengths are the same chunk."""
    room = model.max_positions - sum(_LENGTHS[:-1]) - _ROOM
    if room < 1:
        raise InputError(f"{model.name}: has too few positions ({model.max_positions}) for the checks")
    tokens: list[int] = []
    for seed in range(100):
        tokens += model.encode("\n".join(made_up_book(seed)[0]))
        if len(tokens) > 2 * sum(_LENGTHS):
            break
    chunks: dict[int, Chunk] = {}
    for length in (*_LENGTHS[:-1], min(_LENGTHS[-1], room)):
        start = sum(map(len, chunks.values()))
        chunks.setdefault(length, Chunk(f"{length} tokens", tuple(tokens[start : start + length]), "doctor"))
    return [chunks[length] for length in (*_LENGTHS[:-1], min(_LENGTHS[-1], room))]


def _contents(store: Store) -> dict[str, bytes]:
    return {key: store.path(key).read_bytes() for key in store.keys()}


@torch.no_grad()
def _step(module: Any, tokens: list[int], start: int, cache: DynamicCache) -> Tensor:
    """The logits [vocab] after tokens that continue, at the position `start`, what a cache holds."""
    positions = torch.arange(start, start + len(tokens), device=module.device)[None]
    logits: Tensor = module(
        input_ids=torch.tensor([tokens], device=module.device), position_ids=positions, use_cache=True,
        logits_to_keep=1, **{cache_name(module): cache},
    ).logits[0, -1]  # fmt: skip
    return logits
