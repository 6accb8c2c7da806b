"""The nouns of docs/design.md §1 as frozen dataclasses, shared by every layer. Knows no torch and no files."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pictool.errors import InputError
from pictool.reading import real, whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    TokenIds = NDArray[np.int32]
    RowMask = NDArray[np.bool_]
else:  # numpy is not imported before numbers are needed: the screens of `pic tui` do without it
    TokenIds = RowMask = Any


Contexts = tuple[tuple[int, ...], ...]  # token ids that a chunk is computed after; of several the mean KV is kept
MAX_BEFORE = 1 << 14  # tokens of all contexts of a chunk
UNNAMED = -1  # in place of the token that an object of version 0.1.0 was computed after, which it does not name


@dataclass(frozen=True)
class KVPart:
    """One of the tensors that a layer keeps, `[heads, n, width]`, in the order in which it hands them to its cache.

    `rotated`: by RoPE, so it is kept before rotation, and rotated where it is linked. `unit` is what n counts: always
    a ``token`` so far.
    """

    name: str
    heads: int
    width: int
    rotated: bool
    unit: str = "token"

    def __str__(self) -> str:
        return f"{self.name} {self.heads} × {self.width}"


@dataclass(frozen=True)
class StateShape:
    """What each linear layer of a hybrid keeps of a chunk at a cut (docs/design.md §8).

    A tail `[channels, columns]` of inputs of its convolution in the model's dtype, and in float32 the state B
    `[heads, rows, width]` and the operator A `[heads, operator, operator]`: a matrix of `rows`, or one number. Without
    heads there is only the tail.
    """

    layers: int
    channels: int
    columns: int
    heads: int = 0
    rows: int = 0
    width: int = 0
    operator: int = 0

    @property
    def dims(self) -> dict[str, tuple[int, ...]]:
        """The dimensions of each tensor, by its name."""
        dims: dict[str, tuple[int, ...]] = {"tail": (self.channels, self.columns)}
        if self.heads:
            dims["operator"] = (self.heads, self.operator, self.operator)
            dims["state"] = (self.heads, self.rows, self.width)
        return dims

    def num_bytes(self, width: int, state_width: int = 4) -> int:
        """Bytes of all layers at one cut; a number of the tail has `width` bytes, of the rest `state_width`."""
        sizes = {name: math.prod(dims) for name, dims in self.dims.items()}
        return self.layers * (width * sizes.pop("tail") + state_width * sum(sizes.values()))


@dataclass(frozen=True)
class Geometry:
    """The shape of a model's KV. Every layer keeps the same parts, of which one is rotated.

    Standard attention keeps keys and values, each `[kv_heads, tokens, head_dim]`. `others` are the parts of a model
    that keeps something else, as latents; it has no `kv_heads` and `head_dim`. Of a hybrid `layers` are those with
    attention, and `states` is what its linear layers keep.
    """

    layers: int
    kv_heads: int = 0
    head_dim: int = 0
    others: tuple[KVPart, ...] = ()
    states: StateShape | None = None

    @property
    def parts(self) -> tuple[KVPart, ...]:
        """What a layer keeps of every token."""
        return self.others or standard_parts(self.kv_heads, self.head_dim)

    @property
    def width(self) -> int:
        """Numbers that a layer keeps of a token."""
        return sum(part.heads * part.width for part in self.parts)

    @property
    def fields(self) -> dict[str, Any]:
        """What tells it from others, as JSON has it."""
        states = {} if self.states is None else {"states": asdict(self.states)}
        if self.others:
            return {"layers": self.layers, "parts": [asdict(part) for part in self.others]} | states
        return {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim} | states

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Geometry:
        """The inverse of `fields`. Raises TypeError for others."""
        more = dict(fields)
        states = StateShape(**more.pop("states")) if "states" in more else None
        return cls(others=tuple(KVPart(**part) for part in more.pop("parts", ())), states=states, **more)


def standard_parts(kv_heads: int, head_dim: int) -> tuple[KVPart, ...]:
    """What standard attention keeps."""
    return KVPart("key", kv_heads, head_dim, True), KVPart("value", kv_heads, head_dim, False)


@dataclass(frozen=True)
class Target:
    """What an object is compiled for. Two objects can be in one prompt only if these are equal.

    `model` and `tokenizer` are fingerprints of content (hex), `dtype` the dtype of computation (``float32``, …).
    """

    architecture: str
    model: str
    tokenizer: str
    dtype: str
    geometry: Geometry

    def key(
        self, tokens: Sequence[int] | TokenIds, codec: str, salt: str = "", cut: int | None = None, after: Contexts = ()
    ) -> str:
        """The key of the object of `tokens`: sha256 over everything that determines its content, and the tenant's salt.

        `after` are the tokens that came before them. `cut` is that of a hybrid's object. No object holds the salt; who
        does not know it cannot compute the key.
        """
        return self.identify(tokens, codec, salt, cut, after).key

    def identify(
        self, tokens: Sequence[int] | TokenIds, codec: str, salt: str = "", cut: int | None = None, after: Contexts = ()
    ) -> Identity:
        """The key of the object of `tokens`, with what its header needs so that the key can be recomputed from it."""
        more = {"codec": codec, **contexts_fields(after)} | ({} if cut is None else {"cut": cut})
        return Identity.of(self._digest(more, tokens), salt)

    def identify_block(self, tokens: TokenIds, parent: str, rotation: str = "", salt: str = "") -> Identity:
        """The key of a block of a prefix chain, as `identify`; `parent` is that of the block before it, or empty."""
        return Identity.of(self._digest({"parent": parent, "rotation": rotation}, tokens), salt)

    def identify_blocks(self, tokens: TokenIds, block: int, rotation: str = "", salt: str = "") -> list[Identity]:
        """The keys of a prompt's whole blocks of `block` tokens, each over its parent's key, its token ids, and more.

        So equal keys mean equal beginnings (vLLM's block hashes, by sha256). `rotation` tells how positions are
        rotated, where that depends on the length of the prompt.
        """
        blocks: list[Identity] = []
        for start in range(0, len(tokens) - block + 1, block):
            parent = blocks[-1].key if blocks else ""
            blocks.append(self.identify_block(tokens[start : start + block], parent, rotation, salt))
        return blocks

    @cached_property
    def fields(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        named = {name: getattr(self, name) for name in ("architecture", "model", "tokenizer", "dtype")}
        return named | {"geometry": self.geometry.fields}

    def _digest(self, extra: Mapping[str, Any], tokens: Sequence[int] | TokenIds) -> str:
        """The hash of all that determines an object's content.

        In half precision RoPE's frequencies were half precision too, up to an early state of 0.2, and the KV another:
        `frequencies` keeps those objects from being linked.
        """
        import numpy as np

        more = {} if self.dtype == "float32" else {"frequencies": "float32"}
        named = {**self.fields, **extra, **more}
        digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode())
        digest.update(np.asarray(tokens, dtype="<i4").tobytes())
        return digest.hexdigest()


def contexts_fields(after: Contexts) -> dict[str, Any]:
    """How keys and headers have the tokens that a chunk was computed after.

    One token, repeated (EPIC §5.4), is `sinks` and `dummy`: so had all versions before 0.4 it.
    """
    tokens = after[0] if len(after) == 1 else ()
    if len(set(tokens)) == 1:
        return {"sinks": len(tokens)} | ({} if tokens[0] == UNNAMED else {"dummy": tokens[0]})
    return {"sinks": 0} | ({"after": [list(each) for each in after]} if after else {})


def parse_contexts(fields: Mapping[str, Any]) -> Contexts:
    """The inverse of `contexts_fields`. Raises ValueError for what it never returned, and for too many tokens."""
    sinks, dummy = fields["sinks"], fields.get("dummy", UNNAMED)
    after = tuple(map(tuple, fields.get("after", [[dummy] * min(sinks, MAX_BEFORE + 1)] * (sinks > 0))))
    tokens = [token for context in after for token in context]
    is_sound = all(type(token) is int and UNNAMED <= token < 1 << 31 for token in tokens)
    if not (is_sound and all(after)) or len(tokens) > MAX_BEFORE or contexts_fields(after) != fields:
        raise ValueError("its contexts are none")
    return after


@dataclass(frozen=True)
class Identity:
    """An object's key, and how the tenant's salt entered it.

    `salted` is the HMAC-SHA256 of the unsalted key under the salt; None without a salt. It is written to the object's
    header: so all can recompute the key from the object, but only who knows the salt can compute it from the text.
    """

    key: str
    salted: str | None = None

    @classmethod
    def of(cls, unsalted: str, salt: str) -> Identity:
        if not salt:
            return cls(unsalted)
        salted = hmac.new(salt.encode(errors="surrogatepass"), unsalted.encode(), hashlib.sha256).hexdigest()
        return cls(cls.combine(unsalted, salted), salted)

    @staticmethod
    def combine(unsalted: str, salted: str | None) -> str:
        """The key that follows from both."""
        return unsalted if salted is None else hashlib.sha256(f"{unsalted} {salted}".encode()).hexdigest()


@dataclass(frozen=True, order=True)
class PromptText:
    """A text that a template wrote: a special token that it names is a control token. A `str` in its place is the text
    of a user or a document, in which nothing is (`Model.encode`).

    Fields:
        literals: the characters [start, end) of special tokens' names that users or documents wrote, in order; they
            are text, too.
        begins: it begins a prompt whose template is the caller's: the tokenizer's BOS comes before it, unless it names
            that itself.
    """

    text: str
    literals: tuple[tuple[int, int], ...] = ()
    begins: bool = False

    def __str__(self) -> str:
        return self.text

    def __len__(self) -> int:
        return len(self.text)

    def __add__(self, other: PromptText) -> PromptText:
        size = len(self.text)
        moved = ((start + size, end + size) for start, end in other.literals)
        return PromptText(self.text + other.text, (*self.literals, *moved), self.begins)

    def cut(self, start: int, end: int | None = None) -> PromptText:
        """The characters [start, end) of it."""
        text = self.text[start:end]
        kept = ((max(0, first - start), min(last - start, len(text))) for first, last in self.literals)
        literals = tuple((first, last) for first, last in kept if first < last)
        return PromptText(text, literals, self.begins and start == 0)


@dataclass(frozen=True)
class Chunk:
    """An immutable run of tokens, compiled on its own. `source` says where it came from, for people.

    One that `continues` is cut from the same text as the chunk before it, which it follows without a separator.
    `before` are the last tokens of its text before it, if it is a piece of one.
    """

    text: str
    tokens: tuple[int, ...]
    source: str
    continues: bool = field(default=False, kw_only=True, compare=False, repr=False)
    before: tuple[int, ...] = field(default=(), kw_only=True, repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def ids(self) -> TokenIds:
        """Its tokens as int32 [n]; not to be written to."""
        import numpy as np

        return np.asarray(self.tokens, dtype=np.int32)

    @cached_property
    def keys(self) -> dict[Hashable, str]:
        """The keys of its objects that were computed before (`compile.object_key`)."""
        return {}


@dataclass(frozen=True)
class GeneratedChunk(Chunk):
    """A chunk that a model generated. `object` is the key of its generated object, which is linked if it can be.

    It is compiled as any chunk where the store does not have that object, or it lacks what is needed of it.
    """

    object: str


@dataclass(frozen=True)
class Separator(Chunk):
    """What a prompt has between two documents. It is computed: no object is made of it."""


@dataclass(frozen=True)
class Text:
    """A document in memory. A plain string instead names a file, an object or a key."""

    text: str
    source: str = "text"


@dataclass(frozen=True)
class CompileOptions:
    """How a chunk is compiled to an object; part of the object's key.

    Fields:
        codec: how to store the KV (`store.codecs`).
        cut: for a hybrid, the number of a chunk's tokens after which its states can be linked; None: the model's
            (`Model.cut_of`).
        after: the name of the context it is compiled after (`compiler/contexts.py`), or its tokens; their KV is
            dropped.
    """

    codec: str = "none"
    cut: int | None = None
    after: str | Contexts = "none"


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: temperature 0 is greedy. Stop strings end the answer and are not part of it.

    Only a server's requests have penalties and biases: a token's logit is lowered by `frequency_penalty` for each time
    that it is in the answer, and by `presence_penalty` if it is; `logit_bias` has tokens and what is added to theirs.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, convert in (("temperature", real), ("top_p", real), ("seed", whole)):
            try:
                object.__setattr__(self, name, convert(getattr(self, name)))
            except ValueError as error:
                raise InputError(f"{name.replace('_', '-')}: {error}") from error
        if self.temperature != 0 and not 1e-3 <= self.temperature <= 1e3:
            raise InputError(f"temperature {self.temperature}: must be 0 (greedy), or from 0.001 to 1000")
        if not 0 <= self.seed < 1 << 64:
            raise InputError(f"seed {self.seed}: must be from 0 to 2^64 - 1")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p {self.top_p}: must be above 0 and at most 1")
        if "" in self.stop:
            raise InputError("a stop string is empty")

    @property
    def options(self) -> dict[str, Any]:
        """The fields that a command has."""
        return {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed, "stop": self.stop}

    def require_tokens(self, vocabulary: int) -> None:
        """Raise InputError if a bias is of a token that a vocabulary of this size has not."""
        if self.logit_bias and (token := max(self.logit_bias)[0]) >= vocabulary:
            raise InputError(f"logit_bias: token id {token} must be from 0 to {vocabulary - 1}")


@dataclass(frozen=True)
class AnswerFormat:
    """What an answer's text is.

    Fields:
        keeps_special: the text of special tokens is a part of it, for a parser of calls; an end token's is not.
        schema: of JSON, as JSON; the answer is a value of it. None: it is any text.
        is_call: that value is a call of a tool, with `name` and `arguments`.
    """

    keeps_special: bool = False
    schema: str | None = None
    is_call: bool = False


@dataclass(frozen=True)
class Message:
    """One message of a chat, as chat templates take them. `role` is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


@dataclass(frozen=True)
class Layout:
    """Where the parts of a prompt are: `starts` are those of the head, each chunk and the tail."""

    tokens: TokenIds  # [n]
    starts: tuple[int, ...]  # [chunks + 2]

    @classmethod
    def of(
        cls, head: Sequence[int] | TokenIds, chunks: Sequence[Sequence[int] | TokenIds], tail: Sequence[int]
    ) -> Layout:
        """Concatenate head + chunks + tail (docs/design.md §2, rule 1)."""
        import numpy as np

        parts = [head, *chunks, tail]
        starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
        tokens = np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])
        return cls(tokens, tuple(int(start) for start in starts))

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_context(self) -> int:
        """N: tokens of head and chunks."""
        return self.starts[-1]

    @property
    def head(self) -> tuple[int, int]:
        """The head's `[start, end)`."""
        return 0, self.starts[1]

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """`[start, end)` of every chunk."""
        return tuple(zip(self.starts[1:-1], self.starts[2:], strict=True))

    @property
    def tail(self) -> tuple[int, int]:
        """The tail's `[start, end)`."""
        return self.starts[-1], self.num_tokens
