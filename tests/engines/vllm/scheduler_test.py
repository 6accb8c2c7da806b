"""Salts tell every way of linking apart; without vLLM."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_rig as rig

from pictool.engines.vllm.client.setup import parse_settings
from pictool.engines.vllm.request import LinkParams
from pictool.engines.vllm.scheduler import scheduler
from pictool.engines.vllm.scheduler.scheduler import SaltFactory, SchedulerSide
from pictool.engines.vllm.worker.threads import BackgroundThrottle
from pictool.linker.plan import make_plan
from pictool.linker.policies import make_policy

NAIVE = make_policy("naive", {})


def test_salts_tell_every_way_of_linking_apart() -> None:
    tokens, factory = rig.ids(*range(20)), SaltFactory()
    a, b, second = rig.match("a", 3, 3, 4), rig.match("b", 3, 3, 4), rig.match("a", 8, 8, 9)
    later = rig.match("a", 3, 3, 4, offset=1)
    plans = [
        make_plan(policy, tokens, objects)
        for policy in (NAIVE, make_policy("legolink", {"k": 4}), make_policy("legolink", {"k": 5}))
        for objects in ([a], [b], [later], [a, second])
    ]
    salts = [factory.salt_of(plan, own) for plan in plans for own in (None, "tenant")]
    assert len(set(salts)) == len(salts)
    assert salts == [factory.salt_of(plan, own) for plan in plans for own in (None, "tenant")]
    assert factory.unique() != factory.unique()
    assert SaltFactory().salt_of(plans[0], None) != salts[0], "a client could name a salt"


# Requests that meet an error


@dataclass
class Asked:
    """What the scheduler's side reads of a vLLM request; one that nothing is linked in."""

    kv_transfer_params: Any
    request_id: str = "r"
    prompt_token_ids: Sequence[int] = (1, 2, 3)
    cache_salt: str | None = None
    prompt_embeds: None = None
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(extra_args=None))
    mm_features: Sequence[object] = ()
    lora_request: None = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    block_hashes: list[bytes] = field(default_factory=list)
    prefill_stats: None = None

    def update_block_hashes(self) -> None:
        self.block_hashes.append(b"")


class Planning:
    """A planner of a test's own."""

    def __init__(self) -> None:
        self.throttle = BackgroundThrottle()


class Broken(Planning):
    """A planner that meets what nobody foresaw."""

    def plan(self, *_: object) -> None:
        raise OverflowError("a path of the server's")


@pytest.mark.parametrize("params", ["", 0, [], {"pic": {"keys": ["ab"]}}, None])
def test_an_error_makes_its_request_exact_and_ends_nothing(params: object) -> None:
    settings = parse_settings({"store": "x", "recognise": True})
    side = SchedulerSide(Broken(), settings)  # type: ignore[arg-type]
    request: Any = Asked(params)
    side.add_request(request)
    while side.num_matched_tokens(request, 0) is None:  # it is planned in a thread
        pass
    assert side.num_matched_tokens(request, 0) == 0
    counts, report = side.take_counts(), side.finish_request(request)
    assert counts is not None and counts.failed == 1
    assert report is not None and report["pic"]["state"] == "exact"
    assert "a path of the server's" not in report["pic"]["problem"]


class FindsNothing(Planning):
    """A planner that recognises no document."""

    def plan(self, *_: object) -> None:
        return None


def test_a_request_that_has_no_document_has_no_report() -> None:
    side = SchedulerSide(FindsNothing(), parse_settings({"store": "x", "recognise": True}))  # type: ignore[arg-type]
    request: Any = Asked(None)
    side.add_request(request)
    while side.num_matched_tokens(request, 0) is None:
        pass
    assert side.finish_request(request) is None and side.take_counts() is None


