"""G, C, repeat and map: calls of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, ClassVar, Self

from pictool.errors import InputError
from pictool.spans.operators.joins import Cross, Par, Plus, Seq, as_input, read_input
from pictool.spans.operators.messages import Message
from pictool.spans.query import DEFAULT_MODEL, MAX_NODES, Effect, Options, Over, Path, Query, Rule, nodes
from pictool.spans.reader import QueryReader, shown_value
from pictool.spans.running import QueryTask, RunningQuery

MAX_TOKENS, TEMPERATURE = 0, 0.6  # of spnl's `g`, where it says nothing
MAX_STOPS, MAX_STOP_BYTES = 16, 4096  # stop strings of a call, and their bytes in all
MAX_REPEAT = 255  # as of spnl
CALL_FIELDS = ("max_tokens", "temperature", "top_p", "stop")


@dataclass(frozen=True)
class Call:
    """How a model is called.

    Fields:
        model: as the query names it, perhaps with a provider ("spnl/NAME").
        max_tokens: None or 0: the executor's default. 1 prepares: it fills the cache.
        temperature: None: the executor's default.
        top_p: ours: of sampling; None: the executor's default.
        stop: ours: texts that end the output, at most MAX_STOPS of MAX_STOP_BYTES in all.
    """

    model: str = DEFAULT_MODEL
    max_tokens: int | None = MAX_TOKENS
    temperature: float | None = TEMPERATURE
    top_p: float | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, float) and value.is_integer():  # 0.0 is written as 0, its equal
                object.__setattr__(self, name, int(value))

    @classmethod
    def read(cls, reader: QueryReader, value: Mapping[str, Any], path: Path) -> Call:
        """The call of a mapping that has a model, and perhaps `CALL_FIELDS`."""
        tokens, temperature = value.get("max_tokens", MAX_TOKENS), value.get("temperature", TEMPERATURE)
        if tokens is not None:
            reader.whole(tokens, (*path, "max_tokens"))
        if temperature is not None and not (type(temperature) in (int, float) and 0 <= temperature <= 1000):
            problem = f"must be a number from 0 to 1000, not {shown_value(temperature)}"
            raise reader.fail((*path, "temperature"), problem)
        top_p = value.get("top_p")
        if top_p is not None and not (type(top_p) in (int, float) and 0 < top_p <= 1):
            raise reader.fail((*path, "top_p"), f"must be a number above 0 and at most 1, not {shown_value(top_p)}")
        stop = _read_stop(reader, value.get("stop"), (*path, "stop"))
        return cls(reader.text(value["model"], (*path, "model")), tokens, temperature, top_p, stop)

    def to_data(self) -> dict[str, Any]:
        """Its fields as JSON; of ours those that it has, as spnl knows no others."""
        own = {"top_p": self.top_p, "stop": list(self.stop) or None}
        stated = {name: value for name, value in own.items() if value is not None}
        return {"model": self.model, "max_tokens": self.max_tokens, "temperature": self.temperature, **stated}


@dataclass(frozen=True)
class ModelCall(Query):
    """An operator that calls a model."""

    call: Call

    @property
    def is_drawn(self) -> bool:
        return self.call.temperature not in (0, None)


def has_calls(query: Query) -> bool:
    """Whether a model generates anything in it."""
    return any(isinstance(node, ModelCall) for _, node in nodes(query))


def _read_stop(reader: QueryReader, value: Any, path: Path) -> tuple[str, ...]:
    """A text or a list of texts."""
    if value is None:
        return ()
    listed = value if isinstance(value, list) else [value]
    if len(listed) > MAX_STOPS:
        raise reader.fail(path, f"has {len(listed)} texts, but at most {MAX_STOPS} are allowed")
    stops = reader.texts(listed, path)
    if not all(stops):
        raise reader.fail(path, "contains an empty text, which would end every output; remove it")
    if sum(len(text.encode()) for text in stops) > MAX_STOP_BYTES:
        raise reader.fail(path, f"has more than {MAX_STOP_BYTES} bytes of text; shorten it")
    return stops


@dataclass(frozen=True)
class Generate(ModelCall, Over):
    """G: `{"g": {"model": "…", "input": …}}`. It gives the assistant's message; G¹ fills the cache for its input."""

    kind: ClassVar[str] = "g"

    @property
    def symbol(self) -> str:
        return "G¹" if self.call.max_tokens == 1 else "G"

    @classmethod
    def of(
        cls, *items: Query | str, model: str = DEFAULT_MODEL, max_tokens: int | None = MAX_TOKENS,
        temperature: float | None = TEMPERATURE, top_p: float | None = None, stop: Sequence[str] = (),
    ) -> Self:  # fmt: skip
        """What the model generates after the item, or a ⋈ of the items."""
        return cls(as_input(items), Call(model, max_tokens, temperature, top_p, tuple(stop)))

    @classmethod
    def read(cls, reader: QueryReader, value: Any, path: Path, depth: int) -> Self:
        value = reader.fields(value, path, ("model", "input"), CALL_FIELDS)
        call = Call.read(reader, value, path)
        return cls(read_input(reader, value["input"], (*path, "input"), depth), call)

    def to_data(self) -> dict[str, Any]:
        return {self.kind: {**self.call.to_data(), "input": self.input.to_data()}}

    @property
    def num_calls(self) -> int:
        return 1

    def options_below(self, options: Options) -> Options:
        return replace(options, call=self.call)

    @property
    def prepares(self) -> bool:
        """Whether it is a G¹ over texts: in a monad these are compiled, and nothing is generated."""
        return self.call.max_tokens == 1 and not has_calls(self.input)

    def run(self, run: RunningQuery, path: Path) -> QueryTask:
        return run.call(self, path)

    def reduce_by_tree(self, options: Options) -> Query | None:
        """A G over a + of many candidates becomes a tree of such G of at most `arity` candidates (§6, fig. 16).

        Candidates are the outputs of calls; every judge reads what else is in the +, as pages. Of a + without calls all
        children are candidates. Each judge draws its own: it has an origin of its own.
        """
        arity = options.arity
        if arity is None:
            return None
        parts = _parts(self.input)
        joins = [index for index, part in enumerate(parts) if isinstance(part, Plus)]
        at, *others = [index for index in joins if has_calls(parts[index])] or joins or [-1]
        if at < 0 or others:
            return None
        children = parts[at].outputs()
        calls = [child for child in children if has_calls(child)]
        candidates, pages = (calls, [child for child in children if not has_calls(child)]) if calls else (children, [])
        if len(candidates) <= arity:
            return None
        numbers = count()

        def judge(group: Sequence[Query], *number: int) -> Query:
            step: Path = ("judge", *number) if number else ()
            over: Query = Plus((*pages, *group))
            if isinstance(self.input, Seq | Cross):
                over = self.input.with_children([*parts[:at], over, *parts[at + 1 :]])
            return replace(self, input=over, origin=None if self.origin is None else self.origin + step)

        while len(candidates) > arity:
            groups = [candidates[start : start + arity] for start in range(0, len(candidates), arity)]
            candidates = [group[0] if len(group) == 1 else judge(group, next(numbers)) for group in groups]
        tree = judge(candidates)
        if sum(1 for _ in islice(nodes(tree), MAX_NODES + 1)) > MAX_NODES:
            raise InputError(
                f"reduced by judges of {arity}, the query has more than {MAX_NODES} nodes; judge more candidates at "
                "once"
            )
        return tree

    rules = (Rule("reduce by tree", reduce_by_tree, Effect.PROMPT),)


