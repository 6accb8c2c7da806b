"""A link over a pool on the device: it reuses resident objects, and exact prefixes, if the pool keeps some.

Prefixes may be on disk, too (`chains.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pictool.core import RowMask
from pictool.errors import PicError
from pictool.linker.chains import KeptChain
from pictool.linker.loader import PlacedObject
from pictool.linker.objects import Context, ReusePlan
from pictool.linker.policies.base import Policy, Prompt, Selection
from pictool.linker.prefixes import FoundPrefix, PrefixLostError, linked_spans
from pictool.linker.residency import Reservation, ResidentObjects
from pictool.linker.resolve import Part, PromptParts
from pictool.runtime.memory.image import Image
from pictool.runtime.memory.pool import PooledImage

if TYPE_CHECKING:
    from pictool.runtime.model import Model
    from pictool.store.store import Store


class PooledContext(Context):
    """A context whose image is a region of a pool.

    Args:
        context: what the pool lacks comes from there.
        is_fresh: as of `Spec`.
    """

    def __init__(self, context: Context, store: Store, residents: ResidentObjects, is_fresh: bool) -> None:
        self._context, self._store, self._residents = context, store, residents
        self._finds_prefixes = residents.keeps_prefixes and not is_fresh
        self._kept = KeptChain(residents.kept) if residents.kept is not None and not is_fresh else None
        self._prefix: FoundPrefix | None = None
        self._restored: list[PlacedObject] = []

    def exclude(self, model: Model, policy: Policy, prompt_parts: PromptParts, opened: ExitStack) -> PromptParts:
        """Find what earlier prompts computed; documents in it are not linked. A head that the store lacks is computed:
        it is the next prompt's prefix then."""
        self._prefix, self._restored = None, []
        if not self._finds_prefixes or policy.needs.chain_block:
            return prompt_parts
        head = prompt_parts.parts[0]
        if head.has_object and head.file is None and not self._store.path(head.key(model)).exists():
            prompt_parts = prompt_parts.without_objects([0])
        layout, is_local = prompt_parts.layout, policy.needs.is_local
        spans = linked_spans(model, policy, prompt_parts.parts, layout)
        prefix = self._residents.find_prefix(model.salt, layout, spans, is_local)
        if self._kept is not None and (found := self._kept.open_after(model, layout, prefix.exact_end, opened)):
            prefix = self._residents.find_prefix(model.salt, layout, spans, is_local, found[-1].end)
            start, end = prefix.restored
            self._restored = [part for part in found if start <= part.start < end]
        self._prefix = prefix
        computed = [index for index, start in enumerate(layout.starts[:-1]) if start in prefix.computed]
        return prompt_parts.without_objects(computed)

    def open(
        self, prompt: Prompt, parts: Sequence[Part], policy: Policy, selection: Selection | None, opened: ExitStack
    ) -> ReusePlan:
        return self._context.open(prompt, parts, policy, selection, opened)

    def reserve(self, reused: ReusePlan) -> Reservation:
        """Reserve a region of the pool, in which resident objects and the prefix are in their places."""
        layout, placed = reused.prompt.layout, reused.placed
        if self._prefix is None and not reused.may_be_resident:
            return self._residents.reserve_outside(layout, placed)
        (reservation,) = self._residents.reserve([(layout, placed)], self._prefix)
        reservation.restore(self._prefix, self._restored)
        return reservation

    def prepare(self, image: Image) -> None:
        self._context.prepare(image)

    def keep(self, image: Image, rows: RowMask) -> None:
        self._context.keep(image, rows)

    def recover(self, error: PicError) -> bool:
        """As the context does; a prefix that was evicted while documents were compiled is not reused."""
        if isinstance(error, PrefixLostError) or self._context.recover(error):
            return True
        return self._kept is not None and self._kept.recover(error)


def keep_prefix(model: Model, image: Image, residents: ResidentObjects | None) -> None:
    """Keep the exact prefix of a prompt and its answer on disk, if the pool keeps prefixes there."""
    if residents is not None and residents.kept is not None and isinstance(image, PooledImage):
        KeptChain(residents.kept).keep_image(model, image)
