"""A link that reuses what earlier prompts computed, and, over a pool on the device, resident objects.

Prefixes may be on disk, too (`chains.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pictool.core import RowMask
from pictool.errors import PicError
from pictool.linker.chains import ExactImage, KeptChain
from pictool.linker.objects import Context, ReusePlan
from pictool.linker.policies.base import Policy, Prompt, Selection
from pictool.linker.prefixes import Prefixes, PrefixLostError, linked_spans
from pictool.linker.residency import Reservation, ResidentObjects
from pictool.linker.resolve import Part, PromptParts
from pictool.runtime.memory.image import Image

if TYPE_CHECKING:
    from pictool.runtime.model import Model
    from pictool.store.store import Store


class PrefixContext(Context):
    """A context that reuses what earlier prompts computed, too.

    Args:
        context: what is not among that comes from there.
        is_fresh: as of `Spec`.
    """

    def __init__(self, context: Context, store: Store, prefixes: Prefixes, is_fresh: bool) -> None:
        self._context, self._store, self.prefixes = context, store, prefixes
        self._finds_prefixes = prefixes.keeps_prefixes and not is_fresh
        self._kept = KeptChain(prefixes.kept) if prefixes.kept is not None and not is_fresh else None

    def exclude(self, model: Model, policy: Policy, prompt_parts: PromptParts, opened: ExitStack) -> PromptParts:
        """Find what earlier prompts computed; documents in it are not linked. A head that the store lacks is computed:
        it is the next prompt's prefix then."""
        self.found, self.restored = None, ()
        if not self._finds_prefixes or policy.needs.chain_block:
            return prompt_parts
        assert self.prefixes is not None
        head = prompt_parts.parts[0]
        if head.has_object and head.file is None and not self._store.path(head.key(model)).exists():
            prompt_parts = prompt_parts.without_objects([0])
        layout, is_local = prompt_parts.layout, policy.needs.is_local
        spans = linked_spans(model, policy, prompt_parts.parts, layout)
        prefix = self.prefixes.find_prefix(model.salt, layout, spans, is_local)
        if self._kept is not None and (parts := self._kept.open_after(model, layout, prefix.exact_end, opened)):
            prefix = self.prefixes.find_prefix(model.salt, layout, spans, is_local, parts[-1].end)
            start, end = prefix.restored
            self.restored = [part for part in parts if start <= part.start < end]
        self.found = prefix
        computed = [index for index, start in enumerate(layout.starts[:-1]) if start in prefix.computed]
        return prompt_parts.without_objects(computed)

    def open(
        self, prompt: Prompt, parts: Sequence[Part], policy: Policy, selection: Selection | None, opened: ExitStack
    ) -> ReusePlan:
        return self._context.open(prompt, parts, policy, selection, opened)

    def prepare(self, image: Image) -> None:
        self._context.prepare(image)

    def keep(self, image: Image, rows: RowMask) -> None:
        self._context.keep(image, rows)

    def recover(self, error: PicError) -> bool:
        """As the context does; a prefix that was evicted while documents were compiled is not reused."""
        if isinstance(error, PrefixLostError) or self._context.recover(error):
            return True
        return self._kept is not None and self._kept.recover(error)


class PooledContext(PrefixContext):
    """A context whose image is a region of a pool."""

    def __init__(self, context: Context, store: Store, residents: ResidentObjects, is_fresh: bool) -> None:
        super().__init__(context, store, residents, is_fresh)
        self._residents = residents

    def reserve(self, reused: ReusePlan) -> Reservation:
        """Reserve a region of the pool, in which resident objects and the prefix are in their places."""
        layout, placed = reused.prompt.layout, reused.placed
        if self.found is None and not reused.may_be_resident:
            return self._residents.reserve_outside(layout, placed)
        (reservation,) = self._residents.reserve([(layout, placed)], self.found)
        reservation.restore(self.found, self.restored)
        return reservation


def keep_prefix(model: Model, image: Image, prefixes: Prefixes | None) -> None:
    """Keep the exact prefix of a prompt and its answer on disk, if prefixes are kept there."""
    if prefixes is not None and prefixes.kept is not None and isinstance(image, ExactImage):
        KeptChain(prefixes.kept).keep_image(model, image)