@dataclass(frozen=True)
class Chat(Generate):
    """C: `{"chat": {as "g"}}`, ours: chat completion, sugar for G over a ⋈ of its messages."""

    kind: ClassVar[str] = "chat"
    symbol: ClassVar[str] = "C"

    def desugar(self, options: Options) -> Query | None:
        """C → G(⋈ …) (Span queries fig. 7a)."""
        return Generate(Cross(_parts(self.input)), self.call, origin=self.origin)

    rules = (Rule("desugar C", desugar),)


def _parts(query: Query) -> tuple[Query, ...]:
    return query.parts if isinstance(query, Seq | Cross) else (query,)


@dataclass(frozen=True)
class Repeat(Over):
    """n outputs of one call: `{"repeat": {"n": n, "g": {…}}}`; leniently with `"query": {"g": {…}}`."""

    kind: ClassVar[str] = "repeat"
    key: ClassVar[str | None] = None
    input: Generate
    n: int

    @classmethod
    def of(cls, n: int, inner: Generate) -> Repeat:
        """n outputs of one call."""
        return cls(inner, n)

    @classmethod
    def read(cls, reader: QueryReader, value: Any, path: Path, depth: int) -> Repeat:
        inner = "query" if isinstance(value, Mapping) and "query" in value else "g"
        value = reader.fields(value, path, ("n", inner))
        n = reader.whole(value["n"], (*path, "n"), 0, MAX_REPEAT)
        if inner == "g":
            return cls(Generate.read(reader, value["g"], (*path, "g"), depth + 1), n)
        over = reader.query(value["query"], (*path, "query"), depth)
        if type(over) is not Generate:
            raise reader.fail((*path, "query"), "must be a g, the call to repeat")
        return cls(over, n)

    def to_data(self) -> dict[str, Any]:
        return {"repeat": {"n": self.n, **self.input.to_data()}}

    @property
    def num_calls(self) -> int:
        return self.n - 1

    def outputs(self) -> Sequence[Query]:
        """Of one whose input varies itself: each output's call would draw its input anew."""
        if self.input.input.varies:
            return (self,)
        origin = self.input.origin
        return [
            self.input if origin is None else replace(self.input, origin=(*origin, index)) for index in range(self.n)
        ]

    def run(self, run: RunningQuery, path: Path) -> QueryTask:
        """Its input is run once."""
        call, at = self.input, (*path, "repeat")
        over = call.input
        if self.n and not run.is_known(call):
            over = yield from run.evaluate(over, (*at, call.kind, "input"))
        tasks = (run.answer(call, (*at, index), over, index) for index in range(self.n))
        return Par(tuple((yield from run.side_by_side(tasks))))


