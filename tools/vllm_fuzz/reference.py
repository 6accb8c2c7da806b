"""What a prompt is answered, computed by the torch engine from objects that no fault reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch

from pictool.api import compile, link
from pictool.compiler.contexts import contexts_of
from pictool.core import Chunk, CompileOptions, Layout, RowMask
from pictool.linker.policies.base import Deviation, Needs, Policy, Selection
from pictool.linker.policies.base import Prompt as PolicyPrompt
from pictool.store.objects.format import CompiledChunk
from pictool.store.store import Store
from vllm_fuzz.scene import Place, Prompt, Scene

Logprobs = torch.Tensor


@dataclass(frozen=True)
class Span:
    """A place of a prompt that is linked from the object that was computed after this."""

    place: Place
    after: str


@dataclass(frozen=True)
class Link:
    """What is reused of a prompt, and by which policy. Without spans it is the exact prompt."""

    policy: Policy
    spans: tuple[Span, ...] = ()

    @property
    def num_context(self) -> int:
        return self.spans[-1].place.end if self.spans else 0


@dataclass(frozen=True)
class _Around(Policy):
    """A policy, over a prompt of which some tokens belong to no object: these are always computed.

    The prompt that it sees is longer than the context of the policy, which ends with the last object.
    """

    name: ClassVar[str] = "around"
    reference: ClassVar[str] = "tests"
    inner: Policy
    layout: Layout
    required: RowMask = field(repr=False)  # [tokens but the last]

    @property
    def needs(self) -> Needs:
        return Needs()

    def select(self, prompt: PolicyPrompt) -> Selection:
        return self._with_required(self.inner.select(self._cut(prompt)).rows)

    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        return self.inner.check_layers(num_layers)

    def narrow(self, prompt: PolicyPrompt, layer: int, deviation: Deviation) -> Selection:
        free = ~self.required[: self.layout.num_context]
        key, value = (part[: len(free)] * free for part in (deviation.key, deviation.value))
        cut = Deviation(deviation.rows[: len(free)], key, value)
        return self._with_required(self.inner.narrow(self._cut(prompt), layer, cut).rows)

    def _cut(self, prompt: PolicyPrompt) -> PolicyPrompt:
        return replace(prompt, layout=self.layout, texts=("",) * (len(self.layout.chunks) + 2))

    def _with_required(self, rows: RowMask) -> Selection:
        every = self.required.copy()
        every[: len(rows)] |= rows
        return Selection(every)


class References:
    """Log-probabilities after prompts, each computed once."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._store = Store(scene.unspoilt.root.with_name("parts"))
        self._rows: dict[tuple[object, ...], Logprobs] = {}

    def logprobs(self, prompt: Prompt, linked: Link, answer: Sequence[int]) -> Logprobs:
        """Log-probabilities [answer, vocab] at every token of an answer."""
        policy = (linked.policy.name, *linked.policy.params.items()) if linked.spans else ()
        about = (prompt.tokens, linked.spans, policy)
        if (*about, tuple(answer[:-1])) not in self._rows:
            image = self._link(prompt, linked).image
            assert image.logits is not None
            logits = image.logits
            for i, token in enumerate(answer):
                self._rows[(*about, tuple(answer[:i]))] = logits.double().log_softmax(-1)
                logits = image.append(token) if i + 1 < len(answer) else logits
        return torch.stack([self._rows[(*about, tuple(answer[:i]))] for i in range(len(answer))])

    def _link(self, prompt: Prompt, linked: Link):  # type: ignore[no-untyped-def]
        model, last = self._scene.model, len(prompt.tokens) - 1
        tail = model.tokenizer.decode([prompt.tokens[last]])
        assert model.encode(tail) == prompt.tokens[last:], "the last token of a prompt must be one of its own"
        documents: list[Chunk | str] = []
        required, starts, end = np.zeros(last, dtype=bool), [0], 0

        def add_gap(start: int, stop: int) -> None:
            if start < stop:
                documents.append(Chunk("", prompt.tokens[start:stop], "gap"))
                required[start:stop] = True

        for i, span in enumerate(linked.spans):
            place = span.place
            add_gap(end, place.start)
            if place.start > end or not i:  # the first is the head, perhaps empty
                starts.append(place.start)
            documents.append(self._object(span))
            starts.append(place.end)
            end = place.end
        add_gap(end, last)
        if not linked.spans:
            starts = [0, last]
        layout = Layout(np.asarray(prompt.tokens, dtype=np.int32), tuple(starts))
        policy = _Around(linked.policy, layout, required)
        return link(model, self._store, documents, tail, policy)

    def _object(self, span: Span) -> str:
        """The file of an object of a span's tokens, with the KV that these have in the document."""
        place, model = span.place, self._scene.model
        chunk = self._scene.documents[place.document].chunk
        part = slice(place.offset, place.offset + place.num_tokens)
        key = model.key(chunk.tokens[part], "none", after=contexts_of(model, chunk, CompileOptions(after=span.after)))
        if not self._store.path(key).exists():
            (whole,) = compile(model, self._scene.unspoilt, [chunk], after=span.after)
            geometry = model.geometry
            shape = geometry.kv_heads, len(chunk), geometry.head_dim
            with self._scene.unspoilt.peek(whole.key) as file:
                layers = [
                    tuple(np.frombuffer(data, np.float32).reshape(shape)[:, part].tobytes() for data in file.layer(i))
                    for i in range(geometry.layers)
                ]
                meta = replace(file.meta, key=key, num_tokens=place.num_tokens)
            tokens = np.asarray(chunk.tokens[part], dtype=np.int32)
            self._store.put(CompiledChunk(meta, "part", tokens, layers))  # type: ignore[arg-type]
        return str(self._store.path(key))
