"""Upkeep of objects from a screen: delete (after a question), pin, verify. Everything runs in threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from textual.worker import get_current_worker

from pictool.errors import PicError
from pictool.store.store import Store
from pictool.tui.base import PicScreen
from pictool.tui.listing import SHORT, ListedObject, counted, readable

_MAX_NAMED = 6  # objects that a question names
_GROUP = "upkeep"


class ObjectUpkeep:
    """Deletes, pins and verifies objects of a store, one task at a time.

    Args:
        name_of: an object's name for people.
        on_note: shows how far a task is; "" when it is done.
        on_change: called after objects or pins changed.
        on_verified: receives the problem of each object that was verified; "" if there is none.
    """

    def __init__(
        self, screen: PicScreen, store: Store, name_of: Callable[[ListedObject], str], on_note: Callable[[str], None],
        on_change: Callable[[], None], on_verified: Callable[[Mapping[str, str]], None],
    ) -> None:  # fmt: skip
        self._screen, self._store, self._name_of = screen, store, name_of
        self._on_note, self._on_change, self._on_verified = on_note, on_change, on_verified
        self.is_running = False

    def delete(self, objects: Sequence[ListedObject]) -> None:
        """Ask, then remove these objects; pinned ones stay."""
        free = [entry for entry in objects if not entry.is_pinned]
        num_pinned = len(objects) - len(free)
        if not free:
            self._screen.pic.tell("pinned objects stay; unpin them first (p)" if num_pinned else "no object to delete")
            return
        size = sum(entry.stored.num_bytes for entry in free if entry.stored is not None)
        names = [f"{entry.key[:SHORT]}  {self._name_of(entry)}" for entry in free[:_MAX_NAMED]]
        if len(free) > _MAX_NAMED:
            names.append(f"and {len(free) - _MAX_NAMED} more")
        if num_pinned:
            names.append(f"{counted(num_pinned, 'pinned object')} of those marked: not deleted")
        question = f"Delete {counted(len(free), 'object')}, {readable(size)}? Links compile their texts again."
        keys = [entry.key for entry in free]
        self._screen.ask(question, "delete", lambda: self._start(partial(self._delete, keys)), names)

    def toggle_pins(self, objects: Sequence[ListedObject]) -> None:
        """Pin these objects, so that they are neither evicted nor deleted; unpin them if all of them are pinned."""
        is_pinned = all(entry.is_pinned for entry in objects)
        if objects:
            self._start(partial(self._pin, [entry.key for entry in objects], not is_pinned))

    def verify(self, objects: Sequence[ListedObject]) -> None:
        """Read and check all bytes of these objects."""
        if objects:
            self._start(partial(self._verify, [entry.key for entry in objects]))

    def cancel(self) -> bool:
        """End the task after the object that it is at; returns whether there was one."""
        if self.is_running:
            self._screen.workers.cancel_group(self._screen, _GROUP)
        return self.is_running

    def _start(self, task: Callable[[], str]) -> None:
        if self.is_running:
            self._screen.pic.tell("objects are being verified; escape ends that")
            return
        self.is_running = True
        self._screen.run_worker(partial(self._run, task), thread=True, group=_GROUP)

    def _run(self, task: Callable[[], str]) -> None:
        """Run in the thread; whatever is shown goes through the app's own thread."""
        said, is_error = "", False
        try:
            said = task()
        except PicError as error:
            said, is_error = str(error), True
        self._screen.app.call_from_thread(self._finish, said, is_error)

    def _finish(self, said: str, is_error: bool) -> None:
        self.is_running = False
        self._on_note("")
        self._on_change()
        self._screen.pic.tell(said, is_error)

    def _delete(self, keys: Sequence[str]) -> str:
        from pictool.store.upkeep import expire

        removed = expire(self._store, keys)
        used = f"; {len(keys) - removed.count} used meanwhile, which stay" if removed.count < len(keys) else ""
        return f"deleted {counted(removed.count, 'object')}, {readable(removed.num_bytes)}{used}"

    def _pin(self, keys: Sequence[str], is_pinned: bool) -> str:
        from pictool.store import upkeep

        for key in keys:
            (upkeep.pin if is_pinned else upkeep.unpin)(self._store, key)
        return f"{'pinned' if is_pinned else 'unpinned'} {counted(len(keys), 'object')}"

    def _verify(self, keys: Sequence[str]) -> str:
        from pictool.store.upkeep import find_problem

        worker, call, found = get_current_worker(), self._screen.app.call_from_thread, dict[str, str]()
        for key in keys:
            if worker.is_cancelled:
                break
            call(self._on_note, f"verifying {len(found) + 1} of {len(keys)} (escape ends it) …")
            found[key] = str(find_problem(self._store, key) or "")
        call(self._on_verified, found)
        num_bad = sum(bool(problem) for problem in found.values())
        ended = f" of {len(keys)}" if len(found) < len(keys) else ""
        verdict = f"{num_bad} cannot be used; x deletes what is damaged" if num_bad else "all are whole"
        return f"verified {len(found)}{ended} {'object' if len(keys) == 1 else 'objects'}: {verdict}"
