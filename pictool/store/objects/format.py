"""The object file, `.kvo`: one valid safetensors file per compiled chunk, written and read.

    file     := header-length(u64, little endian) header data
    header   := canonical JSON (sorted keys, no spaces, UTF-8 as it is), padded with spaces to a multiple of 8
                {"__metadata__": metadata, tensor-name: {"data_offsets": [a, b], "dtype": …, "shape": […]}, …}
    data     := tokens key0 value0 key1 value1 … [states] [fixups] text (no gaps; kv0 kv1 … if coded; or other parts)

    tokens           I32         [n]                        token ids of the chunk alone
    layers.LLL.key   F32|BF16|F16 [kv_heads, n, head_dim]   keys before rotation (no position in them)
    layers.LLL.value F32|BF16|F16 [kv_heads, n, head_dim]
    layers.LLL.NAME  F32|BF16|F16 [heads, n, width]         instead of the two, each of `parts`, if there are
    layers.LLL.kv    U8         [bytes]                     instead of the two, if the codec is not "none" (codecs/)
    states.LLL.tail  F32|BF16|F16 [channels, columns]       only of a hybrid whose chunk is longer than `cut`, of each
    states.LLL.operator  F32|BF16 [heads, …, …]             linear layer (`StateShape`); the last two only if it has a
    states.LLL.state F32|BF16    [heads, rows, width]       recurrent state; BF16 if the codec says so. A block of a
                                                            chain has them at its end, and no operator
    fixups           F16         [n]                        only in some objects of version 0.3: a table; not used
    text             U8          [bytes]                    the source text, UTF-8

    metadata (strings only):
    format      "pictool.kvo"
    version     "1"
    key         sha256 of what determines the content, see below
    architecture, model, tokenizer, dtype, layers, kv_heads, head_dim      the target
    parts       only of a model that keeps something else than keys and values, as latents; in place of kv_heads and
                head_dim: spaced JSON [{"heads", "name", "rotated", "unit": "token", "width"}, …]. The rotated one is
                kept before rotation
    states      only of a hybrid: what its linear layers keep, spaced JSON of `StateShape`; `layers` has attention
    cut         only of a hybrid's chunk: after how many tokens its states can be linked
    tokens      the number of tokens
    sinks       the number of dummy tokens before the chunk when it was compiled
    dummy       the id of the token that was repeated so often; only with sinks (not in objects of version 0.1.0)
    after       only of a chunk that was computed after other tokens: [[id, …], …], spaced JSON. Their KV is dropped;
                after several the mean is kept
    codec       how KV is coded
    fixups      how the table was made ("self-8x60-3"); only if there is one, of version 0.3
    parent      only of a block of a prefix chain: the key of the block before it, "" for the first (`chains.py`)
    rotation    only of such a block, and only where rotation depends on the prompt's length: how it was rotated
    salted      only of an object with a salt: how the salt entered the key (`Identity`)
    checksums   spaced JSON: {"fixups"?: h, "layers": [h of key||value or kv, …], "states"?: [h of a linear layer's
                tensors, …], "text": h, "tokens": h}
    header      checksum of the header itself, its padding included, written with this field empty

Every checksum h is BLAKE3 (256 bit, hex). Spaced JSON has sorted keys, a space after each comma and colon, and escapes
for what is not ASCII. The key is sha256 (hex) of this spaced JSON, with numbers as numbers, and the bytes of `tokens`:

    {"after"?: …, "architecture": …, "codec": …, "cut"?: …, "dtype": …, "dummy"?: …,
     "frequencies"?: "float32" unless that is the dtype,
     "geometry": {"head_dim": …, "kv_heads": …, "layers": …} or {"layers": …, "parts": […]}, each with "states"?: …,
     "model": …, "sinks": …, "tokenizer": …}

with `parent` and `rotation` ("" if there is none) in place of `codec`, `dummy` and `sinks` for a block of a chain. With
a salt the key is sha256 of that hash, a space and `salted`.

The header is accepted only in its canonical form, so that no bit of the
file is outside a checksum. A reader checks the header when it opens a file (`header.py`), and each part before it
returns it. Sizes are what the header implies, within its limits, before anything is read to memory or decoded.
"""

from __future__ import annotations

