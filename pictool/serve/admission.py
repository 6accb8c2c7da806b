"""Admission control of an engine that batches: so many requests run, others wait in a fair, bounded queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager

from pictool.serve.backends.torch.engine_thread import FairQueue, QueueFullError
from pictool.serve.errors import queue_full


class Admission:
    """What a request holds while it runs, or waits to.

    `size` is how many answers it asks for at once. `has_begun` if it is a part of a request that was let in before.
    """

    def __init__(self, control: AdmissionControl, tenant: str, size: int, has_begun: bool = False) -> None:
        self.tenant, self.size, self.has_begun = tenant, size, has_begun
        self._control, self._is_held = control, True
        self._given: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> None:
        """Until it is given. Raises QueueFullError if another tenant's request takes its turn."""
        await self._given

    def give(self, error: BaseException | None = None) -> None:
        """It is given, or lost."""
        if self._given.done():  # whoever waited went away
            return
        if error is None:
            self._given.set_result(None)
        else:
            self._given.set_exception(error)

    def release(self) -> None:
        """The request is over, or does not want it any more. May be called twice."""
        if self._is_held:
            self._is_held = False
            self._control.end(self)


class AdmissionControl:
    """Which requests of one event loop run, and which wait.

    Requests run while their answers are fewer than `most`: the next one is begun once there are fewer, so that the last
    may go beyond by its own answers. Who is next, and who loses a turn where `limit` wait, is the queue's rule. Of
    `num_tenants`, those that have no answer running find a place kept for them, but no more than a quarter of all are.

    Attributes:
        num_waiting, num_active: requests.
    """

    def __init__(self, limit: int, most: int, num_tenants: int = 1) -> None:
        self._queue, self._most, self._num_tenants = FairQueue[Admission](limit), most, num_tenants
        self._running = Counter[str]()  # answers by tenant
        self._active: set[Admission] = set()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_active(self) -> int:
        return len(self._active)

    async def take(self, tenant: str, size: int = 1, *, has_begun: bool = False) -> Admission:
        """Wait for a place.

        Args:
            has_begun: a part of a request that was let in before. It is not refused for a queue that is full; who lets
                such requests in bounds their number.

        Raises:
            ApiError: 429, at once or while it waits: there is no room in the queue.
        """
        place = Admission(self, tenant, size, has_begun)
        try:
            self._admit(place)
            await place.wait()
        except QueueFullError as error:
            raise queue_full() from error
        except BaseException:  # the client went away
            place.release()
            raise
        return place

    @asynccontextmanager
    async def place(self, tenant: str, size: int = 1, *, has_begun: bool = False) -> AsyncGenerator[Admission, None]:
        """A place while the context lasts. Raises as `take`."""
        place = await self.take(tenant, size, has_begun=has_begun)
        with held(place):
            yield place

    def end(self, place: Admission) -> None:
        """A place is given back, or not waited for any more."""
        if place in self._active:
            self._active.remove(place)
            self._running[place.tenant] -= place.size
        else:
            self._queue.remove(place)
        while len(self._queue) and self._has_room(self._queue.next_tenant(self._running)):
            self._begin(self._queue.pop(self._running))

    def _has_room(self, tenant: str) -> bool:
        """Whether a tenant may begin with a request. Of those that wait, nobody may."""
        num_idle = self._num_tenants - sum(count > 0 for count in self._running.values())
        kept = max(0, min(num_idle, self._most // 4)) if self._running[tenant] else 0
        return self._running.total() < self._most - kept

    def _admit(self, place: Admission) -> None:
        """Begin with a request, or let it wait. Raises QueueFullError."""
        if self._has_room(place.tenant):
            self._begin(place)
        elif place.has_begun:
            self._queue.put_back(place)
        elif (loser := self._queue.push(place)) is not None:
            loser.give(QueueFullError())

    def _begin(self, place: Admission) -> None:
        self._active.add(place)
        self._running[place.tenant] += place.size
        place.give()


@contextmanager
def held(place: Admission) -> Iterator[None]:
    """Gives a place back at the end of the context."""
    try:
        yield
    finally:
        place.release()
