"""The contract of engines: compile chunks, link a spec, answer it; one `Answer`, one `Comparison`, one report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from pictool.compiler.contexts import MEAN
from pictool.core import Chunk, CompileOptions, Layout
from pictool.errors import InputError, PicError, TraceError

if TYPE_CHECKING:
    from torch import Tensor

    from pictool.compiler.compile import Compiled
    from pictool.linker.link import Linked, Timing
    from pictool.linker.policies.base import Policy
    from pictool.linker.spec import Spec
    from pictool.runtime.decode import Generated
    from pictool.runtime.memory.image import Image
    from pictool.runtime.model import Model
    from pictool.store.store import Store
    from pictool.trace.format import Trace

_T = TypeVar("_T")
Feature = Literal["trace", "outputs", "auto_ratio", "codecs", "chains", "plans", "pool", "attention", "means"]
_FEATURES: dict[Feature, str] = {
    "trace": "does not support traces; use the torch engine",
    "outputs": "does not keep the KV of outputs; compile them, or use the torch engine",
    "auto_ratio": "cannot measure the speed to choose a ratio by; use the torch engine",
    "codecs": "does not encode objects; compile with the torch engine first",
    "plans": "builds its prompts itself; pass documents and a query",
    "pool": "keeps KV in its own cache",
    "attention": "does not expose attention; use legolink, or --engine torch",
    "means": "compiles a chunk after one context only; use previous, text, code or records",
    "chains": "has its own prefix cache; use full, or --engine torch",
}


@dataclass(frozen=True)
class LinkResult:
    """A linked prompt, before its first token is chosen.

    Fields:
        recomputed: mean number of context rows that were computed per layer.
        bytes_read: of KV, from objects; 0 from an engine that does not count them.
        logits: of the first token, float32 [vocab], up to a constant (vLLM gives log-probabilities); None if the
            engine was not asked for them.
        linked: the image and all that the link did, of an engine that shows traces.
        objects: source and key of each document, of an engine that shows none.
    """

    policy: Policy
    layout: Layout
    recomputed: float
    timing: Timing
    bytes_read: int
    logits: Tensor | None
    linked: Linked | None = None
    objects: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Comparison:
    """A link against full recompute of the same prompt.

    `kl` is KL(full ‖ linked) of the first token, `answer_kl` the sum over all tokens of full's answer, each after the
    same tokens (teacher forcing); in nats. `answer_kl` is None from an engine that gives no logits.
    """

    answer: str
    ttft_s: float
    speedup: float
    kl: float
    same_first_token: bool
    same_answer: bool
    common_prefix: int  # of generated tokens
    answer_kl: float | None = None

    @property
    def nats(self) -> float:
        """KL of the whole answer, if the engine gives it, else that of the first token: what is judged."""
        return self.kl if self.answer_kl is None else self.answer_kl

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Comparison:
        """What a report says, without what it may have besides."""
        return cls(**{field.name: report[field.name] for field in fields(cls) if field.name in report})

    def report(self) -> dict[str, Any]:
        return dict(vars(self))

    def _repr_html_(self) -> str:
        from pictool.trace.html import table_html

        return table_html(self.report())


@dataclass(frozen=True)
class Answer:
    """What a request gives. `loaded` is the model that gave it, `model` what the user calls that."""

    generated: Generated
    link: LinkResult
    decode_s: float
    loaded: Model
    engine: str
    compare: Comparison | None = None

    def __repr__(self) -> str:
        rows = f"{self.link.recomputed:.0f} of {self.link.layout.num_context} rows"
        return f"Answer({self.text!r}, {self.link.policy.name}, {rows}, TTFT {self.timing.ttft_s * 1e3:.1f} ms)"

    def _repr_html_(self) -> str:
        """For notebooks: the text with its computed tokens coloured, of an engine that shows them."""
        from pictool.trace.html import answer_html, list_html, trace_html

        compare = "" if self.compare is None else self.compare._repr_html_()
        if self.link.linked is not None:
            return trace_html(self.trace()) + compare
        documents = list_html("documents", (source for source, _ in self.link.objects))
        return answer_html(self.text, repr(self)) + documents + compare

    @property
    def model(self) -> str:
        return self.loaded.name

    @property
    def text(self) -> str:
        return self.generated.text.strip()

    @property
    def timing(self) -> Timing:
        return self.link.timing

    @property
    def logits(self) -> Tensor:
        """Of the first token, float32 [vocab]; of an engine that was asked for them."""
        assert self.link.logits is not None, f"{self.engine}: gives logits for a comparison only"
        return self.link.logits

    @property
    def linked(self) -> Linked:
        """The link's image, which has grown by the generated tokens.

        Raises:
            TraceError: an engine that shows no traces.
        """
        if self.link.linked is None:
            raise TraceError(f"the {self.engine} engine {_FEATURES['trace']}")
        return self.link.linked

    def report(self) -> dict[str, Any]:
        """The JSON of `pic link --json` (docs/design.md §6)."""
        link, timing, layout = self.link, self.link.timing, self.link.layout
        return {
            "answer": self.text,
            "finish_reason": "stop" if self.generated.is_complete else "length",
            "algo": link.policy.name,
            "params": link.policy.params,
            "model": self.model,
            "engine": self.engine,
            "tokens": {
                "head": layout.starts[1],
                "context": layout.num_context,
                "tail": layout.num_tokens - layout.num_context,
                "prompt": layout.num_tokens,
                "recomputed": link.recomputed,
                "generated": len(self.generated.tokens),
            },
            "timing": {
                "load_s": timing.load_s,
                "select_s": timing.select_s,
                "recompute_s": timing.recompute_s,
                "ttft_s": timing.ttft_s,
                "decode_s": self.decode_s,
            },
            "compare": self.compare.report() if self.compare else None,
            **({"pool": link.linked.pool.report()} if link.linked and link.linked.pool else {}),
        }

    def origin(self) -> dict[str, Any]:
        """What is needed, beside the request, to get the same answer again."""
        objects, linked = self.link.objects, self.link.linked
        if linked is not None:
            objects = [(part.chunk.source, part.key(self.loaded)) for part, _ in linked.documents]
        return {
            "objects": [{"source": source, "key": key} for source, key in objects],
            "device": self.loaded.device, "dtype": self.loaded.dtype, "fingerprint": self.loaded.fingerprint,
        }  # fmt: skip

    def write_trace(self, path: str | Path) -> None:
        """Write what this link did as a trace file. Raises TraceError as `linked` does."""
        from pictool.trace.format import write_trace

        write_trace(Path(path), self.trace())

    def trace(self) -> Trace:
        """What this link did. Raises TraceError as `linked` does."""
        from pictool.trace.replay import record_trace

        return record_trace(self.loaded, self.linked, self.logits, self.generated, self.report())


class Engine(ABC):
    """What compiles, links and answers with one model over one store. A context manager.

    Attributes:
        name: what `--engine` and reports call it. title: what messages call it.
        supports: the features that not every engine has.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    supports: ClassVar[frozenset[Feature]]

    def __init__(self, model: Model, store: Store, pool_bytes: int | None = 0) -> None:
        """`pool_bytes`: of KV of objects that stay on the device from link to link; 0: none do; None: what the engine
        keeps for the next prompts by default.

        Raises:
            InputError: this engine has no pool, or these are too few bytes.
            ModelError: a model whose keys cannot be moved.
        """
        self.model, self.store = model, store
        if pool_bytes:
            self.require("pool", "a pool")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027 (most engines hold nothing)
        """Give back what the engine holds."""

    @classmethod
    def require(cls, feature: Feature, what: str) -> None:
        """Refuse what this engine cannot do.

        Args:
            what: what the user asked for, for the message.

        Raises:
            InputError: it does not support the feature.
        """
        if feature not in cls.supports:
            raise InputError(f"{what}: {cls.title} {_FEATURES[feature]}")

    def require_supported(self, spec: Spec) -> None:
        """Refuse a spec that needs what this engine cannot do. Raises InputError as `require` does."""
        self.model.require_policy(spec.policy)
        if spec.plan is not None:
            self.require("plans", "a prompt of token ids")
        if spec.policy.needs.chain_block:
            self.require("chains", f"--algo {spec.policy.name}")
        if spec.policy.needs.attention and spec.policy.fallback is None:
            self.require("attention", f"--algo {spec.policy.name}")
        self.require_options(CompileOptions(codec=spec.codec))

    def require_options(self, options: CompileOptions) -> None:
        """Refuse objects that this engine cannot compile. Raises InputError as `require` does."""
        if options.codec != CompileOptions.codec:
            self.require("codecs", f"--codec {options.codec}")
        if options.after == MEAN:
            self.require("means", f"after {MEAN}")

    @abstractmethod
    def compile(
        self,
        chunks: Iterable[Chunk | str],
        options: CompileOptions = CompileOptions(),
        *,
        force: bool = False,
        on_done: Callable[[Compiled], None] | None = None,
    ) -> list[Compiled]:
        """Compile chunks (or texts) to objects in the store. What it already has costs no model run.

        Raises:
            PicError: see `compile_chunks`; or what this engine does not support.
        """

    @abstractmethod
    def link(self, spec: Spec, *, on_compile: Callable[[Compiled], None] | None = None) -> LinkResult:
        """Link a spec's prompt, with the first token's logits; nothing is decoded.

        Raises:
            PicError: an unusable document or object, a prompt that is too long, or what is not supported.
        """

    def link_all(self, specs: Sequence[Spec]) -> Iterator[tuple[int, LinkResult | PicError]]:
        """Link several specs in their order, each as `link` does when its turn comes.

        Yields:
            the index of a spec and its link, or why there is none. An engine with a pool has its room again for the
            next ones once nobody holds it.
        """
        return ((index, outcome_of(partial(self.link, spec))) for index, spec in enumerate(specs))

    @abstractmethod
    def run(
        self, spec: Spec, *, on_text: Callable[[str], None] | None = None,
        on_compile: Callable[[Compiled], None] | None = None,
    ) -> Answer:  # fmt: skip
        """Link and decode. See `answer`, which callers use."""

    def warm_up(self, spec: Spec) -> None:  # noqa: B027 (servers have answered before)
        """Run what the first answer would set up, so that neither side of a comparison is timed with it."""

    def answer(
        self,
        spec: Spec,
        *,
        compare: bool = False,
        on_text: Callable[[str], None] | None = None,
        on_compile: Callable[[Compiled], None] | None = None,
    ) -> Answer:
        """Link, decode, and (with `compare`) do the same under full recompute.

        Args:
            on_text: called with each piece of the answer as soon as it is certain. What it raises ends the answer and
                comes out of here; the engine can go on with the next one.
            on_compile: called for each object that had to be compiled.

        Raises:
            PicError: an unusable document or object, a prompt that is too long, or what is not supported.
        """
        from pictool.linker.policies import BASELINE, make_policy

        self.require_supported(spec)
        if not compare:
            return self.run(spec, on_text=on_text, on_compile=on_compile)
        self.warm_up(spec)
        spec = replace(spec, is_fresh=True)
        answer = self.run(spec, on_text=on_text, on_compile=on_compile)
        full = self.run(replace(spec, policy=make_policy(BASELINE)))
        return replace(answer, compare=self.compare(spec, answer, full))

    def compare(self, spec: Spec, answer: Answer, full: Answer) -> Comparison:
        """How far an answer to a spec is from that of full recompute."""
        return compare_answers(answer, full)

    def answer_all(self, specs: Sequence[Spec]) -> Iterator[tuple[int, Answer | PicError]]:
        """Answer several specs, each as `answer` does: one after the other, or side by side where the engine can.

        Yields:
            the index of a spec and its answer, or why it has none, in the order in which they end.
        """
        return ((index, outcome_of(partial(self.answer, spec))) for index, spec in enumerate(specs))


