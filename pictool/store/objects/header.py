"""The header of an object: what it says, the only bytes that say so, and the strict reading of bytes that anyone wrote.

`Header.parse` is the one place where an object's header is read. It returns a header that this module would have
written, byte for byte, or raises `HeaderError`; so nothing else has to expect odd types, numbers or names. The grammar
is at the top of `format.py`.

Every size of an object follows from its header: tokens and geometry give those of the decoded layers, and the limits
here bound them. So a reader knows what it will take before it allocates anything.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, cast

from blake3 import blake3

from pictool.core import (
    MAX_BEFORE,
    UNNAMED,
    CompileOptions,
    Contexts,
    Geometry,
    Identity,
    KVPart,
    StateShape,
    Target,
    TokenIds,
    contexts_fields,
    parse_contexts,
)
from pictool.errors import ForeignObjectError
from pictool.store.codecs import codecs
from pictool.store.codecs.base import Buffer, LayerShape

FORMAT, VERSION = "pictool.kvo", "1"
DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
# No model comes near these. A header that states more is not an object's.
MAX_HEADER = 1 << 20  # bytes
MAX_TOKENS = 1 << 24
MAX_TEXT = 1 << 26  # bytes
_MAX_LAYERS = 1 << 10
_MAX_CHANNELS = 1 << 16  # kv_heads · head_dim
_MAX_STATE = 1 << 26  # numbers of one of a linear layer's tensors
_MAX_NAME = 256  # characters
# KV takes a quarter of its bytes, or so, under the codec that keeps least. Layers that take far less are bombs.
_MAX_RATIO, _SMALL_LAYER = 128, 4 << 20
_OF_SOME = ("cut", "fixups", "parent", "rotation", "salted")  # fields that not every object has
_OPTIONAL = ("after", "dummy", *_OF_SOME)
_KEY = re.compile("[0-9a-f]{64}")
_PART = re.compile("(?!kv$)[a-z][a-z0-9_]{0,31}")
_DIGITS = re.compile("0|[1-9][0-9]{0,9}")
_DAMAGED = "; the object is damaged; delete it, or compile it again (pic compile --force)"
_NOT_OURS = f"the header is not that of an object{_DAMAGED}"


class HeaderError(ValueError):
    """Bytes that are not the header of an object, and why; becomes an `ObjectError` that names the file."""


class ForeignHeaderError(HeaderError):
    """The header of an object of another format version, codec or dtype."""


@dataclass(frozen=True)
class ObjectMeta:
    """What an object's header says of it.

    `parent` is set for a block of a prefix chain: the key of the block before it, "" for the first. `after` are the
    tokens that the chunk was computed after. `rotation` (of a block), `salted` (of an object with a salt) and `cut` (of
    a hybrid's) are what else entered the key. `fixups` says that it has a table of version 0.3, which nothing reads.
    """

    key: str
    target: Target
    num_tokens: int
    codec: str
    fixups: str | None = None
    parent: str | None = None
    rotation: str | None = None
    salted: str | None = None
    cut: int | None = None
    after: Contexts = ()

    @property
    def options(self) -> CompileOptions:
        """How it was compiled."""
        return CompileOptions(self.codec, cut=self.cut, after=self.after)

    @property
    def num_before(self) -> int:
        """Tokens that came before the chunk when it was compiled, of the longest context."""
        return max(map(len, self.after), default=0)

    @property
    def has_states(self) -> bool:
        """Whether its linear layers' states can be linked: the chunk goes on after the cut, or is a chain's block."""
        return bool(self.state_dims)

    @property
    def state_dims(self) -> dict[str, tuple[int, ...]]:
        """The dimensions of each tensor that it has of a linear layer, by name; none if it has no states.

        A block of a chain has the state at its end, and no operator.
        """
        states, is_block = self.target.geometry.states, self.parent is not None
        if states is None or not (is_block or (self.cut is not None and self.cut < self.num_tokens)):
            return {}
        return {name: dims for name, dims in states.dims.items() if not (is_block and name == "operator")}

    def state_dtype(self, name: str) -> str:
        """The dtype of one of the tensors of `state_dims`."""
        return self.target.dtype if name == "tail" else codecs()[self.codec].state_dtype

    @property
    def shape(self) -> LayerShape:
        return LayerShape.of(self.target.geometry, self.num_tokens, self.target.dtype)

    def key_of(self, tokens: Sequence[int] | TokenIds, salt: str = "") -> str:
        """The key of an object of these tokens, compiled as this one was, under a salt. Not of a block of a chain."""
        return self.target.key(tokens, self.codec, salt, self.cut, self.after)

    def own_key(self, tokens: TokenIds) -> str:
        """The key that an object with this header and these tokens has. Another `key` in it is a forgery."""
        if self.parent is None:
            unsalted = self.key_of(tokens)
        else:
            unsalted = self.target.identify_block(tokens, self.parent, self.rotation or "").key
        return Identity.combine(unsalted, self.salted)

    def require(self, target: Target, name: str) -> None:
        """Refuse an object of another model, tokenizer, dtype or shape with a message that names both sides.

        Raises:
            ForeignObjectError: `name` says which object in the message.
        """
        for field in ("architecture", "model", "tokenizer", "dtype", "geometry"):
            own, expected = getattr(self.target, field), getattr(target, field)
            if own != expected:
                raise ForeignObjectError(
                    f"{name}: made for {field} {_short(own)}, but this link uses {field} {_short(expected)}; "
                    "compile the text again with this model"
                )

    def require_known_context(self, name: str) -> None:
        """Refuse an object that does not name the tokens that it was compiled after.

        Raises:
            ForeignObjectError: `name` says which object in the message.
        """
        if any(UNNAMED in context for context in self.after):
            raise ForeignObjectError(f"{name}: compiled after tokens that it does not record; compile the text again")


@dataclass(frozen=True)
class Header:
    """A whole header. `text_bytes` and, if layers are coded, `coded_bytes` of each are sizes of tensors in the file."""

    meta: ObjectMeta
    checksums: Mapping[str, Any]
    text_bytes: int
    coded_bytes: tuple[int, ...] = ()

    @staticmethod
    @lru_cache(maxsize=512)  # the same objects are opened for one request after the other
    def parse(raw: bytes) -> Header:
        """The header that `raw` encodes.

        Raises:
            HeaderError: any other bytes. ForeignHeaderError, if they may be a header for another version of pic.
        """
        fields, tensors = _read(raw)
        meta, checksums = meta_of(fields), _checksums_of(fields.get("checksums"))
        _require_parts(meta, checksums, len(tensors))
        coded = () if meta.codec == "none" else tuple(_coded_size(meta, tensors, layer) for layer in _layers(meta))
        header = Header(meta, checksums, _size_of(tensors, "text", MAX_TEXT, least=0), coded)
        if raw != header.encode():
            raise HeaderError(_NOT_OURS)
        return header

    def encode(self) -> bytes:
        """Its bytes."""
        metadata = metadata_of(self.meta, self.checksums) | {"header": ""}
        text = _dumped({"__metadata__": metadata} | self.entries)
        own_seal = checksum(_padded(text))  # as `seal`, which writes all of it again
        return _padded(text.replace(b'"header":""', f'"header":"{own_seal}"'.encode()))

    @cached_property
    def entries(self) -> dict[str, dict[str, Any]]:
        """The entry of every tensor, in the order of the data."""
        return tensor_entries(self.meta, self.text_bytes, self.coded_bytes)

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors: what follows the header in the file."""
        return int(self.entries["text"]["data_offsets"][1])

    def names(self, layer: int) -> tuple[str, ...]:
        """The tensors of a layer."""
        return layer_names(layer, self.meta)

    def span(self, *tensors: str) -> tuple[int, int]:
        """[start, end) of adjacent tensors in the data."""
        return self.entries[tensors[0]]["data_offsets"][0], self.entries[tensors[-1]]["data_offsets"][1]


def header_bytes(first: bytes) -> int:
    """The bytes that the length (8 bytes) and the header take, of an object that begins with `first`.

    Raises:
        HeaderError: not the beginning of an object.
    """
    length = int.from_bytes(first[:8], "little")
    if len(first) < 8 or length > MAX_HEADER:
        raise HeaderError("not an object, or its header is damaged")
    return 8 + length


def stated_size(first: bytes) -> int:
    """The bytes of a whole object, as its header says it. `first` has all of the header.

    Raises:
        HeaderError: not an object's header.
    """
    length = header_bytes(first)
    return length + Header.parse(first[8:length]).data_bytes


def checksum(*parts: Buffer) -> str:
    """BLAKE3 of the parts, one after the other, in hex."""
    digest = blake3()  # one thread: parts are small, and many threads cost more than they give
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def canonical(header: Mapping[str, Any]) -> bytes:
    """The only bytes in which a header is accepted."""
    return _padded(_dumped(header))


def _dumped(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _padded(text: bytes) -> bytes:
    return text + b" " * (-len(text) % 8)


def seal(header: Mapping[str, Any]) -> str:
    """The header's own checksum: over its canonical form with the field `header` empty."""
    return checksum(canonical({**header, "__metadata__": {**header["__metadata__"], "header": ""}}))


def metadata_of(meta: ObjectMeta, checksums: Mapping[str, Any]) -> dict[str, str]:
    """The header's metadata, but for its own checksum."""
    target, geometry = meta.target, meta.target.geometry
    values = {
        "format": FORMAT, "version": VERSION, "key": meta.key, "architecture": target.architecture,
        "model": target.model, "tokenizer": target.tokenizer, "dtype": target.dtype, "tokens": meta.num_tokens,
        "codec": meta.codec, "checksums": json.dumps(checksums, sort_keys=True), **contexts_fields(meta.after),
    }  # fmt: skip
    values |= {
        name: json.dumps(value, sort_keys=True) if name in ("parts", "states") else value
        for name, value in geometry.fields.items()
    }
    values |= {name: value for name in _OF_SOME if (value := getattr(meta, name)) is not None}
    if "after" in values:
        values["after"] = json.dumps(values["after"])
    return {name: str(value) for name, value in values.items()}


def meta_of(fields: Mapping[str, Any]) -> ObjectMeta:
    """The inverse of `metadata_of`, less the checksums. Raises HeaderError for what it never returned."""
    key, num_tokens = _key_in(fields, "key"), _count(fields, "tokens", MAX_TOKENS)
    fixups = _name(fields, "fixups") if "fixups" in fields else None
    parent = _key_in(fields, "parent", allow_empty=True) if "parent" in fields else None
    rotation, salted = (_key_in(fields, name) if name in fields else None for name in ("rotation", "salted"))
    cut, target = _count(fields, "cut", MAX_TOKENS, 0) if "cut" in fields else None, _target_of(fields)
    after, has_cut = _contexts_of(fields), target.geometry.states is not None and parent is None
    if (cut is not None) != has_cut or (after and (parent is not None or has_cut)):
        raise HeaderError(_NOT_OURS)
    return ObjectMeta(
        key, target, num_tokens, _one_of(fields, "codec", codecs()), fixups, parent, rotation, salted, cut, after
    )


def _contexts_of(fields: Mapping[str, Any]) -> Contexts:
    """The tokens that a chunk was computed after."""
    known: dict[str, Any] = {"sinks": _count(fields, "sinks", MAX_BEFORE, 0)}
    if "dummy" in fields:
        known["dummy"] = _count(fields, "dummy", 1 << 31, 0)
    try:
        if "after" in fields:
            known["after"] = json.loads(fields["after"])
        return parse_contexts(known)
    except (ValueError, TypeError, RecursionError) as error:
        raise HeaderError(_NOT_OURS) from error


def _target_of(fields: Mapping[str, Any]) -> Target:
    layers = _count(fields, "layers", _MAX_LAYERS)
    if "parts" in fields:
        geometry = Geometry(layers, others=_parts_of(fields["parts"]))
    else:
        kv_heads = _count(fields, "kv_heads", _MAX_CHANNELS)
        geometry = Geometry(layers, kv_heads, _count(fields, "head_dim", _MAX_CHANNELS // kv_heads))
    if "states" in fields:
        geometry = replace(geometry, states=_states_of(fields["states"]))
    architecture, model, tokenizer = (_name(fields, name) for name in ("architecture", "model", "tokenizer"))
    return Target(architecture, model, tokenizer, _one_of(fields, "dtype", DTYPES), geometry)


def _states_of(text: str) -> StateShape:
    """What the linear layers of a hybrid keep, within limits."""
    try:
        states = StateShape(**json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise HeaderError(_NOT_OURS) from error
    sizes = astuple(states)
    is_sound = (
        all(type(size) is int and 0 <= size <= _MAX_CHANNELS for size in sizes)
        and min(states.layers, states.channels, states.columns) >= 1
        and states.layers <= _MAX_LAYERS
        and all(math.prod(dims) <= _MAX_STATE for dims in states.dims.values())
        and (all(sizes[3:]) and states.operator in (1, states.rows) if states.heads else not any(sizes[3:]))
    )
    if not is_sound:
        raise HeaderError(_NOT_OURS)
    return states


def _parts_of(text: str) -> tuple[KVPart, ...]:
    """The parts of a model that keeps something else than keys and values: two, of which one is rotated."""
    try:
        parts = tuple(KVPart(**part) for part in json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise HeaderError(_NOT_OURS) from error
    sizes = [size for part in parts for size in (part.heads, part.width)]
    is_sound = (
        len(parts) == 2
        and all(type(size) is int and 1 <= size <= _MAX_CHANNELS for size in sizes)
        and sum(part.heads * part.width for part in parts) <= _MAX_CHANNELS
        and all(isinstance(part.name, str) and _PART.fullmatch(part.name) and part.unit == "token" for part in parts)
        and [part.rotated for part in parts].count(True) == [part.rotated for part in parts].count(False) == 1
        and all(type(part.rotated) is bool for part in parts)
        and parts[0].name != parts[1].name
    )
    if not is_sound:
        raise HeaderError(_NOT_OURS)
    return parts


def tensor_entries(meta: ObjectMeta, text_bytes: int, coded_bytes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """The header's entry of every tensor, in data order. `coded_bytes` are those of each layer, if layers are coded."""
    dtype, parts = DTYPES[meta.target.dtype], meta.shape.part_dims
    shapes = {"tokens": ("I32", 4, [meta.num_tokens])}
    for layer in range(meta.target.geometry.layers):
        entries = [(*dtype, [*dims]) for dims in parts] if meta.codec == "none" else [("U8", 1, [coded_bytes[layer]])]
        shapes |= zip(layer_names(layer, meta), entries, strict=True)
    if meta.has_states and (states := meta.target.geometry.states) is not None:
        kinds = [(*DTYPES[meta.state_dtype(name)], [*dims]) for name, dims in meta.state_dims.items()]
        for layer in range(states.layers):
            shapes |= zip(state_names(layer, meta), kinds, strict=True)
    if meta.fixups is not None:
        shapes["fixups"] = ("F16", 2, [meta.num_tokens])
    tensors, offset = dict[str, dict[str, Any]](), 0
    for name, (kind, width, shape) in {**shapes, "text": ("U8", 1, [text_bytes])}.items():
        end = offset + width * math.prod(shape)
        tensors[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    return tensors


def layer_names(layer: int, meta: ObjectMeta) -> tuple[str, ...]:
    """The tensors of a layer: key and value (or other parts), or the two coded as one."""
    return _names(layer, tuple(part.name for part in meta.target.geometry.parts) if meta.codec == "none" else ("kv",))


def state_names(layer: int, meta: ObjectMeta) -> tuple[str, ...]:
    """The tensors of a linear layer, counted among the linear ones."""
    return tuple(f"states.{layer:03d}.{name}" for name in meta.state_dims)


@lru_cache(maxsize=1 << 12)
def _names(layer: int, parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"layers.{layer:03d}.{part}" for part in parts)


def is_codable(shape: LayerShape, coded_bytes: int) -> bool:
    """Whether a layer of this shape can be so small when it is coded; an object with smaller ones is refused."""
    return coded_bytes > 0 and shape.num_bytes <= max(_SMALL_LAYER, _MAX_RATIO * coded_bytes)


# Strict reading


def _read(raw: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """The metadata and the tensors in a header whose checksum holds; all else about them is still to be checked."""
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError, MemoryError) as error:
        raise HeaderError("not an object file, or its header is damaged") from error
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or "format" not in metadata:
        raise HeaderError("not an object file, or its header is damaged")
    if metadata["format"] != FORMAT:
        raise HeaderError(f"not an object file (its format is {_quoted(metadata['format'])})")
    if metadata.get("version") != VERSION:
        theirs = f"format version {_quoted(metadata.get('version'), str)}"
        raise ForeignHeaderError(f"{theirs}, but this pic reads version {VERSION}; compile it again")
    if not _is_sealed(raw, metadata.get("header")):
        raise HeaderError(f"the header does not match its checksum{_DAMAGED}")
    for field, known in (("codec", tuple(codecs())), ("dtype", tuple(DTYPES))):
        if metadata.get(field) not in (None, *known):
            raise ForeignHeaderError(f"{field} {_quoted(metadata[field])}, but this pic knows {', '.join(known)}")
    return metadata, header


def _is_sealed(raw: bytes, own_seal: object) -> bool:
    """Whether the bytes of a header, if they are canonical, have the checksum that they hold; `seal` in one pass."""
    if not isinstance(own_seal, str) or not _KEY.fullmatch(own_seal):
        return False
    field = f'"header":"{own_seal}"'.encode()
    text = raw.rstrip(b" ").replace(field, b'"header":""')
    return raw.count(field) == 1 and checksum(_padded(text)) == own_seal


def _name(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > _MAX_NAME or not value.isprintable():
        raise HeaderError(_NOT_OURS)
    return value


def _one_of(fields: Mapping[str, Any], name: str, known: Collection[str]) -> str:
    if (value := _name(fields, name)) not in known:
        raise HeaderError(_NOT_OURS)
    return value


def _key_in(fields: Mapping[str, Any], name: str, allow_empty: bool = False) -> str:
    value = _name(fields, name)
    if not _KEY.fullmatch(value) and not (allow_empty and not value):
        raise HeaderError(_NOT_OURS)
    return value


def _count(fields: Mapping[str, Any], name: str, most: int, least: int = 1) -> int:
    value = fields.get(name)
    if not isinstance(value, str) or not _DIGITS.fullmatch(value) or not least <= int(value) <= most:
        raise HeaderError(_NOT_OURS)
    return int(value)


def _checksums_of(text: object) -> dict[str, Any]:
    """The checksums of the parts, each of them one."""
    try:
        checksums = json.loads(cast("str", text))
        lists = [list(checksums[name]) for name in ("layers", "states") if name in checksums or name == "layers"]
        hashes = [checksums[name] for name in checksums if name not in ("layers", "states")] + sum(lists, [])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise HeaderError(_NOT_OURS) from error
    if not isinstance(checksums, dict) or not all(
        isinstance(checksums.get(name, []), list) for name in ("layers", "states")
    ):
        raise HeaderError(_NOT_OURS)
    if not all(isinstance(value, str) and _KEY.fullmatch(value) for value in hashes):
        raise HeaderError(_NOT_OURS)
    return checksums


def _require_parts(meta: ObjectMeta, checksums: Mapping[str, Any], num_tensors: int) -> None:
    """There are as many tensors and checksums as the metadata implies."""
    optional, geometry = {"fixups"} if meta.fixups is not None else set(), meta.target.geometry
    expected = geometry.layers * len(layer_names(0, meta)) + 2 + len(optional)
    counts, parts = {"layers": geometry.layers}, {"layers", "text", "tokens"} | optional
    if meta.has_states and geometry.states is not None:
        counts["states"] = geometry.states.layers
        expected += geometry.states.layers * len(meta.state_dims)
    if (set(checksums), num_tensors) != (parts | counts.keys(), expected) or any(
        len(checksums[name]) != count for name, count in counts.items()
    ):
        raise HeaderError(_NOT_OURS)


def _layers(meta: ObjectMeta) -> range:
    return range(meta.target.geometry.layers)


def _coded_size(meta: ObjectMeta, tensors: Mapping[str, Any], layer: int) -> int:
    """The bytes of a coded layer; decoding tells whether its parts have the sizes that the metadata implies."""
    size = _size_of(tensors, layer_names(layer, meta)[0], 1 << 62)
    if not is_codable(meta.shape, size):
        raise HeaderError(f"layer {layer} is too short for its header{_DAMAGED}")
    return size


def _size_of(tensors: Mapping[str, Any], name: str, most: int, least: int = 1) -> int:
    """The stated length of a tensor of bytes."""
    entry = tensors.get(name)
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int or not least <= shape[0] <= most:
        raise HeaderError(_NOT_OURS)
    return shape[0]


def _quoted(value: object, show: Callable[[object], str] = repr) -> str:
    """A value of a header of which nothing is known, in one short line."""
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    text = (show if value.isprintable() else repr)(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if _KEY.fullmatch(text) else text
