"""Reading every object of a store and checking it; and taking out what is damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pictool.errors import ForeignObjectError, ObjectError, PicError, StoreError, UnreadableObjectError
from pictool.store import space
from pictool.store.entries import Entry, entries
from pictool.store.files import locked
from pictool.store.format import ObjectFile
from pictool.store.index import FILE as INDEX
from pictool.store.store import Store


@dataclass(frozen=True)
class Verified:
    """What was read; `problems` by key, those that `repaired` names are gone."""

    objects: int
    num_bytes: int
    problems: dict[str, str]
    repaired: tuple[str, ...] = ()


def verify(store: Store, repair: bool = False, on_object: Callable[[Entry], None] | None = None) -> Verified:
    """Read and check every object.

    `repair` removes what is damaged, so that it is compiled again when it is next wanted. An object under another
    one's name gets its own. What cannot be read for another reason (permission, a version of format that is not
    known) stays, and remains a problem.

    Raises:
        StoreError: a damaged object cannot be removed.
    """
    count, num_bytes = 0, 0
    problems: dict[str, str] = {}
    for entry in entries(store.root):
        problem = _problem(store, entry.key)
        if problem is None or entry.path.exists():
            count, num_bytes = count + 1, num_bytes + entry.num_bytes
            problems |= {} if problem is None else {entry.key: str(problem)}
        if on_object:
            on_object(entry)
    repaired = tuple(key for key in problems if repair and take_out(store, key))
    if repaired:
        (store.root / INDEX).unlink(missing_ok=True)
    return Verified(count, num_bytes, problems, repaired)


def _problem(store: Store, key: str) -> PicError | None:
    try:
        with store.look_here(key) as found:
            found.verify()
    except PicError as error:
        return error
    return None


def take_out(store: Store, key: str) -> bool:
    """Take a damaged object out, if it still is damaged now that nobody else changes anything.

    Raises:
        StoreError: it cannot be removed.
    """
    path = store.path(key)
    try:
        with locked(store.root / space.LOCK) as fd:
            problem = _problem(store, key)
            if not isinstance(problem, ObjectError) or isinstance(problem, UnreadableObjectError | ForeignObjectError):
                return False
            space.forget_count(fd)
            if (own := _whole_under_own_name(store, key)) is not None and not store.path(own).exists():
                store.path(own).parent.mkdir(exist_ok=True)
                path.rename(store.path(own))
            else:
                path.unlink()
    except OSError as error:
        raise StoreError(f"{path}: is damaged, and cannot be removed ({error.strerror})") from error
    return True


def _whole_under_own_name(store: Store, key: str) -> str | None:
    """The key of a whole object that stands under this one's name."""
    try:
        with ObjectFile(store.path(key)) as found:
            found.verify()
            return found.meta.key
    except ObjectError:
        return None