import math
import os
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from pictool.core import TokenIds
from pictool.errors import ForeignObjectError, InputError, ObjectError, UnreadableObjectError
from pictool.reading import FileState, NotRegularError, open_regular
from pictool.store.codecs import codecs
from pictool.store.codecs.base import Buffer as Buffer
from pictool.store.codecs.base import CodingError, LayerShape
from pictool.store.files import advise_in_order
from pictool.store.objects.header import DTYPES as DTYPES
from pictool.store.objects.header import (
    MAX_HEADER,
    MAX_TEXT,
    ForeignHeaderError,
    Header,
    HeaderError,
    header_bytes,
    is_codable,
    state_names,
)
from pictool.store.objects.header import ObjectMeta as ObjectMeta
from pictool.store.objects.header import canonical as canonical
from pictool.store.objects.header import checksum as checksum
from pictool.store.objects.header import metadata_of as metadata_of
from pictool.store.objects.header import seal as seal
from pictool.store.objects.header import tensor_entries as tensor_entries

_DAMAGED = "the object is damaged; delete it, or compile it again (pic compile --force)"
_PIECE = 1 << 20  # bytes that are read at once where nothing of them is kept
_EXPONENTS = {"float32": ("<u4", 0x7F800000), "bfloat16": ("<u2", 0x7F80), "float16": ("<u2", 0x7C00)}  # of inf and nan


@dataclass(frozen=True)
class CompiledChunk:
    """A chunk's KV in memory, ready to be written. `layers` holds the bytes of the parts, in the target's dtype.

    `states` are the bytes of each linear layer's tensors, if it has states.
    """

    meta: ObjectMeta
    text: str
    tokens: TokenIds
    layers: Sequence[tuple[Buffer, ...]]
    states: Sequence[tuple[Buffer, ...]] = ()


@dataclass(frozen=True)
class EncodedObject:
    """The file of an object in memory: its `parts`, one after the other; one part, if it is small."""

    meta: ObjectMeta
    parts: tuple[Buffer, ...]

    @cached_property
    def num_bytes(self) -> int:
        return sum(map(len, self.parts))

    def header(self) -> bytes:
        """As `ObjectFile.header`."""
        return self.read(0, header_bytes(self.read(0, 8)))

    def read(self, start: int, end: int) -> bytes:
        """Bytes [start, end) of the file, fewer where it ends."""
        if (start, end) == (0, self.num_bytes):
            return bytes(self.parts[0]) if len(self.parts) == 1 else b"".join(self.parts)
        found, offset = list[memoryview](), 0
        for part in self.parts:
            found.append(memoryview(part)[max(0, start - offset) : max(0, end - offset)])
            offset += len(part)
        return b"".join(found)


def encode_object(chunk: CompiledChunk) -> EncodedObject:
    """The file of a chunk's object; the same chunk gives the same bytes.

    Raises:
        InputError: KV that its codec cannot keep, or a text that is too long for an object.
    """
    import numpy as np

    text, tokens = chunk.text.encode(), np.asarray(chunk.tokens, dtype="<i4").tobytes()
    if len(text) > MAX_TEXT:
        raise InputError(
            f"{chunk.text[:40]!r}: {len(text):,d} bytes of text, but an object may have at most {MAX_TEXT:,d}"
        )
    layers = _coded_layers(chunk)
    checksums = {"layers": [checksum(*parts) for parts in layers], "text": checksum(text), "tokens": checksum(tokens)}
    checksums |= {"states": [checksum(*parts) for parts in chunk.states]} if chunk.states else {}
    coded = () if chunk.meta.codec == "none" else tuple(len(part) for (part,) in layers)
    header = Header(chunk.meta, checksums, len(text), coded)
    data = [tokens, *(part for parts in (*layers, *chunk.states) for part in parts), text]
    assert [len(part) for part in data] == [end - start for start, end in map(header.span, header.entries)]
    raw = header.encode()
    parts: tuple[Buffer, ...] = (struct.pack("<Q", len(raw)) + raw, *data)
    is_small = 8 + len(raw) + header.data_bytes <= _PIECE
    return EncodedObject(chunk.meta, (b"".join(parts),) if is_small else parts)


def write_object(file: BinaryIO, chunk: CompiledChunk) -> EncodedObject:
    """Write one object, which is returned. Raises as `encode_object`."""
    encoded = encode_object(chunk)
    file.writelines(encoded.parts)
    return encoded


