"""Admission control of an engine that batches: bounded, fair between tenants, and given back by whoever goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pictool.serve.admission import Admission, AdmissionControl, held
from pictool.serve.errors import ApiError


def run(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 60))  # type: ignore[arg-type]


class Taking:
    """Requests that wait for places; `order` are those that were given one."""

    def __init__(self, admission: AdmissionControl) -> None:
        self.admission, self.order, self.given = admission, list[str](), dict[str, Admission]()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, *names: str, size: int = 1) -> None:
        """The first letter of a name is its tenant."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._take(name, size))
            await asyncio.sleep(0)
        await self.settle()

    async def _take(self, name: str, size: int) -> None:
        self.given[name] = await self.admission.take(name[0], size)
        self.order.append(name)

    async def end(self, name: str) -> None:
        self.given[name].release()
        self.given[name].release()  # twice is once
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def test_who_has_least_is_next_and_the_rest_waits() -> None:
    async def scene() -> None:
        taking = Taking(AdmissionControl(limit=9, most=2))
        await taking.ask("a1", "a2", "a3", "a4", "b1", "c1")
        assert taking.order == ["a1", "a2"]
        assert (taking.admission.num_active, taking.admission.num_waiting) == (2, 4)
        for name in ("a1", "a2", "b1", "a3", "c1", "a4"):
            await taking.end(name)
        assert taking.order == ["a1", "a2", "b1", "a3", "c1", "a4"]
        assert (taking.admission.num_active, taking.admission.num_waiting) == (0, 0)

    run(scene)


def test_beyond_the_bound_is_429_and_a_tenant_with_fewer_takes_a_place() -> None:
    async def scene() -> None:
        taking = Taking(AdmissionControl(limit=2, most=1))
        await taking.ask("a1", "a2", "a3")
        with pytest.raises(ApiError) as refused:
            await taking.admission.take("a")
        assert refused.value.status == 429 and refused.value.headers["Retry-After"]
        await taking.ask("b1")
        with pytest.raises(ApiError):
            await taking.tasks["a3"]
        await taking.end("a1")
        await taking.end(taking.order[-1])
        assert set(taking.order) == {"a1", "a2", "b1"}

    run(scene)


def test_who_goes_away_leaves_the_queue_and_loses_no_place() -> None:
    async def scene() -> None:
        admission = AdmissionControl(limit=5, most=1)
        taking = Taking(admission)
        await taking.ask("a1", "a2", "a3")
        taking.tasks["a2"].cancel()
        await taking.settle()
        assert admission.num_waiting == 1
        taking.given["a1"].release()  # a3 is given one in this moment, and goes away before it knows
        taking.tasks["a3"].cancel()
        await taking.settle()
        assert (admission.num_active, admission.num_waiting) == (0, 0)
        with pytest.raises(ValueError), held(await admission.take("a")):
            raise ValueError
        assert admission.num_active == 0

    run(scene)


def test_what_has_begun_waits_in_a_full_queue_and_loses_its_turn_last() -> None:
    async def scene() -> None:
        admission = AdmissionControl(limit=1, most=1)
        taking = Taking(admission)
        await taking.ask("a1", "a2")
        part = asyncio.create_task(admission.take("a", has_begun=True))
        await taking.settle()
        assert admission.num_waiting == 2 and not part.done()
        await taking.ask("b1")
        with pytest.raises(ApiError):
            await taking.tasks["a2"]
        await taking.end("a1")
        (await part).release()
        await taking.settle()
        await taking.end("b1")
        assert taking.order == ["a1", "b1"] and (admission.num_active, admission.num_waiting) == (0, 0)

    run(scene)


def test_many_answers_of_one_request_are_as_many_places() -> None:
    async def scene() -> None:
        taking = Taking(AdmissionControl(limit=9, most=4))
        await taking.ask("a1", size=50)
        await taking.ask("b1", "c1", size=1)
        assert taking.order == ["a1"]
        await taking.end("a1")
        assert taking.order == ["a1", "b1", "c1"]
        await taking.ask("a2", size=8)
        assert taking.order[-1] == "a2", "what is begun while there is room may go beyond it"

    run(scene)


def test_places_are_kept_for_tenants_that_have_none() -> None:
    async def scene() -> None:
        taking = Taking(AdmissionControl(limit=9, most=8, num_tenants=20))
        await taking.ask(*(f"a{i}" for i in range(8)))
        assert taking.order == [f"a{i}" for i in range(6)], "a quarter is kept at most"
        await taking.ask("b1", "b2", "c1")
        assert taking.order[6:] == ["b1", "c1"], "at once, though others wait; a second one waits as they do"
        await taking.end("b1")
        assert taking.order[8:] == ["b2"]
        two = Taking(AdmissionControl(limit=9, most=8, num_tenants=2))
        await two.ask(*(f"a{i}" for i in range(8)), "b1", "b2")
        assert two.order == [*(f"a{i}" for i in range(7)), "b1"]

    run(scene)
