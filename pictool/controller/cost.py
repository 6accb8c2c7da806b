"""The delay estimators of the loading controller (CacheBlend §5.1): T_recompute and T_load.

Pure functions over what was measured (`measuring.py`): nothing here reads a clock or a file. Times are of a whole
prompt, all layers together; the paper's are per layer, which is the same comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pictool.errors import InputError


@dataclass(frozen=True)
class PromptSize:
    """What has to be loaded and computed: tokens of context (head and chunks) and tail, objects, KV bytes per token.

    `coded_bytes` are those that the KV takes in its objects, `decode_s` the seconds that decoding all of it takes; None
    and 0 if nothing is coded.
    """

    context: int
    tail: int
    objects: int
    token_bytes: int
    coded_bytes: int | None = None
    decode_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return self.context + self.tail

    @property
    def num_bytes(self) -> int:
        """Bytes of KV that the objects hold, decoded."""
        return self.context * self.token_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes that this KV is read from."""
        return self.num_bytes if self.coded_bytes is None else self.coded_bytes


@dataclass(frozen=True)
class Decoding:
    """What a codec costs: bytes stored per byte of KV, seconds to decode a byte of KV, and per object."""

    stored: float = 1.0
    byte_s: float = 0.0
    object_s: float = 0.0

    @classmethod
    def fit(
        cls, kv: Sequence[float], objects: Sequence[float], stored: Sequence[float], plain_s: Sequence[float],
        coded_s: Sequence[float],
    ) -> Decoding:  # fmt: skip
        """From runs that load the same KV plain and coded, from memory: what takes longer than so many plain bytes."""
        byte_s, object_s = fit_nonnegative([kv, objects], plain_s)
        runs = zip(stored, objects, coded_s, strict=True)
        left = [seconds - byte_s * size - object_s * count for size, count, seconds in runs]
        return cls(sum(stored) / sum(kv), *fit_nonnegative([kv, objects], left))

    def seconds(self, kv_bytes: float, objects: int) -> float:
        return self.byte_s * kv_bytes + self.object_s * objects


@dataclass(frozen=True)
class Speed:
    """How fast objects come from a tier: seconds per byte, per object (all its layers), and to open one first."""

    byte_s: float
    object_s: float
    open_s: float = 0.0

    @classmethod
    def fit(
        cls, sizes: Sequence[float], objects: Sequence[float], load: Sequence[float], open: Sequence[float]
    ) -> Speed:
        """From measured runs: bytes in all, number of objects, seconds of loading and of opening."""
        byte_s, object_s = fit_nonnegative([sizes, objects], load)
        return cls(byte_s, object_s, *fit_nonnegative([objects], open))

    def after(self, device: Speed) -> Speed:
        """The speed of reading from `device` and then doing this loader's own work (check, copy, relocate)."""
        return Speed(self.byte_s + device.byte_s, self.object_s + device.object_s, self.open_s + device.open_s)


@dataclass(frozen=True)
class Work:
    """What a policy does at one layer, as shares of computing every row: `fixed` + `scaled` · ratio."""

    fixed: float
    scaled: float
    is_loaded: bool


def layer_work(num_layers: int, checked: Sequence[int] = (), projection: float = 0.0) -> tuple[Work, ...]:
    """The work of a policy that checks these layers; of a static one by default.

    Every row is computed up to the first checked layer, which needs no cache until then. At a checked layer the rows
    that are still computed are projected (to Q, K and V, the share `projection` of the layer) before fewer go on.
    """
    if not checked:
        return (Work(0.0, 1.0, True),) * num_layers
    before = [Work(1.0, 0.0, False)] * checked[0]
    first = Work(projection, 1.0, True)
    later = [Work(0.0, 1.0 + projection * (layer in checked), True) for layer in range(checked[0] + 1, num_layers)]
    return (*before, first, *later)


@dataclass(frozen=True)
class ComputeMeasurement:
    """One measured computation of a prompt: of all rows (`runs` 1), or of the tail and `runs` scattered rows."""

    size: PromptSize
    runs: int
    seconds: float