class ObjectFile:
    """An open object. The header is checked; every part is checked before it is returned. A context manager.

    Attributes:
        stays_open: it is used again (`store/opened.py`): closing it does nothing, and it is closed once nobody has it.
            What was checked of it is not checked again.

    Raises:
        ObjectError: not an object, damaged or truncated.
        ForeignObjectError: another format version or an unknown codec.
    """

    def __init__(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        self.path, self.name = Path(path), name or str(Path(path))  # messages call it by its name
        self._fd, self.stays_open, self._checked = -1, False, set[str]()
        try:
            self._fd = open_regular(self.path)
        except NotRegularError as error:
            raise self._fail(f"not an object file ({error.strerror})") from error
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise UnreadableObjectError(f"{self.name}: cannot be opened ({why})") from error
        self._closing = weakref.finalize(self, os.close, self._fd)
        advise_in_order(self._fd)
        try:
            self._state = FileState.of(os.fstat(self._fd))
            self._is_sure = self._state.is_settled  # whether a change of the file shows in its state
            self.num_bytes = self._state.size
            self._header, self._data_start = self._read_header()
            self.meta = self._header.meta
        except BaseException:
            self._closing()
            raise

    def __enter__(self) -> ObjectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self.stays_open:
            self._closing()
            self._fd = -1

    def fileno(self) -> int:
        """Its descriptor, positioned at the beginning of the file: all reads here name their offset."""
        return self._fd

    def header(self) -> bytes:
        """The bytes of the header, with its length; equal ones are of equal objects, since all checksums are in it."""
        return bytes(self._read(0, self._data_start))

    def read(self, start: int, end: int) -> bytes:
        """Bytes [start, end) of the file, as they are."""
        return bytes(self._read(start, end - start))

    def touch(self, used_ns: int | None = None) -> None:
        """Mark the file as used now, or at `used_ns`. One that may not be written to keeps the time that it has.

        Whoever writes to it later gives it another time.
        """
        used_ns = used_ns or time.time_ns()
        with suppress(OSError):
            os.utime(self._fd, ns=(used_ns, used_ns))
            device, inode, size, *_ = self._state
            self._state, self._is_sure = FileState(device, inode, size, used_ns, 0), True

    def is_unchanged(self) -> bool:
        """Whether the file of this name is the open one, and was not written since it was opened or marked as used."""
        try:
            now = self.path.stat()
        except OSError:
            return False
        is_same = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns) == self._state[:-1]
        return self._is_sure and is_same and self._state.ctime_ns in (0, now.st_ctime_ns)

    def tokens(self) -> TokenIds:
        """int32 [n], none below 0; not to be written to."""
        return self._tokens

    @cached_property
    def _tokens(self) -> TokenIds:
        import numpy as np

        tokens = np.frombuffer(self._part("tokens").toreadonly(), dtype="<i4")
        if (tokens < 0).any():
            raise self._fail(f"it has token ids below 0; {_DAMAGED}")
        return tokens

    def text(self) -> str:
        try:
            return bytes(self._part("text")).decode()
        except UnicodeDecodeError as error:
            raise self._fail(f"its text is not UTF-8; {_DAMAGED}") from error

    def layer(self, index: int, into: memoryview | None = None) -> tuple[memoryview, ...]:
        """The bytes of one layer's parts (`Geometry.parts`), in the target's dtype; one read.

        Of standard attention key and value, each `[kv_heads, n, head_dim]`. `into` is memory of at least `layer_bytes`
        that they are read (and decoded) to.
        """
        shape, codec = self.meta.shape, codecs()[self.meta.codec]
        if self.meta.codec == "none":
            return shape.split(self.stored_layer(index, into))
        return self._decoded(index, shape, codec.decode, into)

    def layer_of_heads(self, index: int, heads: slice, into: memoryview | None = None) -> tuple[memoryview, ...]:
        """As `layer`, of heads [start, stop) alone. All of the layer is read and checked, since its checksum is one.

        Other parts than keys and values, as latents, are of all heads.
        """
        shape = self.meta.shape
        if shape.others:
            return self.layer(index, into)
        if self.meta.codec == "none":
            first, last = heads.start * shape.head_bytes, heads.stop * shape.head_bytes
            return tuple(part[first:last] for part in self.layer(index, into))

        def decode(coded: memoryview, whole: LayerShape, data: memoryview) -> None:
            codecs()[self.meta.codec].decode_heads(coded, whole, heads, data)

        return self._decoded(index, shape.of_heads(heads), decode, into)

    def _decoded(
        self, index: int, own: LayerShape, decode: Callable[[memoryview, LayerShape, memoryview], None],
        into: memoryview | None,
    ) -> tuple[memoryview, ...]:  # fmt: skip
        """The parts, of the shape `own`, that `decode` makes of a layer's coded bytes."""
        coded = self.stored_layer(index)
        data = memoryview(bytearray(own.num_bytes)) if into is None else into[: own.num_bytes]
        try:
            decode(coded, self.meta.shape, data)
        except CodingError as error:
            raise self.undecodable(index, error) from error
        return own.split(data)

    def undecodable(self, layer: int, error: CodingError) -> ObjectError:
        """The error for a layer whose checksum holds, but which no encoder wrote."""
        return self._fail(f"layer {layer} cannot be decoded ({error}); {_DAMAGED}")

    def stored_layer(self, index: int, into: memoryview | None = None) -> memoryview:
        """The bytes of one layer as they are in the file, checked but not decoded."""
        names, expected = self._header.names(index), self._header.checksums["layers"][index]
        start, end = self._header.span(*names)
        data = self._read(self._data_start + start, end - start, into)
        self._require_checksum(f"layer {index}", data, expected)
        return data

    def states(self, index: int) -> dict[str, memoryview]:
        """The bytes of one linear layer's tensors, by name (`ObjectMeta.state_dims`). Only if `meta.has_states`."""
        names = state_names(index, self.meta)
        start, end = self._header.span(*names)
        data = self._read(self._data_start + start, end - start)
        self._require_checksum(f"state {index}", data, self._header.checksums["states"][index])
        spans = {name.rpartition(".")[2]: self._header.span(name) for name in names}
        return {name: data[first - start : last - start] for name, (first, last) in spans.items()}

    @property
    def state_bytes(self) -> int:
        """Bytes of all linear layers' states; 0 if there are none."""
        shape = self.meta.target.geometry.states
        if shape is None or not self.meta.has_states:
            return 0
        first, last = state_names(0, self.meta)[0], state_names(shape.layers - 1, self.meta)[-1]
        start, end = self._header.span(first, last)
        return end - start

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's key and value together, decoded."""
        return self.meta.shape.num_bytes

    def stored_bytes(self, index: int) -> int:
        """Bytes that one layer takes in the file."""
        start, end = self._header.span(*self._header.names(index))
        return end - start

    @property
    def checksums(self) -> dict[str, Any]:
        """The checksums in the header: of the tokens, of the text, and a list for the layers."""
        return dict(self._header.checksums)

    def require_key(self, key: str) -> None:
        """Check that this is the object `key`: by its header, and by the key recomputed from its content.

        Raises:
            ObjectError: another object, or one that only says that it is this one.
        """
        if self.meta.key != key:
            raise self._fail(
                f"contains the object {self.meta.key[:12]}, not the one in its name; compile or push it again"
            )
        if self._own_key != key:
            raise self._fail(
                f"its key {key[:12]} does not match its content (forged, or written by pic 0.1 with a salt or by pic "
                "0.2 in half precision); compile its text again"
            )

    @cached_property
    def _own_key(self) -> str:
        return self.meta.own_key(self.tokens())

    def verify(self) -> None:
        """Read and check everything: its key, too, and that all numbers are finite.

        Of layers that are not coded, a piece at a time is in memory.
        """
        self._checked.clear()
        self.require_key(self.meta.key)
        self._part("tokens"), self.text()
        if self.meta.fixups is not None:
            self._part("fixups")
        for index in range(self.meta.target.geometry.layers):
            if self.meta.codec == "none":
                self._verify_plain(index)
            else:
                for part in self.layer(index):
                    self.require_finite(index, part)
        for index in range(len(self.checksums.get("states", ()))):
            for name, part in self.states(index).items():
                self.require_finite(index, part, self.meta.state_dtype(name))

    def require_finite(self, index: int, numbers: memoryview, dtype: str = "") -> None:
        """Refuse KV of a layer that holds inf or nan: no compile stores it. Raises ObjectError.

        `dtype`: of the numbers, if it is not the model's.
        """
        import numpy as np

        kind, exponent = _EXPONENTS[dtype or self.meta.target.dtype]
        for start in range(0, len(numbers), _PIECE):
            bits = np.frombuffer(numbers[start : start + _PIECE], dtype=kind)
            if (bits & exponent == exponent).any():
                raise self._fail(f"layer {index} contains numbers that are not finite; {_DAMAGED}")

    def _verify_plain(self, index: int) -> None:
        start, end = self._header.span(*self._header.names(index))
        digest, buffer = blake3(), memoryview(bytearray(min(_PIECE, end - start)))
        for offset in range(start, end, _PIECE):
            piece = self._read(self._data_start + offset, min(_PIECE, end - offset), buffer)
            digest.update(piece)
            self.require_finite(index, piece)
        if digest.hexdigest() != self._header.checksums["layers"][index]:
            raise self._mismatch(f"layer {index}")

    def _fail(self, why: str) -> ObjectError:
        return ObjectError(f"{self.name}: {why}")

    def _read(self, offset: int, count: int, into: memoryview | None = None) -> memoryview:
        data, done = memoryview(bytearray(count)) if into is None else into[:count], 0
        while done < count:
            try:
                num_read = os.preadv(self._fd, [data[done:]], offset + done)
            except OSError as error:
                raise UnreadableObjectError(f"{self.name}: cannot be read ({error.strerror})") from error
            if not num_read:
                raise self._fail(f"truncated at {offset + done} bytes; {_DAMAGED}")
            done += num_read
        return data

    def _read_header(self) -> tuple[Header, int]:
        """The header, and where the data begin. The file is exactly as long as the header says."""
        if self.num_bytes < 8:
            raise self._fail("not an object file (shorter than a header)")
        (length,) = struct.unpack("<Q", self._read(0, 8))
        if length > min(MAX_HEADER, self.num_bytes - 8):
            raise self._fail("not an object file, or truncated within its header")
        try:
            header = Header.parse(bytes(self._read(8, length)))
        except ForeignHeaderError as error:
            raise ForeignObjectError(f"{self.name}: {error}") from error
        except HeaderError as error:
            raise self._fail(str(error)) from error
        if self.num_bytes != 8 + length + header.data_bytes:
            raise self._fail(f"{self.num_bytes} bytes long, which does not match its header; {_DAMAGED}")
        return header, 8 + length

    def _part(self, name: str) -> memoryview:
        """The bytes of a tensor that is not a layer's, whose checksum is the one in the header."""
        start, end = self._header.span(name)
        data = self._read(self._data_start + start, end - start)
        self._require_checksum(name, data, self._header.checksums[name])
        return data

    def _require_checksum(self, part: str, data: memoryview, expected: str) -> None:
        if part in self._checked:
            return
        if checksum(data) != expected:
            raise self._mismatch(part)
        if self.stays_open:
            self._checked.add(part)

    def _mismatch(self, part: str) -> ObjectError:
        return self._fail(f"{part} does not match its checksum; {_DAMAGED}")


def _coded_layers(chunk: CompiledChunk) -> list[tuple[Buffer, ...]]:
    """The bytes of every layer's tensors; layers are coded in parallel."""
    assert len(chunk.layers) == chunk.meta.target.geometry.layers
    codec, shape = codecs()[chunk.meta.codec], chunk.meta.shape
    sizes = [math.prod(dims) * shape.width for dims in shape.part_dims]
    assert all([len(part) for part in parts] == sizes for parts in chunk.layers)
    if chunk.meta.codec == "none":
        return list(chunk.layers)
    layers: list[tuple[Buffer, ...]]
    try:
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), len(chunk.layers))) as threads:
            layers = [
                (data,) for data in threads.map(lambda parts: codec.encode(parts[0], parts[1], shape), chunk.layers)
            ]
        if not all(is_codable(shape, len(data)) for (data,) in layers):
            raise CodingError("a layer would be too small to tell the object from a forged one")
    except CodingError as error:
        raise InputError(f"{chunk.text[:40]!r}: cannot be coded as {chunk.meta.codec} ({error})") from error
    return layers
