"""What must hold of a response, whatever was asked for and whatever the disk did meanwhile."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import vllm_rig as rig

from pictool.errors import PicError
from vllm_fuzz.reference import Link, References, Span
from vllm_fuzz.requests import Asked
from vllm_fuzz.scene import AFTER, SALTS, Place, Scene

STATES = ("linked", "cached", "compiled", "exact")
DEFAULT_POLICY = "legolink-4"
_REFUSED = range(400, 500)
_HEX = re.compile(r"[0-9a-f]{8,}")
_TIE = 1e-3  # of two tokens of which either may be the likeliest
Row = Mapping[int, float]  # log-probabilities of some tokens


@dataclass(frozen=True)
class Response:
    """What came back. `status` 0: nothing did, and `text` says why."""

    status: int
    text: str
    seconds: float


@dataclass(frozen=True)
class Answer:
    """One choice: the tokens, and log-probabilities at each."""

    tokens: tuple[int, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Verdict:
    """`kind` is what became of a request; `problem` is None if that may be."""

    kind: str
    problem: str | None = None


class Judge:
    """Compares answers with references, and looks for what a client must not learn."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self._references = scene, References(scene)
        self._owner = {
            scene.key(i, salt, after)[:8]: salt
            for i, document in enumerate(scene.documents) for salt in document.salts for after in AFTER
        }  # fmt: skip
        self._exact = Link(rig.policy_of("full"))

    def judge(self, asked: Asked, response: Response) -> Verdict:
        if response.status == 0:
            return Verdict("left") if asked.leaves else Verdict("silent", response.text)
        if leak := self._leak(asked, response.text):
            return Verdict("leak", leak)
        if response.status in _REFUSED or (asked.method != "POST" and response.status == 200):
            return Verdict("refused")
        if response.status != 200:
            return self._failed(asked, f"{response.status}: {response.text[:300]}")
        try:
            answers, report = _parse(asked, response.text)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            return self._failed(asked, f"{type(error).__name__}: {error}: {response.text[:300]}")
        if report is not None and report["state"] not in STATES:
            return Verdict("state", f"the response says {report['state']!r}")
        kind = "unsaid" if report is None else report["state"]
        if asked.compiles and (report is None or (kind != "compiled" and not report["problem"])):
            return Verdict("compile", f"it was not compiled, and nothing says why: {report}")
        if kind == "exact" and not report["problem"]:  # type: ignore[index]
            return Verdict(kind, "it is exact, and nothing says why")
        if asked.prompt is None:
            return Verdict(kind)
        return Verdict(kind, self._mistake(asked, answers, report))

    def _failed(self, asked: Asked, why: str) -> Verdict:
        """A failed request: a problem, unless it is vLLM's own front end that cannot take what was sent."""
        return Verdict("failed", None if asked.fails else why)

    def _leak(self, asked: Asked, text: str) -> str | None:
        """What a response says that its client did not."""
        said = text.replace("\\/", "/")
        for secret in (str(self._scene.world.store.root), *(salt for salt in SALTS if salt != asked.salt)):
            if secret and secret in said and secret not in asked.body:
                return f"the response has {secret!r}"
        own = asked.body.lower()
        for run in _HEX.findall(said):
            if self._owner.get(run[:8], asked.salt) != asked.salt and run[:8] not in own:
                return f"the response has the key {run}"
        return None

    def _mistake(self, asked: Asked, answers: Sequence[Answer], report: Mapping[str, Any] | None) -> str | None:
        """Why an answer is none of those that it may be; None if each is."""
        for answer in answers:
            least = float("inf")
            for linked in self._candidates(asked, report, is_known=not asked.is_stream and len(answers) == 1):
                least = min(least, self._difference(asked, linked, answer))
                if least <= rig.TOLERANCE:
                    break
            else:
                return f"an answer is {least:.2g} from every reference: {report}"
        return None

    def _difference(self, asked: Asked, linked: Link, answer: Answer) -> float:
        """The largest |Δ log-probability|; infinite for a token that is not the likeliest."""
        assert asked.prompt is not None
        wanted = self._references.logprobs(asked.prompt, linked, answer.tokens)
        worst = 0.0
        for row, token, reference in zip(answer.rows, answer.tokens, wanted, strict=True):
            worst = max(worst, *(abs(value - float(reference[name])) for name, value in row.items()))
            if float(reference.max() - reference[token]) > _TIE:
                return float("inf")
        return worst

    def _candidates(self, asked: Asked, report: Mapping[str, Any] | None, is_known: bool) -> Iterator[Link]:
        """The links that an answer may be of; of one that says what was linked, only those that are so."""
        if is_known and (report is None or report["state"] in ("exact", "compiled")):
            yield self._exact
            return
        if report is not None and (policy := _policy_of(report["policy"])) is not None:
            for linked in self._links(asked, policy):
                if (len(linked.spans), linked.num_context) == (report["chunks"], report["context"]):
                    yield linked
            if is_known:
                return
        yield self._exact
        for policy in {_policy_of(said) for said in (_asked_policy(asked), DEFAULT_POLICY)} - {None}:
            assert policy is not None
            yield from self._links(asked, policy)

    def _links(self, asked: Asked, policy: Any) -> Iterator[Link]:
        """All links of documents of the request's tenant that are in its prompt: those of most documents first."""
        assert asked.prompt is not None
        documents = self._scene.documents
        own = [place for place in asked.prompt.places if asked.salt in documents[place.document].salts]
        for count in range(len(own), 0, -1):
            for places in itertools.combinations(own, count):
                for chosen in itertools.product(AFTER[::-1], repeat=count):
                    yield Link(policy, tuple(map(Span, places, chosen)))


