"""Compile both kernels for an H100, without one: `python -m kernel_ptx` prints what each takes as JSON."""

from __future__ import annotations

import json
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pictool.runtime.kernels.place import _place
from pictool.runtime.kernels.rows_attention import _attend

H100 = GPUTarget("cuda", 90, 32)
NUMBERS, SUMS, WHOLE = "*bf16", "*fp32", "*i64"
ATTEND = {
    "Q": NUMBERS, "K": NUMBERS, "V": NUMBERS, "POSITIONS": WHOLE, "BASE": WHOLE, "SINKS": NUMBERS, "OUT": NUMBERS,
    "SUMS": SUMS, "scaling": "fp32", "softcap": "fp32",
}  # fmt: skip
ATTEND_FIXED = {
    "GROUP": 4, "WINDOW": 0, "CHUNK": 0, "HAS_CAP": False, "HAS_SINKS": False, "HAS_BASE": False, "DIM": 128,
    "OUT_DIM": 128, "DIM_2": 128, "OUT_DIM_2": 128, "TILE": 64, "BLOCK": 64, "SPLITS": 1,
}  # fmt: skip
PLACE = {
    "STAGED": NUMBERS, "KEYS": NUMBERS, "VALUES": NUMBERS, "COS": NUMBERS, "SIN": NUMBERS, "OTHER": WHOLE,
    "SIGN": SUMS, "COS_COLUMN": WHOLE, "SIN_COLUMN": WHOLE, "START": WHOLE, "TOKEN": WHOLE, "LENGTH": WHOLE,
    "POSITIONS": WHOLE, "BASE": WHOLE, "SCALES": NUMBERS,
}  # fmt: skip
PLACE_FIXED = {
    "HEADS": 8, "OTHER_HEADS": 8, "COLUMNS": 128, "WIDTH": 128, "OTHER_WIDTH": 128, "WIDTH_2": 128,
    "OTHER_WIDTH_2": 128, "ROTATED": 0, "ROUNDS_ONCE": False, "IS_FLOAT8": False, "HAS_BASE": False, "UNIT": 128,
    "TOKENS": 16,
}  # fmt: skip


def compiled(kernel: Any, kinds: dict[str, str], fixed: dict[str, Any], **options: Any) -> dict[str, int]:
    """Counts in the code of a kernel. All other arguments are int32; pointers and strides are multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names}
    aligned = [name for name, kind in signature.items() if kind[0] == "*" or name.endswith(("_head", "_slot", "_row"))]
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in fixed.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )  # fmt: skip
    code = compile(source, target=H100, options={"num_warps": 4, **options})
    return {"wgmma": code.asm["ptx"].count("wgmma.mma_async"), "fma": code.asm["ptx"].count("fma.rn"),
            "shared": code.metadata.shared, "bytes": len(code.asm["cubin"])}  # fmt: skip


def main() -> None:
    float32 = {"OUT": SUMS}  # of parts
    print(json.dumps({
        "attend": compiled(_attend, ATTEND, ATTEND_FIXED, num_stages=2),
        "attend, split": compiled(_attend, ATTEND | float32, ATTEND_FIXED | {"SPLITS": 8}, num_stages=2),
        "place": compiled(_place, PLACE, PLACE_FIXED, enable_fp_fusion=False),
        "place, float8": compiled(
            _place, PLACE | {"STAGED": "*u8", "SCALES": SUMS}, PLACE_FIXED | {"IS_FLOAT8": True}, enable_fp_fusion=False
        ),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
