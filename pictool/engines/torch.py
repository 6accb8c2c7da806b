"""The default engine: compiles, links and decodes on the torch runtime, which is imported when the first does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pictool.compiler.compile import Compiled, compile_chunks
from pictool.core import Chunk, CompileOptions
from pictool.engines.base import Answer, Engine, Feature, LinkResult, outcome_of
from pictool.errors import PicError
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.spec import Spec
from pictool.runtime import turns

if TYPE_CHECKING:
    from pictool.linker.link import Linked
    from pictool.linker.prefixes import Prefixes
    from pictool.runtime.model import Model
    from pictool.store.store import Store


class TorchEngine(Engine):
    """The engine on our own runtime, in this process.

    Attributes:
        max_tokens: of an answer at most; None: no limit beside the request's own.
    """

    name: ClassVar[str] = "torch"
    title: ClassVar[str] = "the torch engine"
    supports: ClassVar[frozenset[Feature]] = frozenset(
        {"trace", "outputs", "auto_ratio", "codecs", "chains", "plans", "pool", "attention", "means"}
    )
    max_tokens: int | None = None

    def __init__(
        self, model: Model, store: Store, pool_bytes: int | None = 0, residents: Prefixes | None = None
    ) -> None:
        """`pool_bytes` None: exact prefixes stay. `residents`: those of a pool that engines of one model share."""
        super().__init__(model, store, pool_bytes)
        self.residents = residents or self.open_pool(model, store, pool_bytes, pool_bytes is None)

    @classmethod
    def open_pool(
        cls, model: Model, store: Store, num_bytes: int | None, keeps_prefixes: bool, kept: Store | None = None
    ) -> Prefixes | None:
        """What stays from prompt to prompt, in so many bytes.

        Args:
            num_bytes: None: see `default_pool_bytes`; 0: nothing stays.
            kept: where exact prefixes are on disk.

        Raises:
            InputError, ModelError: as of `ResidentObjects`.
        """
        from pictool.linker.residency import ResidentObjects
        from pictool.runtime.memory.pool import default_pool_bytes

        num_bytes = default_pool_bytes(model) if num_bytes is None else num_bytes
        return ResidentObjects(model, num_bytes, keeps_prefixes, kept, store.memory) if num_bytes else None

    def compile(
        self,
        chunks: Iterable[Chunk | str],
        options: CompileOptions = CompileOptions(),
        *,
        force: bool = False,
        on_done: Callable[[Compiled], None] | None = None,
    ) -> list[Compiled]:
        self.require_options(options)
        return compile_chunks(self.model, self.store, chunks, options, force=force, on_done=on_done)

    def link(self, spec: Spec, *, on_compile: Callable[[Compiled], None] | None = None) -> LinkResult:
        from pictool.linker.link import link

        return link_result(link(self.model, self.store, spec, on_compile=on_compile, residents=self.residents))

    def link_all(self, specs: Sequence[Spec]) -> Iterator[tuple[int, LinkResult | PicError]]:
        """See `Engine.link_all`. From a pool of objects alone they are linked in batches."""
        from pictool.linker.batch import link_batches
        from pictool.linker.residency import ResidentObjects

        residents = self.residents
        if not isinstance(residents, ResidentObjects) or residents.keeps_prefixes:
            return super().link_all(specs)

        def result(linked: tuple[int, Linked | PicError]) -> tuple[int, LinkResult | PicError]:
            index, outcome = linked
            return index, outcome if isinstance(outcome, PicError) else link_result(outcome)

        return map(result, link_batches(self.model, self.store, specs, residents))  # map holds no image

    def run(
        self, spec: Spec, *, on_text: Callable[[str], None] | None = None,
        on_compile: Callable[[Compiled], None] | None = None,
    ) -> Answer:  # fmt: skip
        turns.checkpoint("turn")
        if self.max_tokens is not None:
            spec = replace(spec, max_new_tokens=min(spec.max_new_tokens, self.max_tokens))
        return self._decode(spec, self.link(spec, on_compile=on_compile), on_text)

    def answer_all(self, specs: Sequence[Spec]) -> Iterator[tuple[int, Answer | PicError]]:
        if self.residents is None or self.residents.keeps_prefixes:
            return super().answer_all(specs)

        def answer(linked: tuple[int, LinkResult | PicError]) -> tuple[int, Answer | PicError]:
            index, result = linked
            if isinstance(result, PicError):
                return index, result
            return index, outcome_of(partial(self._decode, specs[index], result))

        return map(answer, self.link_all(specs))

    def _decode(self, spec: Spec, result: LinkResult, on_text: Callable[[str], None] | None = None) -> Answer:
        from pictool.runtime.decode import generate

        assert result.linked is not None
        started = time.perf_counter()
        generated = generate(self.model, result.linked.image, spec.max_new_tokens, spec.sampling, on_text)
        return Answer(generated, result, time.perf_counter() - started, self.model, self.model.engine)

    def warm_up(self, spec: Spec) -> None:
        """A first pass over the model, of a prompt without documents."""
        from pictool.linker.link import link

        link(self.model, self.store, replace(spec, documents=(), policy=make_policy(BASELINE)))


def link_result(linked: Linked) -> LinkResult:
    return LinkResult(
        linked.policy, linked.image.layout, linked.recomputed, linked.timing, linked.bytes_read, linked.image.logits,
        linked,
    )  # fmt: skip
