"""Mutated objects: each is refused with a clear message of one line, without a crash and without much memory.

    python -m benchmarks.store_fuzz --count 24000 --out benchmarks/results/store_fuzz.json

Objects of every codec and dtype are changed: bits flipped, cut off, lengthened, pieces moved, headers edited (with the
header's checksum left, or made to hold again), layers swapped, lengths made huge. Whatever opens and reads everything
must give exactly what the object gave before (a mutation may do nothing, and a resealed header may say the same).
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pictool.core import Geometry, Target
from pictool.errors import ObjectError
from pictool.store.codecs import codecs
from pictool.store.objects.format import DTYPES, CompiledChunk, ObjectFile, ObjectMeta, canonical, seal, write_object

HUGE = (2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1, 10**30, -1, 0)
MAX_MEMORY = 64 << 20
Content = tuple[str, list[int], list[bytes]]


@dataclass(frozen=True)
class Original:
    data: bytes
    content: Content
    name: str


def make_original(path: Path, codec: str, dtype: str, seed: int) -> Original:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, 1000, int(draw.integers(1, 90)), dtype=np.int32)
    target = Target("LlamaForCausalLM", "a" * 64, "b" * 64, dtype, Geometry(3, 2, 8))
    meta = ObjectMeta(target.key(tokens, codec), target, len(tokens), codec)
    numbers = draw.normal(size=(3, 2, meta.shape.count // 2)).astype(np.float16 if dtype == "float16" else np.float32)
    rows = numbers if dtype != "bfloat16" else (numbers.view(np.uint32) >> 16).astype(np.uint16)
    with path.open("wb") as file:
        write_object(file, CompiledChunk(meta, f"text {seed}", tokens, [(k.tobytes(), v.tobytes()) for k, v in rows]))
    return Original(path.read_bytes(), read(path), f"{codec} {dtype}")


def read(path: Path) -> Content:
    with ObjectFile(path) as file:
        layers = [b"".join(map(bytes, file.layer(layer))) for layer in range(file.meta.target.geometry.layers)]
        return file.text(), file.tokens().tolist(), layers


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + struct.unpack_from("<Q", data)[0]
    return json.loads(data[8:end]), data[end:]


def joined(header: dict[str, Any], body: bytes, is_sealed: bool) -> bytes:
    if is_sealed:
        header["__metadata__"]["header"] = seal(header)
    raw = canonical(header)
    return struct.pack("<Q", len(raw)) + raw + body


def flip_bits(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncate(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def lengthen(data: bytes, draw: random.Random) -> bytes:
    return data + draw.randbytes(draw.choice((1, 8, 300)))


def move_a_piece(data: bytes, draw: random.Random) -> bytes:
    start, to = draw.randrange(len(data)), draw.randrange(len(data))
    piece = data[start : start + draw.randrange(1, 64)]
    return data[:to] + piece + data[to + draw.choice((0, len(piece))) :]


def huge_header_length(data: bytes, draw: random.Random) -> bytes:
    return struct.pack("<Q", draw.choice((2**63, 2**64 - 1, 2**40, 10**8, len(data), draw.randrange(10**6)))) + data[8:]


def swap_layers(data: bytes, draw: random.Random) -> bytes:
    """The bytes of two layers change places; with their checksums, in a header that is sealed again, or without."""
    header, body = split(data)
    names = [name for name in header if name.startswith("layers.")]
    (a, b), (c, d) = (header[name]["data_offsets"] for name in sorted(draw.sample(names, 2)))
    if (a, b) > (c, d):
        (a, b), (c, d) = (c, d), (a, b)
    return joined(header, body[:a] + body[c:d] + body[b:c] + body[a:b] + body[d:], draw.random() < 0.5)


def edit_header(data: bytes, draw: random.Random) -> bytes:
    header, body = split(data)
    metadata, tensor = header["__metadata__"], header[draw.choice([name for name in header if name[0] != "_"])]
    kind = draw.randrange(5)
    if kind == 0:
        metadata[draw.choice(sorted(metadata))] = draw.choice(("", "x", "-1", "0", "none", "zstd", "9" * 50, "\u0000"))
    elif kind == 1:
        metadata[draw.choice(("layers", "kv_heads", "head_dim", "tokens", "sinks"))] = str(draw.choice(HUGE))
    elif kind == 2:
        tensor["data_offsets"] = [draw.choice((0, *HUGE)), draw.choice(HUGE)]
    elif kind == 3:
        tensor["shape"] = [draw.choice(HUGE) for _ in tensor["shape"]]
    else:
        del header[draw.choice([name for name in header if name[0] != "_"])]
    return joined(header, body, draw.random() < 0.7)


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip_bits, truncate, lengthen, move_a_piece, huge_header_length, swap_layers, edit_header,
)  # fmt: skip


def outcome(path: Path, original: Original, data: bytes) -> str:
    """What reading the mutated object came to: refused, unchanged, or what must not be."""
    path.write_bytes(data)
    tracemalloc.reset_peak()
    try:
        content = read(path)
    except ObjectError as error:
        is_clear = str(error).startswith(f"{path}: ") and "\n" not in str(error) and len(str(error)) < 1000
        fine = "refused" if is_clear else "refused unclearly"
        return fine if tracemalloc.get_traced_memory()[1] < MAX_MEMORY else "much memory"
    except Exception as error:
        return f"crashed: {type(error).__name__}"
    return "as before" if content == original.content else "another answer"


def fuzz(count: int, seed: int = 0) -> dict[str, dict[str, int]]:
    """Outcomes by kind of mutation."""
    draw, outcomes = random.Random(seed), {mutation.__name__: Counter[str]() for mutation in MUTATIONS}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.kvo"
        originals = [
            make_original(path, codec, dtype, seed) for codec in codecs() for dtype in DTYPES for seed in range(4)
        ]
        tracemalloc.start()
        for _ in range(count):
            original, mutate = draw.choice(originals), draw.choice(MUTATIONS)
            outcomes[mutate.__name__][outcome(path, original, mutate(original.data, draw))] += 1
        tracemalloc.stop()
    return {name: dict(sorted(counts.items())) for name, counts in outcomes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=24_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    outcomes = fuzz(options.count)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    report = {"mutated": options.count, "outcomes": outcomes, "peak_memory_mb": peak}
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if any(set(counts) - {"refused", "as before"} for counts in outcomes.values()):
        raise SystemExit("a mutated object was not refused as it should be")


if __name__ == "__main__":
    main()
