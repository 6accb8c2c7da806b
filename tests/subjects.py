"""What the tests of linking share: a tiny model of every architecture, random chunks, and a link of them."""

from __future__ import annotations

import atexit
import copy
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import reference
import tiny
from alone import link
from torch import Tensor

from pictool.core import Chunk
from pictool.linker.link import Linked
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.spec import Document
from pictool.runtime.architectures import text_config
from pictool.runtime.model import Model, wrap_model
from pictool.runtime.support import depends_on_length
from pictool.store.store import Store

# Each kind of attention, RoPE and layer once: what every test of linking runs on.
ARCHITECTURES = [
    "llama", "llama3", "llama-linear", "llama-dynamic", "llama-yarn", "mistral-window", "qwen2", "qwen3",
    "phi3-partial", "phi3-long", "gemma2", "gemma3", "cohere2", "llama4", "glm4_moe", "gpt_oss",
    "deepseek_v3",
]  # fmt: skip


def families(*left_out: str) -> list[str]:
    """The architectures of the exactness tables, without those that are left out.

    The whole tables of the long tail (families of a kind that is tested already) are those of CI, for their time;
    families_test.py runs the rules on every family everywhere.
    """
    names = tiny.CONFIGS if "CI" in os.environ else (*ARCHITECTURES, "qwen3_next", "bamba")
    return [name for name in names if name not in left_out]


# Each kind of attention, RoPE and experts once: what runs of a mechanism that asks a family for no more than that.
KINDS = ["llama", "mistral-window", "gemma3", "cohere2", "phi3-partial", "llama4", "gpt_oss", "deepseek_v3"]

# And each kind of state: of delta rules with one and with many gates, of Mamba, beside attention, of convolutions.
STATES = ["qwen3_next", "kimi_linear", "bamba", "falcon_h1", "lfm2"]


def each_kind(*left_out: str) -> list[str]:
    """`KINDS`; with PIC_ALL_FAMILIES (`make test-families`) all that are no hybrids and whose RoPE is of no length."""
    return families(*LENGTH_DEPENDENT, *tiny.HYBRIDS, *left_out) if "PIC_ALL_FAMILIES" in os.environ else KINDS


def is_linkable(architecture: str, policy: str) -> bool:
    """Whether a policy links the architecture; what a hybrid is not linked with is refused (hybrids_test.py)."""
    return architecture not in tiny.HYBRIDS or policy in ("full", "legolink", "naive", "prefix")


def linkable(architectures: Sequence[str], names: Iterable[str]) -> list[tuple[str, str]]:
    """The pairs (architecture, policy) that can be linked."""
    return [(architecture, name) for architecture in architectures for name in names if is_linkable(architecture, name)]


FAMILIES = families()
# Those whose numbers depend on where a chunk is: the dense reference, which computes it in its place, differs.
PLACED = ("ministral3-far",)
# Those whose queries are scaled by their position, which the dense reference counts from below 0 for dummy tokens.
SCALED = ("ministral3", "mistral4", "in mistral3")
LENGTH_DEPENDENT = ("llama-dynamic", "phi3-long")
HEAD, TAIL = "<s>You are.", " why?"
# 1 token, shorter than k, longer than a window of 12, and one twice.
LENGTHS = (1, 3, 29, 17, 29)


@dataclass(frozen=True)
class Subject:
    """One architecture: our model, and transformers' own with eager attention."""

    model: Model
    pristine: Any

    @property
    def reference(self) -> Any:
        """Transformers' own; a fresh copy of one whose dynamic RoPE keeps the longest prompt that it saw."""
        is_fixed = not depends_on_length(text_config(self.pristine.config))
        return self.pristine if is_fixed else copy.deepcopy(self.pristine)


@cache
def subject(architecture: str) -> Subject:
    module = tiny.random_module(tiny.CONFIGS[architecture]())
    return Subject(wrap_model(module, tiny.tokenizer(), architecture), reference.eager(module))


def make_chunks(lengths: Sequence[int], seed: int = 0) -> list[Chunk]:
    """Random chunks; equal lengths are the same chunk."""
    chunks = {}
    for length in lengths:
        draw = np.random.default_rng([seed, length]).integers(3, tiny.VOCAB, length)
        chunks[length] = Chunk(f"chunk of {length}", tuple(int(token) for token in draw), "test")
    return [chunks[length] for length in lengths]


@cache
def default_policy(name: str) -> Policy:
    """A policy with its default fields; and a small model of the same tokenizer, if it needs one."""
    if name != "speccache":
        return make_policy(name, {})
    directory = Path(tempfile.mkdtemp(prefix="pic-small-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return make_policy(name, {"spec_model": str(tiny.save_model(directory, tiny.CONFIGS["llama"](), seed=7))})


def run(
    one: Subject, store: Store, policy: Policy, chunks: Sequence[Document], head: str = HEAD, tail: str = TAIL
) -> Linked:
    return link(one.model, store, chunks, tail, policy, head=head)


def of_keys(weights: Tensor) -> Tensor:
    """Attention weights [..., n] as shares of what a row gives to keys: a learned sink has a part beside them."""
    return weights / weights.sum(-1, keepdim=True)


def parts_of(linked: Linked) -> list[list[int]]:
    layout = linked.image.layout
    spans = [layout.head, *layout.chunks, layout.tail]
    return [layout.tokens[start:end].tolist() for start, end in spans]


def max_difference(linked: Linked, dense: reference.Dense) -> float:
    """The largest difference of any K, V or logit."""
    image = linked.image
    assert image.logits is not None
    differences = [(image.logits - dense.logits).abs().max()]
    for layer, (key, value) in enumerate(dense.kv):
        differences += [(image.key(layer) - key).abs().max(), (image.value(layer) - value).abs().max()]
    return float(max(differences))