def outcome_of(act: Callable[[], _T]) -> _T | PicError:
    """What a function returns, or why it fails."""
    try:
        return act()
    except PicError as error:
        return error


def compare_answers(answer: Answer, full: Answer, first: tuple[float, bool] | None = None) -> Comparison:
    """How far an answer is from that of full recompute, and how much sooner its first token came.

    Args:
        first: `kl` and `same_first_token`, of engines that give no logits.
    """
    if first is None:
        is_same = bool(full.logits.argmax() == answer.logits.argmax())
        first = first_token_kl(full.logits, answer.logits), is_same
    a, b = answer.generated.tokens, full.generated.tokens
    same = [x == y for x, y in zip(a, b, strict=False)]
    return Comparison(
        answer=full.text,
        ttft_s=full.timing.ttft_s,
        speedup=full.timing.ttft_s / answer.timing.ttft_s,
        kl=first[0],
        same_first_token=first[1],
        same_answer=answer.text == full.text,
        common_prefix=[*same, False].index(False),
        answer_kl=None
        if answer.link.linked is None or full.link.linked is None
        else answer_kl(full.linked.image, answer.linked.image, b),
    )


def answer_kl(full: Image, linked: Image, tokens: Sequence[int]) -> float:
    """KL(full ‖ linked) in nats, summed over the tokens of full's answer; see `forced_logits` for the images."""
    from pictool.runtime.decode import forced_logits

    total = 0.0
    for exact, own in zip(*(forced_logits(image, tokens) for image in (full, linked)), strict=True):
        total += first_token_kl(exact, own)
    return total


def first_token_kl(full: Tensor, linked: Tensor) -> float:
    """KL(full ‖ linked) in nats of two logit vectors [vocab]."""
    p, q = full.cpu().double().log_softmax(-1), linked.cpu().double().log_softmax(-1)
    return max(0.0, float((p.exp() * (p - q)).sum()))