@dataclass(frozen=True)
class Estimator:
    """Delays of one model and policy on one machine. Prefill(L) = constant_s + token_s · L + pair_s · L².

    `run_s` is what a run of consecutive rows costs more than those rows within a prefill: kernels are started for each.
    """

    token_s: float
    constant_s: float
    pair_s: float
    run_s: float
    work: tuple[Work, ...]  # [layers]

    @classmethod
    def fit(cls, measured: Sequence[ComputeMeasurement], work: tuple[Work, ...]) -> Estimator:
        """The least relative error over the prefills; what they leave unexplained of the others is that of the runs."""
        prefills = [run for run in measured if run.runs == 1]
        lengths = [run.size.num_tokens for run in prefills]
        terms = [lengths, [1] * len(lengths), [length**2 for length in lengths]]
        token, constant, pair = fit_nonnegative(terms, [run.seconds for run in prefills])
        smooth = cls(token, constant, pair, 0.0, layer_work(1))
        scattered = [run for run in measured if run.runs > 1]
        left = [run.seconds - smooth.recompute_s(run.runs / run.size.context, run.size) for run in scattered]
        (per_run,) = fit_nonnegative([[run.runs for run in scattered]], left)
        return cls(token, constant, pair, per_run, work)

    def prefill_s(self, tokens: int) -> float:
        """Prefill(L): seconds to compute a prompt of so many tokens."""
        return self.constant_s + self.token_s * tokens + self.pair_s * tokens**2

    def recompute_s(self, ratio: float, size: PromptSize) -> float:
        """T_recompute(r, L): the share r of the context's rows, and the tail, through all layers.

        Footnote 5 has r · Prefill(L). Of that only what grows with L is scaled: the constant is paid once for any r,
        and so is the tail, whose rows attend to the whole context: Prefill(L + tail) - Prefill(L). Runs come on top:
        of r · L rows that are chosen at random, the share 1 - r begins a run.
        """
        return self.constant_s + sum(self._layers_s(ratio, size))

    def _layers_s(self, ratio: float, size: PromptSize) -> list[float]:
        """T_recompute by layers, less the constant."""
        context = self.prefill_s(size.context) - self.constant_s
        tail = self.prefill_s(size.context + size.tail) - self.prefill_s(size.context)
        runs = self.run_s * size.context * ratio * (1 - ratio)
        return [
            (tail + (layer.fixed + layer.scaled * ratio) * context + layer.is_loaded * runs) / len(self.work)
            for layer in self.work
        ]

    def equal_ratio(self, load_s: float, size: PromptSize) -> float | None:
        """The ratio r with T_recompute(r) = `load_s`; below 0 or above 1 if no share will do, None if every one does.

        T_recompute(r) = least + (rise + runs) · r - runs · r² may have a peak before r = 1. Then it is the root before
        the peak, up to which loading hides recompute; or above 1, if loading hides T_recompute(1).
        """
        least, most = self.recompute_s(0, size), self.recompute_s(1, size)
        rise, runs = most - least, self.run_s * size.context * self.loaded_share
        if rise <= 0:
            return None
        if not least < load_s < most:
            return (load_s - least) / rise
        root = math.sqrt(max(0.0, (rise + runs) ** 2 - 4 * runs * (load_s - least)))
        return 2 * (load_s - least) / (rise + runs + root)

    @property
    def loaded_share(self) -> float:
        """The share of the layers that are loaded."""
        return sum(layer.is_loaded for layer in self.work) / len(self.work)

    def load_s(self, size: PromptSize, speed: Speed) -> float:
        """T_load(L): footnote 6, bytes / throughput, time per object, and decoding; of the layers that are loaded."""
        reading = speed.byte_s * size.stored_bytes + speed.object_s * size.objects
        return self.loaded_share * (reading + size.decode_s)

    def ttft_s(self, ratio: float, size: PromptSize, speed: Speed) -> float:
        """Seconds to the first token: objects are opened; then a layer is computed as soon as it is loaded and the one
        before is done (fig. 10). Without choosing rows by another model.
        """
        step = self.load_s(size, speed) / max(1, sum(layer.is_loaded for layer in self.work))
        loaded = done = 0.0
        for layer, compute in zip(self.work, self._layers_s(ratio, size), strict=True):
            loaded += step * layer.is_loaded
            done = max(done, loaded) + compute
        return speed.open_s * size.objects + self.constant_s + done


def fit_nonnegative(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The coefficients >= 0 of `terms` [terms, points] with the least squared relative error of `seconds` [points].

    A point of 0 s says nothing. Terms may differ by many digits: each is scaled to its largest value.

    Raises:
        InputError: scipy is not installed.
    """
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        raise InputError("the controller's cost model needs scipy; pip install 'pictool[eval]'") from error
    used = [index for index, value in enumerate(seconds) if value > 0]
    if not used:
        return [0.0] * len(terms)
    columns = np.array([[term[index] / seconds[index] for index in used] for term in terms])
    scale = columns.max(axis=1)
    scale[scale == 0] = 1.0
    solved, _ = nnls((columns / scale[:, None]).T, np.ones(len(used)))
    return [float(value) for value in solved / scale]