def test_a_report_is_asked_for_once_by_the_name_that_its_request_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the request runs, and after it; the last ones only."""
    monkeypatch.setattr(scheduler, "_NAMED", 2)
    side = SchedulerSide(Broken(), parse_settings({"store": "x"}))  # type: ignore[arg-type]

    def ask(request_id: str, **fields: object) -> dict[str, Any]:
        request: Any = Asked({"pic": fields}, request_id)
        side.add_request(request)
        while side.num_matched_tokens(request, 0) is None:
            pass
        report = side.finish_request(request)
        assert report is not None
        return dict(report["pic"])

    linked = [ask(name, keys=["ab"], report_as=name) for name in ("a", "b", "c")]
    assert [ask("x", report=name)["state"] for name in ("a", "b", "c", "b")] == ["unknown", "exact", "exact", "unknown"]
    assert linked[1]["problem"] and side.take_counts() is not None


def test_a_tenants_salt_may_come_beside_the_one_of_vllm() -> None:
    salts = list[object]()

    class Notes(Planning):
        def plan(self, parsed: LinkParams, tokens: object, salt: str, _: object) -> None:
            salts.append(salt)

    side = SchedulerSide(Notes(), parse_settings({"store": "x"}))  # type: ignore[arg-type]
    for number, fields in enumerate(({}, {"salt": "a/b"}, {"salt": ""})):
        request: Any = Asked({"pic": {"keys": ["ab"], **fields}}, str(number), cache_salt="vllm's")
        side.add_request(request)
        while side.num_matched_tokens(request, 0) is None:
            pass
    assert salts == ["vllm's", "a/b", ""]


class Slow(Planning):
    """A planner that makes no plan until it is released, but for requests of few objects: in those it finds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.released, self.num_planned = threading.Event(), 0

    def plan(self, parsed: LinkParams, *_: object) -> None:
        if len(parsed.objects or ()) > 1:
            self.released.wait()
        self.num_planned += 1

    def close(self) -> None:
        self.released.set()


def asked(number: int, num_objects: int) -> Any:
    return Asked({"pic": {"keys": ["ab"] * num_objects}}, request_id=f"{number} of {num_objects}")


def test_requests_of_many_objects_keep_nobody_from_being_planned() -> None:
    side = SchedulerSide(Slow(), parse_settings({"store": "x"}))  # type: ignore[arg-type]
    many, few = [asked(i, 1000) for i in range(8)], asked(0, 1)
    for request in (*many, few):
        side.add_request(request)
    while side.num_matched_tokens(few, 0) is None:
        side.take_jobs()
    assert [side.num_matched_tokens(request, 0) for request in many] == [None] * 8
    side.shutdown()


def test_a_request_that_is_not_planned_in_time_is_exact() -> None:
    """Also if a disk that hangs keeps every thread: nobody waits for it for ever."""
    side = SchedulerSide(Slow(), parse_settings({"store": "x", "plan_s": 0.05}))  # type: ignore[arg-type]
    requests = [asked(i, 2) for i in range(6)]
    for request in requests:
        side.add_request(request)
    for request in requests:
        while side.num_matched_tokens(request, 0) is None:
            side.take_jobs()
        report = side.finish_request(request)
        assert report is not None and report["pic"]["state"] == "exact"
        assert "within 0.05 s" in report["pic"]["problem"]
    side.shutdown()


def test_a_step_waits_once_for_all_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = [100.0], list[float]()

    def wait(futures: Sequence[object], timeout_s: float) -> Any:
        waits.append(timeout_s)
        clock[0] += timeout_s
        return SimpleNamespace(done=())

    monkeypatch.setattr(scheduler, "wait", wait)
    monkeypatch.setattr("pictool.engines.vllm.scheduler.scheduler.time.monotonic", lambda: clock[0])
    side = SchedulerSide(Slow(), parse_settings({"store": "x"}))  # type: ignore[arg-type]
    requests = [asked(i, 2) for i in range(5)]
    for _ in range(2):
        waits.clear()
        for request in requests:
            side.add_request(request)
            assert side.num_matched_tokens(request, 0) is None
        side.take_jobs()
        assert sum(waits) == pytest.approx(scheduler.PLAN_WAIT_S)
    side.take_jobs(num_tokens=1)
    waits.clear()
    side.add_request(asked(9, 2))
    assert waits == [0], "a step that has other work waits for no plan"
    side.shutdown()


def test_no_salt_that_vllm_shows_is_a_client_s_or_opens_anything() -> None:
    """Those in its KV events are salted again, whether the request is linked or not; equal ones share blocks still."""
    side = SchedulerSide(Broken(), parse_settings({"store": "x"}))  # type: ignore[arg-type]
    plan = make_plan(NAIVE, rig.ids(*range(20)), [rig.match("a", 3, 3, 4)])
    shown = SaltFactory().salt_of(plan, None)
    for params in (None, {"pic": False}):
        request: Any = Asked(params, cache_salt=shown)
        side.add_request(request)
        assert request.cache_salt not in (None, shown) and request.block_hashes
        others: list[Any] = [Asked(params, cache_salt=salt) for salt in ("tenant", "tenant", "another", None)]
        for other in others:
            side.add_request(other)
        salts = [other.cache_salt for other in others]
        assert salts[0] == salts[1] != salts[2] and salts[3] is None and "tenant" not in salts[0]
