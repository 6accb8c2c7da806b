"""What reuse saves for a model: FLOPs, bytes of KV, seconds by a roofline, and when a document pays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pictool.errors import InputError
from pictool.estimate.measure import HEAD_TOKENS
from pictool.estimate.totals import Computed

KV_BYTES = 2  # of a number, as bfloat16 and float16 have
DEFAULT_SHAPE = "llama-3.1-8b"


@dataclass(frozen=True)
class ModelSize:
    """What of a model's shape determines its costs.

    Fields:
        token_flops: of a token in the layers' products. pair_flops: of a pair of tokens in attention.
        kv_bytes: of a token.
    """

    name: str
    token_flops: float
    pair_flops: float
    kv_bytes: int

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> ModelSize:
        """From the fields of a `transformers` configuration.

        Raises:
            InputError: it has not those of a decoder with attention and gated feed-forward layers.
        """
        try:
            layers, hidden, heads = (
                int(config[key]) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
            )
            inner = int(config["intermediate_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{name}: its configuration has no {error}; name another with --shape") from error
        dim = int(config.get("head_dim") or hidden // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        weights = layers * (hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner)
        return cls(name, 2.0 * weights, 4.0 * layers * heads * dim, 2 * KV_BYTES * layers * kv_heads * dim)

    def flops(self, computed: Computed) -> float:
        return self.token_flops * computed.rows + self.pair_flops * computed.pairs


@dataclass(frozen=True)
class CostRates:
    """Seconds that a machine takes: for a token, for a pair of tokens in attention, to load a byte; and who says so."""

    token_s: float
    pair_s: float
    byte_s: float
    source: str

    @classmethod
    def stated(cls, size: ModelSize, tflops: float, read_gb_s: float) -> CostRates:
        rate = tflops * 1e12
        return cls(size.token_flops / rate, size.pair_flops / rate, 1 / (read_gb_s * 1e9),
                   f"{tflops:g} TFLOP/s, {read_gb_s:g} GB/s as stated")  # fmt: skip

    def seconds(self, computed: Computed, loaded_bytes: float = 0.0) -> float:
        """Loading and computing go on side by side: the longer of the two."""
        return max(self.token_s * computed.rows + self.pair_s * computed.pairs, self.byte_s * loaded_bytes)


@dataclass(frozen=True)
class BreakEven:
    """From how many tokens on linking a document is quicker than computing it; None: never. And from how many uses on.

    `uses` of a document of `tokens` tokens repay its compilation: its prefill alone, and writing its KV.
    """

    least_tokens: int | None
    tokens: int
    uses: int | None

    @classmethod
    def of(cls, size: ModelSize, rates: CostRates, tokens: float) -> BreakEven:
        compute, load = rates.token_s, rates.byte_s * size.kv_bytes
        if compute <= load:
            return cls(None, round(tokens), None)
        saved = tokens * (compute - load) - min(tokens, HEAD_TOKENS) * compute
        uses = math.ceil(tokens * (compute + load) / saved) if saved > 0 else None
        return cls(math.floor(HEAD_TOKENS * compute / (compute - load)) + 1, round(tokens), uses)