def _policy_of(label: Any) -> Any:
    try:
        return rig.policy_of(label).without_attention if isinstance(label, str) else None
    except PicError:
        return None


def _asked_policy(asked: Asked) -> Any:
    try:
        return json.loads(asked.body)["kv_transfer_params"]["pic"]["policy"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _parse(asked: Asked, text: str) -> tuple[list[Answer], Mapping[str, Any] | None]:
    """The answers of a response, and what it says was linked."""
    if asked.is_stream:
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        parts = [json.loads(line) for line in lines]
        if errors := [part["error"] for part in parts if "error" in part]:
            raise ValueError(str(errors[0]))
        by_index: dict[int, list[Any]] = {}
        for part in parts:
            for choice in part["choices"]:
                by_index.setdefault(choice["index"], []).append(choice)
        return [_join([_answer(choice) for choice in choices]) for choices in by_index.values()], None
    said = json.loads(text)
    report = (said.get("kv_transfer_params") or {}).get("pic")
    return [_answer(choice) for choice in said["choices"]], report


def _answer(choice: Mapping[str, Any]) -> Answer:
    """An answer, or a part of it. Parts may have no log-probabilities."""
    logprobs = choice.get("logprobs") or {}
    if "top_logprobs" in logprobs:  # a completion's
        rows = [{_token(name): value for name, value in row.items()} for row in logprobs["top_logprobs"] or []]
    else:
        content = logprobs.get("content") or []
        rows = [{_token(entry["token"]): entry["logprob"] for entry in token["top_logprobs"]} for token in content]
    tokens = tuple(choice.get("token_ids") or ())
    if len(tokens) != len(rows):
        raise ValueError(f"{len(tokens)} tokens with {len(rows)} rows of log-probabilities")
    return Answer(tokens, tuple(rows))


def _join(parts: Sequence[Answer]) -> Answer:
    return Answer(
        tuple(token for part in parts for token in part.tokens), tuple(row for part in parts for row in part.rows)
    )


def _token(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def require_apart(scene: Scene) -> None:
    """Linking must change most answers, or agreement would say nothing."""
    references = References(scene)
    linked = [prompt for prompt in scene.prompts if len(prompt.places) > 1][:8]
    differences = [
        (references.logprobs(prompt, Link(rig.policy_of("naive"), _spans(prompt.places)), [0])
         - references.logprobs(prompt, Link(rig.policy_of("full")), [0])).abs().max()
        for prompt in linked
    ]  # fmt: skip
    assert torch.stack(differences).median() > 0.1


def _spans(places: Sequence[Place]) -> tuple[Span, ...]:
    return tuple(Span(place, "none") for place in places)
