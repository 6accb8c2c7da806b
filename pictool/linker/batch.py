"""Links of several prompts from one pool: objects that are resident are moved to the places of all in one plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from pictool.errors import NotFiniteError, ObjectError, PicError
from pictool.linker.link import Linked, PreparedLink, compute, link, prepare, start_link
from pictool.linker.residency import Reservation, ResidentObjects
from pictool.linker.spec import Spec
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

# Prompts are opened ahead until there are so many, or their objects so many open files.
_MOST_AHEAD = 32
_OPEN_FILES = 256


@dataclass(frozen=True)
class _Next:
    """A prompt that waits for its image. `prepared` is None if its objects could not be opened."""

    index: int
    spec: Spec
    opened: ExitStack
    prepared: PreparedLink | None

    @property
    def num_files(self) -> int:
        """Objects that are open."""
        return 0 if self.prepared is None else len(self.prepared.reused.placed)


def link_batches(
    model: Model, store: Store, specs: Iterable[Spec], residents: ResidentObjects
) -> Generator[tuple[int, Linked | PicError], None, None]:
    """Link prompts in their order, in batches of as many images as the pool has room for beside those that are held.

    Each is linked as `link` does it, when its turn comes. Drop each image before you request the next, so that its
    slots can be reused.

    Yields:
        the index of a spec and its link, or why there is none.
    """
    rest, ahead = enumerate(specs), deque[_Next]()
    with ExitStack() as every:
        while True:
            while len(ahead) < _MOST_AHEAD and sum(each.num_files for each in ahead) < _OPEN_FILES:
                if (following := next(rest, None)) is None:
                    break
                ahead.append(_open(model, store, *following))
                every.callback(ahead[-1].opened.close)
            if not ahead:
                return
            reservations = _reserve_batch(ahead, residents)
            while reservations:
                each = ahead.popleft()
                alone = partial(link, model, store, each.spec, residents=residents)
                yield each.index, _outcome(each, reservations.popleft(), alone)  # no name here holds the image
                each.opened.close()


def _open(model: Model, store: Store, index: int, spec: Spec) -> _Next:
    opened = ExitStack()
    try:
        return _Next(index, spec, opened, prepare(start_link(model, store, spec), opened))
    except PicError:  # a link of its own recovers, or says what is wrong
        opened.close()
        return _Next(index, spec, opened, None)


def _reserve_batch(ahead: Iterable[_Next], residents: ResidentObjects) -> deque[Reservation | None]:
    """Reservations for the first prompts; None for one that has to be linked alone."""
    ready = [each.prepared for each in ahead]
    first = ready[0]
    if first is None:
        return deque[Reservation | None]([None])
    if not first.reused.may_be_resident:
        return deque[Reservation | None]([residents.reserve_outside(first.prompt_parts.layout, first.reused.placed)])
    batch = takewhile(lambda each: each is not None and each.reused.may_be_resident, ready)
    return deque[Reservation | None](
        residents.reserve([(each.prompt_parts.layout, each.reused.placed) for each in batch if each is not None])
    )


def _outcome(each: _Next, reservation: Reservation | None, alone: Callable[[], Linked]) -> Linked | PicError:
    """The link of a prompt; once more, alone, if an object of it turns out damaged or lost."""
    try:
        if each.prepared is not None and reservation is not None:
            return compute(each.prepared, reservation)
    except (ObjectError, NotFiniteError):
        pass
    except PicError as error:
        return error.with_traceback(None)  # which holds the image
    reservation = None
    try:
        return alone()
    except PicError as error:
        return error.with_traceback(None)
