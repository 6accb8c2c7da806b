"""`link()`: resolve → lay out → select → open → reserve → each layer (load, relocate, compute, narrow) → logits.

`prepare` ends before the reservation and `compute` begins after it, so several prompts can reserve images together
(`batch.py`). What is reused comes from a `Context`: objects (`objects.py`), with states (`cuts.py`), or a chain
(`chains.py`), each of them over a pool (`pooled.py`).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pictool.compiler.compile import OnCompile
from pictool.core import RowMask
from pictool.errors import NotFiniteError, ObjectError
from pictool.linker.attended import attended_by_tail, where_asked
from pictool.linker.chains import ChainContext
from pictool.linker.cuts import HybridContext
from pictool.linker.fusor import Fusor, always_computed
from pictool.linker.loader import Loader
from pictool.linker.narrowing import Narrowing
from pictool.linker.objects import Context, ObjectContext, ReusePlan
from pictool.linker.policies.base import Policy, Prompt, Scores, Selection
from pictool.linker.pooled import PooledContext, PrefixContext
from pictool.linker.prefixes import FoundPrefix, Prefixes
from pictool.linker.residency import PoolUse, Reservation, ResidentObjects
from pictool.linker.resolve import Part, PromptParts, lay_out_spec
from pictool.linker.spec import Spec
from pictool.runtime.device import synchronize
from pictool.runtime.memory.image import Image
from pictool.runtime.memory.streams import event_now
from pictool.store.store import Store

if TYPE_CHECKING:
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

    `parts` are the documents and their separators; `texts` are those of head, parts and tail. `bytes_read` is the KV
    read from objects, without that from host memory. `pool` is the KV that was reused on the device, with an engine
    that has a pool, and `prefix` the part of it that an earlier prompt computed.
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
    model: Model, store: Store, spec: Spec, *, on_compile: OnCompile | None = None,
    residents: Prefixes | None = None,
) -> Linked:  # fmt: skip
    """Link documents into a prompt: head + documents + tail, with separators, each tokenized on its own
    (docs/design.md §2, rule 1).

    What a remote does not give whole is compiled here instead, with a warning (`Store.on_warning`); the time that was
    lost on it counts as load.

    Args:
        on_compile: called for each object that had to be compiled.
        residents: objects and prefixes that stay from prompt to prompt; what it reuses of them is not loaded again.

    Raises:
        PicError: an unusable document or object, or a prompt that is too long for the model.
    """
    run = start_link(model, store, spec, on_compile, residents)
    while True:
        try:
            with ExitStack() as opened:
                prepared = prepare(run, opened)
                if model.own_link is not None:
                    linked: Linked = model.own_link(prepared)
                    return linked
                return compute(prepared, run.context.reserve(prepared.reused))
        except (ObjectError, NotFiniteError) as error:  # something turned out damaged, or lost, while it was read
            if not run.context.recover(error):
                raise
            run.clock.load_s += run.clock.lap()


@dataclass(frozen=True)
class LinkRun:
    """What the passes of one link share."""

    model: Model
    store: Store
    spec: Spec
    context: Context
    clock: LinkTimer


def start_link(
    model: Model,
    store: Store,
    spec: Spec,
    on_compile: OnCompile | None = None,
    residents: Prefixes | None = None,
) -> LinkRun:
    """Load what is loaded but once, and see that it is still the same; then the clock of a link starts."""
    policy = model.linkable(spec.policy)
    _ = model.stack, model.target, model.eos_ids
    model.require_unchanged()
    policy.prepare(model)
    clock, is_hybrid = LinkTimer(), model.geometry.states is not None
    context: Context = HybridContext(store, on_compile) if is_hybrid else ObjectContext(store, on_compile)
    if policy.needs.chain_block:
        context = ChainContext(store, policy.needs.chain_block)
    if residents is not None and not is_hybrid:  # a pool holds no states
        if isinstance(residents, ResidentObjects):
            context = PooledContext(context, store, residents, spec.is_fresh)
        else:
            context = PrefixContext(context, store, residents, spec.is_fresh)
    return LinkRun(model, store, replace(spec, policy=policy), context, clock)


@dataclass(frozen=True)
class PreparedLink:
    """A link whose objects are open, before it has an image."""

    run: LinkRun
    prompt_parts: PromptParts
    reused: ReusePlan

    def linked(self, image: Image, rows: RowMask, scores: Scores | None, timing: Timing, bytes_read: int) -> Linked:
        """The linked prompt, now that it has an image."""
        keys = {part.file.meta.key for part in self.reused.placed}
        parts = tuple(part.after(keys) for part in self.prompt_parts.parts[1:])
        texts = tuple(map(self.run.model.encoder.whole, self.prompt_parts.texts))
        return Linked(image, self.run.spec.policy, parts, texts, rows, scores, timing, bytes_read)


def prepare(run: LinkRun, opened: ExitStack) -> PreparedLink:
    """The passes of a link before it has an image. Objects are open until `opened` is closed."""
    model, policy, clock, context = run.model, run.spec.policy, run.clock, run.context
    # Resolve: every document is parts with tokens; objects that documents name are open from here on.
    # Lay out: where everything is in the prompt.
    prompt_parts = context.exclude(model, policy, lay_out_spec(model, run.store, run.spec, opened), opened)
    prompt = Prompt(model, prompt_parts.layout, prompt_parts.texts)

    # Select: the rows, so that only objects of which something is reused are opened. A policy that reads from
    # objects, or is slow, selects below, once the first layers are on their way.
    selection = None if policy.needs.selects_late else policy.select(prompt)
    clock.select_s += clock.lap()

    # Open: what there is to reuse, each object where it is in the prompt.
    reused = context.open(prompt, prompt_parts.parts, policy, selection, opened)
    clock.exclude(reused.compile_s)
    clock.load_s += clock.lap()
    return PreparedLink(run, prompt_parts, reused)


def compute(prepared: PreparedLink, reservation: Reservation) -> Linked:
    """The passes of a link over its image."""
    run, prompt_parts, reused = prepared.run, prepared.prompt_parts, prepared.reused
    policy, clock, prompt = run.spec.policy, run.clock, reused.prompt
    stack, image, found = run.model.stack, reservation.image, reservation.found
    clock.resume(reservation.seconds)
    run.context.prepare(image)
    loads = reservation.loads(_first_layer(policy, stack.num_layers, reused.selection))
    with Loader(loads, policy.needs.runs_model, run.store.memory) as loader:
        clock.load_s += clock.lap()
        always, exact = always_computed(prompt, prompt_parts.required), None if found is None else found.exact_rows
        if policy.needs.attention:
            on = always if exact is None else always & ~exact
            # With rows that are exact already nobody knows beforehand how many of those chosen are computed.
            may_stay = exact is None and event_now(stack.device) is not None
            attend = partial(attended_by_tail, image, prompt, on, loader.synchronize)
            prompt = replace(prompt, attention=partial(where_asked, attend, may_stay))
        selection = reused.selection or policy.select(prompt)
        fusor = Fusor(image, Narrowing(prompt, policy, selection, always, exact))
        clock.select_s += clock.lap()

        # Each layer: load and relocate what is reused, compute the rows, narrow them. All fresh K and V that a row
        # attends to are in place before it does.
        for layer in range(stack.num_layers):
            clock.load_s += loader.synchronize(layer)
            fusor.prefill_layer(layer)

        # Logits of the last row.
        fusor.finish()
        synchronize(stack.device)
        timing = clock.timing(loader.busy_s)
    reservation.finish()
    run.context.keep(image, fusor.rows)
    linked = prepared.linked(image, fusor.rows, fusor.scores, timing, loader.bytes_read)
    return replace(linked, pool=reservation.use if reservation.on_finish else None, prefix=found)


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
