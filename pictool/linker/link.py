"""`link()`: resolve → lay out → find a prefix → select → open → reserve → each layer (load, relocate, compute, narrow)
→ logits.

`prepare` ends before the reservation and `compute` begins after it, so several prompts can reserve images together
(`batch.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pictool.compiler.chunking import encode_within
from pictool.core import Chunk, Layout, PromptText, RowMask
from pictool.errors import InputError, NotFiniteError, ObjectError
from pictool.linker.context import Context, KeptChain, ReusePlan, context_of
from pictool.linker.cuts import round_to_cuts
from pictool.linker.fusor import Fusor
from pictool.linker.loader import Loader, PlacedObject
from pictool.linker.policies.base import Policy, Prompt, Scores, Selection, Stage, no_stage
from pictool.linker.pool_use import PoolUse
from pictool.linker.prefixes import FoundPrefix, PrefixLostError, linked_spans
from pictool.linker.residency import Reservation, ResidentObjects
from pictool.linker.resolve import OnCompile, Part, resolve_plan, resolve_prompt
from pictool.linker.spec import Spec
from pictool.runtime.device import synchronize
from pictool.runtime.memory.image import Image
from pictool.runtime.memory.pool import PooledImage
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.linker.plan import LinkPlan
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Timing:
    """Seconds of a link. `ttft_s` is the whole, from the request to the first token's logits.

    load_s: opening objects, and waiting for layers. select_s: resolving, laying out, choosing rows (a speculative
    model's scoring among it). recompute_s: computing rows. fetch_s: reading, checking and relocating in the loader's
    threads, most of it while rows are chosen and computed.
    """

    load_s: float
    select_s: float
    recompute_s: float
    ttft_s: float
    fetch_s: float


@dataclass(frozen=True)
class Linked:
    """A linked prompt. `rows` is bool [layers, n]: whose K and V were computed at each layer; `scores` float32 [n].

    `parts` are the documents and what separates them; `texts` are those of head, parts and tail. `bytes_read` is KV
    that was read from objects; what host memory held is not among it. `pool` is what was reused of KV on the device, of
    an engine that has a pool, and `prefix` what of that an earlier prompt had computed.
    """

    image: Image
    policy: Policy
    parts: tuple[Part, ...]
    texts: tuple[str, ...]
    rows: RowMask
    scores: Scores | None
    timing: Timing
    bytes_read: int
    pool: PoolUse | None = None
    prefix: FoundPrefix | None = None

    @property
    def documents(self) -> tuple[tuple[Part, tuple[int, int]], ...]:
        """The parts but separators, each with its [start, end) in the prompt."""
        spans = zip(self.parts, self.image.layout.chunks, strict=True)
        return tuple((part, span) for part, span in spans if not part.is_separator)

    @property
    def computed(self) -> frozenset[int]:
        """Where parts begin that were not linked, for an earlier prompt computed them."""
        return frozenset() if self.prefix is None else self.prefix.computed

    @property
    def recomputed(self) -> float:
        """Mean number of context rows (head and chunks) that were computed per layer."""
        return float(self.rows[:, : self.image.layout.num_context].sum(1).mean())


def link(
    model: Model, store: Store, spec: Spec, *, on_compile: OnCompile | None = None, stage: Stage = no_stage,
    residents: ResidentObjects | None = None, prefixes: bool = True,
) -> Linked:  # fmt: skip
    """Link documents into a prompt: head + documents + tail, with separators, each tokenized on its own
    (docs/design.md §2, rule 1).

    What a remote does not give whole is compiled here instead, with a warning (`Store.on_warning`); the time that was
    lost on it counts as load.

    Args:
        on_compile: called for each object that had to be compiled.
        stage: `stage(name)` is entered around each part of the work that can be timed on its own: ``scoring`` (a second
            model reads the prompt), ``layer`` (once for each), in it ``check`` (compare and narrow), and ``logits``.
        residents: objects on the device; the image is in their pool, and what it reuses of them is not loaded again.
        prefixes: whether what earlier prompts computed is reused, if the pool keeps it, and this one's is kept.

    Raises:
        PicError: an unusable document or object, or a prompt that is too long for the model.
    """
    clock = start_clock(model, spec)
    residents = residents if model.geometry.states is None else None  # a pool holds no states
    context, keeping = context_of(store, spec.policy, on_compile), residents if prefixes else None
    kept = KeptChain(keeping.kept) if keeping is not None and keeping.kept is not None else None
    while True:
        try:
            with ExitStack() as opened:
                prepared = prepare(model, store, spec, context, clock, stage, opened, keeping, kept)
                if model.own_link is not None:
                    linked: Linked = model.own_link(prepared)
                    return linked
                return compute(prepared, reserve_alone(prepared, residents))
        except PrefixLostError:  # it was evicted while documents were compiled
            clock.load_s += clock.lap()
        except (ObjectError, NotFiniteError) as error:  # something turned out damaged, or lost, while it was read
            if not context.recover(error) and (kept is None or not kept.recover(error)):
                raise
            clock.load_s += clock.lap()


def keep_prefix(model: Model, linked: Linked, residents: ResidentObjects | None) -> None:
    """Keep the exact prefix of a prompt and its answer on disk, if the pool keeps prefixes there."""
    if residents is not None and residents.kept is not None and isinstance(linked.image, PooledImage):
        KeptChain(residents.kept).keep_image(model, linked.image)


def start_clock(model: Model, spec: Spec) -> LinkTimer:
    """Load what is loaded but once, and see that it is still the same; then the clock of a link starts."""
    model.require_policy(spec.policy)
    _ = model.stack, model.target, model.eos_ids
    model.require_unchanged()
    spec.policy.prepare(model)
    return LinkTimer()


@dataclass(frozen=True)
class PreparedLink:
    """A link whose objects are open, before it has an image."""

    store: Store
    policy: Policy
    prompt_parts: PromptParts
    prompt: Prompt
    selection: Selection | None
    reused: ReusePlan
    context: Context
    clock: LinkTimer
    prefix: FoundPrefix | None = None
    restored: Sequence[PlacedObject] = ()

    @property
    def wants_pool(self) -> bool:
        """Whether it reuses objects, which may be resident, or prefixes. A stored chain's blocks are not kept there."""
        return self.prefix is not None or (self.policy.needs.objects and bool(self.reused.placed))


def prepare(
    model: Model, store: Store, spec: Spec, context: Context, clock: LinkTimer, stage: Stage, opened: ExitStack,
    residents: ResidentObjects | None = None, kept: KeptChain | None = None,
) -> PreparedLink:  # fmt: skip
    """The passes of a link before it has an image. Objects are open until `opened` is closed.

    `residents` are those whose prefixes it reuses, and `kept` has those on disk.
    """
    policy = spec.policy
    # Resolve: every document is parts with tokens; objects that documents name are open from here on.
    # Lay out: where everything is in the prompt.
    prompt_parts = lay_out_spec(model, store, spec, opened)
    # Find a prefix: what earlier prompts computed; documents in it are not linked.
    prompt_parts, prefix, restored = _find_prefix(model, store, policy, prompt_parts, opened, residents, kept)
    prompt = Prompt(model, prompt_parts.layout, prompt_parts.texts, stage=stage)

    # Select: the rows, so that only objects of which something is reused are opened. A policy that reads from
    # objects, or is slow, selects below, once the first layers are on their way.
    selection = None if policy.needs.selects_late else policy.select(prompt)
    clock.select_s += clock.lap()

    # Open: what there is to reuse, each object where it is in the prompt.
    reused = context.open(prompt, prompt_parts.parts, policy, selection, opened)
    # Round up: a hybrid's rows end at cuts, or where a chain does.
    if model.geometry.states is not None and not policy.needs.chain_block:
        columns, selection = model.geometry.states.columns, selection or policy.select(reused.prompt)
        reused, selection = round_to_cuts(reused, selection, policy, columns, store.on_warning)
        reused = context.open_maps(reused, opened)
    clock.exclude(reused.compile_s)
    clock.load_s += clock.lap()
    return PreparedLink(store, policy, prompt_parts, prompt, selection, reused, context, clock, prefix, restored)


def _find_prefix(
    model: Model, store: Store, policy: Policy, prompt_parts: PromptParts, opened: ExitStack,
    residents: ResidentObjects | None, kept: KeptChain | None,
) -> tuple[PromptParts, FoundPrefix | None, list[PlacedObject]]:  # fmt: skip
    """What a prompt reuses of earlier ones, and the parts that it links beside that; None if it reuses none, nor is to
    be reused itself. A head that the store lacks is computed: it is the next prompt's prefix then."""
    if residents is None or not residents.keeps_prefixes or policy.needs.chain_block or not model.is_of_transformers:
        return prompt_parts, None, []
    head = prompt_parts.parts[0]
    if head.has_object and head.file is None and not store.path(head.key(model)).exists():
        prompt_parts = prompt_parts.without_objects([0])
    spans = linked_spans(model, policy, prompt_parts.parts, prompt_parts.layout)
    layout, restored = prompt_parts.layout, list[PlacedObject]()
    prefix = residents.find_prefix(model.salt, layout, spans, policy.needs.is_local)
    if kept is not None and (found := kept.open_after(model, layout, prefix.exact_end, opened)):
        prefix = residents.find_prefix(model.salt, layout, spans, policy.needs.is_local, found[-1].end)
        start, end = prefix.restored
        restored = [part for part in found if start <= part.start < end]
    computed = [index for index, start in enumerate(layout.starts[:-1]) if start in prefix.computed]
    return prompt_parts.without_objects(computed), prefix, restored


def reserve_alone(prepared: PreparedLink, residents: ResidentObjects | None) -> Reservation:
    """Reserve the image, a region of the pool if there is one, in which resident objects are in their places."""
    layout, placed = prepared.prompt_parts.layout, prepared.reused.placed
    if residents is None:
        return Reservation(Image(prepared.prompt.model.stack, layout), list(placed))
    return (
        residents.reserve([(layout, placed)], prepared.prefix)[0]
        if prepared.wants_pool
        else residents.reserve_outside(layout, placed)
    )


def compute(prepared: PreparedLink, reservation: Reservation) -> Linked:
    """The passes of a link over its image."""
    policy, selection, prompt, clock = prepared.policy, prepared.selection, prepared.prompt, prepared.clock
    prompt_parts, reused, context = prepared.prompt_parts, prepared.reused, prepared.context
    stack, image, memory = prompt.model.stack, reservation.image, prepared.store.memory
    prefix = prepared.prefix
    exact = None if prefix is None else prefix.exact_rows
    reservation.restore(prepared.restored)
    clock.resume(reservation.seconds)
    context.prepare(image)
    first = 0 if reservation.region or prepared.restored else _first_layer(policy, stack.num_layers, selection)
    with Loader(image, reservation.missing, first, policy.needs.runs_model, memory, reservation.copies) as loader:
        clock.load_s += clock.lap()
        seen = reused.prompt
        fusor = Fusor(image, seen, policy, selection or policy.select(seen), prompt_parts.required, exact)
        clock.select_s += clock.lap()

        # Each layer: load and relocate what is reused, compute the rows, narrow them. All fresh K and V that a row
        # attends to are in place before it does.
        for layer in range(stack.num_layers):
            clock.load_s += loader.synchronize(layer)
            with prompt.stage("layer"):
                fusor.prefill_layer(layer)

        # Logits of the last row.
        with prompt.stage("logits"):
            fusor.finish()
        synchronize(stack.device)
        timing = clock.timing(loader.busy_s)
    reservation.finish()
    context.keep(image, fusor.rows)
    linked = {part.file.meta.key for part in reused.placed}
    parts = tuple(part.after(linked) for part in prompt_parts.parts[1:])
    return Linked(
        image, policy, parts, tuple(map(prompt.model.encoder.whole, prompt.texts)), fusor.rows, fusor.scores,
        timing, loader.bytes_read, reservation.use if reservation.on_finish else None, prefix,
    )  # fmt: skip


@dataclass(frozen=True)
class PromptParts:
    """A prompt that is laid out. `parts` are head and chunks; `required` [N] are the rows that no object has."""

    layout: Layout
    texts: tuple[str | PromptText, ...]  # of head, chunks and tail
    parts: tuple[Part, ...]
    required: RowMask | None = None

    def without_objects(self, indices: Sequence[int]) -> PromptParts:
        """The same, with these parts computed."""
        if not indices:
            return self
        parts, required = list(self.parts), np.zeros(self.layout.num_context, dtype=bool)
        if self.required is not None:
            required |= self.required
        for index in indices:
            parts[index] = replace(parts[index], has_object=False)
            start, end = (self.layout.head, *self.layout.chunks)[index]
            required[start:end] = True
        return replace(self, parts=tuple(parts), required=required)


def lay_out_spec(model: Model, store: Store, spec: Spec, opened: ExitStack) -> PromptParts:
    """Resolve a spec's documents, and lay out its prompt. Objects that documents name are open until `opened` is."""
    if spec.plan is not None:
        return _lay_out_plan(model, store, spec.plan, opened)
    return _lay_out_texts(model, store, spec, opened)


def _lay_out_texts(model: Model, store: Store, spec: Spec, opened: ExitStack) -> PromptParts:
    prompt = resolve_prompt(model, store, spec, opened)
    tail, parts = encode_within(model, prompt.tail, "the query"), (prompt.head, *prompt.parts)
    layout = lay_out(model, prompt.head.chunk, [part.chunk for part in prompt.parts], tail)
    laid_out = PromptParts(layout, prompt.texts, parts)
    if spec.policy.needs.chain_block:  # a chain says itself what it has
        return laid_out
    return laid_out.without_objects([index for index, part in enumerate(parts) if part.is_separator])


def _lay_out_plan(model: Model, store: Store, plan: LinkPlan, opened: ExitStack) -> PromptParts:
    require_room(model, plan.layout.num_tokens)
    parts, tail = resolve_plan(model, store, plan, opened), plan.layout.tokens[plan.layout.tail[0] :].tolist()
    last = str(model.tokenizer.decode(tail)) if plan.policy.needs.runs_model else ""
    pairs = [*((part.chunk.text, part.chunk.tokens) for part in parts), (last, tail)]
    texts = tuple(model.encoder.as_tokenized(text, ids) for text, ids in pairs)
    required = None if plan.policy.needs.chain_block else plan.required  # a chain says itself what it has
    return PromptParts(plan.layout, texts, tuple(parts), required)


class LinkTimer:
    """Seconds of the parts of one link."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self.load_s = self.select_s = self._excluded_s = 0.0

    def lap(self) -> float:
        """Seconds since the last lap."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last

    def resume(self, counted: float) -> None:
        """End a lap of which only `counted` seconds were spent on the image, and the others on other links."""
        waited = self.lap()
        counted = min(counted, waited)
        self.load_s += counted
        self._excluded_s += waited - counted

    def exclude(self, seconds: float) -> None:
        """Leave out seconds of the lap that has begun: compiling is no part of a link."""
        self._last += seconds
        self._excluded_s += seconds

    def timing(self, fetch_s: float) -> Timing:
        """The parts, now that the first token's logits are there."""
        ttft_s = time.perf_counter() - self._started - self._excluded_s
        return Timing(self.load_s, self.select_s, ttft_s - self.select_s - self.load_s, ttft_s, fetch_s)


def _first_layer(policy: Policy, num_layers: int, selection: Selection | None) -> int:
    """The first layer at which anything cached is used: the first checked one, if all rows are computed until then."""
    checked = policy.check_layers(num_layers)
    return checked[0] if checked and selection is not None and selection.rows.all() else 0


def lay_out(model: Model, head: Chunk, chunks: Sequence[Chunk], tail: Sequence[int]) -> Layout:
    """Where everything is in a prompt.

    Raises:
        InputError: the prompt has no tail, or is longer than the model's positions.
    """
    if not tail:
        raise InputError(
            f"the query and its template have no tokens under the tokenizer of {model.name}; there is nothing to answer"
        )
    layout = Layout.of(head.tokens, [chunk.tokens for chunk in chunks], tail)
    require_room(model, layout.num_tokens)
    return layout


def require_room(model: Model, num_tokens: int) -> None:
    """Refuse a prompt that is longer than the model's positions. Raises InputError."""
    if num_tokens > model.max_positions:
        raise InputError(
            f"the prompt has {num_tokens} tokens, but {model.name} takes {model.max_positions} positions; "
            "link fewer or shorter documents"
        )
