"""What a request of the vLLM connector may ask for; without vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from pictool.engines.vllm.request import (
    MAX_OBJECTS,
    SECRET,
    CompileParams,
    LinkParams,
    Problem,
    ReportParams,
    RequestError,
    UnusableObjectError,
    compile_proof,
    is_proof,
    parse_policy,
    parse_request,
)
from pictool.errors import InputError
from pictool.linker.policies import make_policy

NAIVE = make_policy("naive", {})


def test_what_a_request_may_say() -> None:
    assert parse_request(None, NAIVE, False) is None
    assert parse_request({"pic": False}, NAIVE, True) is None
    unsaid = parse_request({"other": 1}, NAIVE, True)
    assert isinstance(unsaid, LinkParams) and unsaid.objects is None and unsaid.policy == NAIVE
    said = parse_request({"pic": {"keys": ["ab"], "policy": "cacheblend-15"}}, NAIVE, False)
    assert isinstance(said, LinkParams) and said.objects is not None and said.objects[0].start is None
    assert said.policy == make_policy("cacheblend", {})


def test_the_codec_of_what_is_recognised() -> None:
    """A request's own, or the server's; requests that name objects say it by their keys."""
    said: tuple[tuple[Any, str | None], ...] = (
        ({"pic": {"recognise": True, "codec": "int8"}}, "int8"), ({"pic": {"recognise": True, "codec": None}}, None),
        ({"pic": {"recognise": True}}, "zstd"), (None, "zstd"),
    )  # fmt: skip
    for params, codec in said:
        parsed = parse_request(params, NAIVE, True, "zstd")
        assert isinstance(parsed, LinkParams) and parsed.codec == codec
    wrongs: tuple[Any, ...] = ("nosuch", 3, [])
    for wrong in wrongs:
        with pytest.raises(RequestError, match=r"^codec "):
            parse_request({"pic": {"recognise": True, "codec": wrong}}, NAIVE, True)
    with pytest.raises(RequestError, match=r"^kv_transfer_params: codec .*keys"):
        parse_request({"pic": {"keys": ["ab"], "codec": "int8"}}, NAIVE, True)


def test_what_a_policy_may_be() -> None:
    assert parse_policy({"algo": "legolink", "k": 3}) == parse_policy("legolink-3")
    for wrong in (3, {"k": 3}, "legolink:k=1,2", {"algo": "legolink", "z": 1}, ""):
        with pytest.raises(InputError):
            parse_policy(wrong)


@pytest.mark.parametrize("params", ["", "pic", 0, 3.5, [], [{"pic": {}}], True])
def test_parameters_of_another_type_are_refused(params: object) -> None:
    with pytest.raises(RequestError, match=r"^kv_transfer_params: "):
        parse_request(params, NAIVE, False)


def test_what_a_client_is_shown() -> None:
    paths = OSError(13, "Permission denied", "/srv/store/objects")
    assert "/srv" not in Problem.of(paths).shown and "/srv" in Problem.of(paths).detail
    unusable = UnusableObjectError("ab" * 32, "/srv/store: no such object")
    assert Problem.of(unusable).shown.startswith("object abababababab:") and "/srv" not in Problem.of(unusable).shown
    long = Problem.of(RequestError("x\n" * 10_000))
    assert len(long.shown) < 600 and "\n" not in long.shown


def test_what_a_request_may_not_say() -> None:
    wrong: list[Any] = ["", 0, [], {"pic": []}, {"pic": {"keys": "ab"}}, {"pic": {"keys": []}}, {"pic": {"keys": [1]}}]
    for params in wrong:
        with pytest.raises(InputError, match="kv_transfer_params: "):
            parse_request(params, NAIVE, True)


def test_the_objects_that_a_request_names_are_bounded() -> None:
    for way, entry in (("keys", "ab"), ("chunks", {"key": "ab", "start": 0})):
        parse_request({"pic": {way: [entry] * MAX_OBJECTS}}, NAIVE, False)
        with pytest.raises(InputError, match=f"^kv_transfer_params: {way} .* {MAX_OBJECTS} "):
            parse_request({"pic": {way: [entry] * (MAX_OBJECTS + 1)}}, NAIVE, False)


def test_names_and_salts_of_reports() -> None:
    parsed = parse_request({"pic": {"keys": ["ab"], "salt": "@/", "report_as": "x"}}, NAIVE, False)
    assert isinstance(parsed, LinkParams) and (parsed.salt, parsed.report_as) == ("@/", "x")
    parsed = parse_request({"pic": {"compile": {"text": "a", "before": 0}, "report_as": "x"}}, NAIVE, False)
    assert isinstance(parsed, CompileParams) and parsed.report_as == "x" and parsed.salt is None
    assert parse_request({"pic": {"report": "x"}}, NAIVE, False) == ReportParams("x")
    wrongs: tuple[dict[str, Any], ...] = (
        {"report": ""}, {"report": 5}, {"report": "x", "keys": ["ab"]}, {"keys": ["ab"], "recognise": True},
        {"report": "x", "recognise": True},
        {"keys": ["ab"], "salt": 5}, {"keys": ["ab"], "report_as": "x" * 5000},
    )  # fmt: skip
    for fields in wrongs:
        with pytest.raises(RequestError):
            parse_request({"pic": fields}, NAIVE, False)


def test_a_proof_is_of_one_text_and_of_who_has_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    assert compile_proof("text", (), "") == "" and not is_proof("", "text", (), "")
    monkeypatch.setenv(SECRET, "shared")
    proof = compile_proof("text", (), "salt")
    assert is_proof(proof, "text", (), "salt")
    for other in (("texts", (), "salt"), ("text", (1,), "salt"), ("text", (), "")):
        assert not is_proof(proof, *other)
    assert not is_proof("", "text", (), "salt") and not is_proof("ö\ud800", "text", (), "salt")
    monkeypatch.setenv(SECRET, "another")
    assert not is_proof(proof, "text", (), "salt")