@dataclass(frozen=True)
class Map(ModelCall):
    """One call for each of several users' messages: `{"map": {"metadata": {"model": "…"}, "inputs": ["…"]}}`."""

    kind: ClassVar[str] = "map"
    inputs: tuple[str, ...]

    @classmethod
    def of(
        cls, *texts: str, model: str = DEFAULT_MODEL, max_tokens: int | None = MAX_TOKENS,
        temperature: float | None = TEMPERATURE, top_p: float | None = None, stop: Sequence[str] = (),
    ) -> Map:  # fmt: skip
        """An output for each of several users' messages."""
        return cls(Call(model, max_tokens, temperature, top_p, tuple(stop)), texts)

    @classmethod
    def read(cls, reader: QueryReader, value: Any, path: Path, depth: int) -> Map:
        value = reader.fields(value, path, ("metadata", "inputs"))
        metadata = reader.fields(value["metadata"], (*path, "metadata"), ("model",), CALL_FIELDS)
        if not isinstance(value["inputs"], list):
            raise reader.fail((*path, "inputs"), f"must be a list of strings, not {shown_value(value['inputs'])}")
        reader.count(path, len(value["inputs"]))
        texts = reader.texts(value["inputs"], (*path, "inputs"))
        return cls(Call.read(reader, metadata, (*path, "metadata")), texts)

    def to_data(self) -> dict[str, Any]:
        return {"map": {"metadata": self.call.to_data(), "inputs": list(self.inputs)}}

    @property
    def texts(self) -> tuple[str, ...]:
        return self.inputs

    @property
    def num_calls(self) -> int:
        return len(self.inputs)

    def outputs(self) -> Sequence[Query]:
        return list(self.calls())

    def calls(self) -> Iterator[Generate]:
        """The call of each input."""
        for index, text in enumerate(self.inputs):
            origin = None if self.origin is None else (*self.origin, self.kind, index)
            yield Generate(Message("user", text), self.call, origin=origin)

    def run(self, run: RunningQuery, path: Path) -> QueryTask:
        tasks = (run.call(call, (*path, self.kind, index)) for index, call in enumerate(self.calls()))
        return Par(tuple((yield from run.side_by_side(tasks))))
