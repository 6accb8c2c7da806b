"""The header of an object file: what it says of an object, in canonical form. The grammar is in `format.py`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from blake3 import blake3

from pictool.core import FixupTable, Geometry, Target, TokenIds
from pictool.errors import ForeignObjectError
from pictool.store.codecs.base import Buffer as Buffer
from pictool.store.codecs.base import LayerShape

FORMAT, VERSION = "pictool.kvo", "1"
DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
_MAX_CHANNELS = 1 << 20  # of one token in one layer; what says more is no object


@dataclass(frozen=True)
class ObjectMeta:
    """What an object's header says of it. `fixups` is how its table was made; None if it has none.

    `parent` is set for a block of a prefix chain: the key of the block before it, "" for the first.
    """

    key: str
    target: Target
    num_tokens: int
    sinks: int
    codec: str
    fixups: str | None = None
    parent: str | None = None

    @property
    def shape(self) -> LayerShape:
        return LayerShape.of(self.target.geometry, self.num_tokens, self.target.dtype)

    def require(self, target: Target, name: str) -> None:
        """Refuse an object of another model, tokenizer, dtype or shape with a message that names both sides."""
        for field in ("architecture", "model", "tokenizer", "dtype", "geometry"):
            mine, wanted = getattr(self.target, field), getattr(target, field)
            if mine != wanted:
                raise ForeignObjectError(
                    f"{name}: made for {field} {_short(mine)}, but this link uses {field} {_short(wanted)}; "
                    "compile the text again with this model"
                )


@dataclass(frozen=True)
class CompiledChunk:
    """A chunk's KV in memory, ready to be written. `layers` holds (key, value) bytes in the target's dtype.

    `fixups` are the bytes of the table, float16 [n], if `meta` says that there is one.
    """

    meta: ObjectMeta
    text: str
    tokens: TokenIds
    layers: Sequence[tuple[Buffer, Buffer]]
    fixups: Buffer | None = None


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if re.fullmatch(r"[0-9a-f]{64}", text) else text


def token_bytes(tokens: Sequence[int] | TokenIds) -> bytes:
    """Token ids as int32."""
    import numpy as np

    return np.asarray(tokens, dtype="<i4").tobytes()


def tokens_of(data: Buffer) -> TokenIds:
    """int32 [n], from its bytes."""
    import numpy as np

    return np.frombuffer(data, dtype="<i4")


def table_of(data: Buffer) -> FixupTable:
    """float16 [n], from its bytes."""
    import numpy as np

    return np.frombuffer(data, dtype="<f2")


def checksum(*parts: Buffer) -> str:
    digest = blake3()  # one thread: parts are small, and many threads cost more than they give
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def canonical(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8)


def seal(header: Mapping[str, Any]) -> str:
    """The header's own checksum: over its canonical form with the field `header` empty."""
    return checksum(canonical({**header, "__metadata__": {**header["__metadata__"], "header": ""}}))


def is_sealed(raw: bytes, wanted: str) -> bool:
    """Whether the bytes of a header, if they are canonical, have the checksum that they hold; `seal` in one pass."""
    field = f'"header":{json.dumps(wanted)}'.encode()
    text = raw.rstrip(b" ").replace(field, b'"header":""')
    return raw.count(field) == 1 and checksum(text + b" " * (-len(text) % 8)) == wanted


@lru_cache(maxsize=1 << 12)
def layer_names(layer: int, codec: str) -> tuple[str, ...]:
    """The tensors of a layer: key and value, or the two coded as one."""
    parts = ("key", "value") if codec == "none" else ("kv",)
    return tuple(f"layers.{layer:03d}.{part}" for part in parts)


def tensor_entries(meta: ObjectMeta, text_bytes: int, coded: Sequence[int]) -> dict[str, dict[str, Any]]:
    """The header's entry of every tensor, in data order. `coded` are the bytes of the layers, if they are coded."""
    geometry = meta.target.geometry
    kv = (*DTYPES[meta.target.dtype], [geometry.kv_heads, meta.num_tokens, geometry.head_dim])
    shapes = {"tokens": ("I32", 4, [meta.num_tokens])}
    for layer in range(geometry.layers):
        entry = kv if meta.codec == "none" else ("U8", 1, [coded[layer]])
        shapes |= dict.fromkeys(layer_names(layer, meta.codec), entry)
    if meta.fixups is not None:
        shapes["fixups"] = ("F16", 2, [meta.num_tokens])
    entries, offset = {}, 0
    for name, (dtype, width, shape) in {**shapes, "text": ("U8", 1, [text_bytes])}.items():
        end = offset + width * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    return entries


def metadata_of(meta: ObjectMeta, checksums: Mapping[str, Any]) -> dict[str, str]:
    target, geometry = meta.target, meta.target.geometry
    values = {
        "format": FORMAT, "version": VERSION, "key": meta.key, "architecture": target.architecture,
        "model": target.model, "tokenizer": target.tokenizer, "dtype": target.dtype, "layers": geometry.layers,
        "kv_heads": geometry.kv_heads, "head_dim": geometry.head_dim, "tokens": meta.num_tokens,
        "sinks": meta.sinks, "codec": meta.codec, "checksums": json.dumps(checksums, sort_keys=True),
    }  # fmt: skip
    values |= {name: value for name in ("fixups", "parent") if (value := getattr(meta, name)) is not None}
    return {name: str(value) for name, value in values.items()}


def meta_of(fields: Mapping[str, str]) -> ObjectMeta:
    """The inverse of `_metadata`, less the checksums."""
    geometry = Geometry(int(fields["layers"]), int(fields["kv_heads"]), int(fields["head_dim"]))
    target = Target(fields["architecture"], fields["model"], fields["tokenizer"], fields["dtype"], geometry)
    sinks, optional = int(fields["sinks"]), (fields.get("fixups"), fields.get("parent"))
    return ObjectMeta(fields["key"], target, int(fields["tokens"]), sinks, fields["codec"], *optional)


def is_sound(meta: ObjectMeta, checksums: Mapping[str, Any], num_tensors: int) -> bool:
    """Whether the numbers can be those of an object with so many tensors, and every part has a checksum."""
    geometry = meta.target.geometry
    counts = (geometry.layers, geometry.kv_heads, geometry.head_dim, meta.num_tokens, meta.sinks + 1)
    optional = {"fixups"} if meta.fixups is not None else set()
    if not all(0 < count < 1 << 31 for count in counts) or geometry.kv_heads * geometry.head_dim > _MAX_CHANNELS:
        return False
    if num_tensors != geometry.layers * len(layer_names(0, meta.codec)) + 2 + len(optional):
        return False
    layers = checksums["layers"]
    has_layers = isinstance(layers, list) and len(layers) == geometry.layers
    return has_layers and set(checksums) == {"layers", "text", "tokens"} | optional
