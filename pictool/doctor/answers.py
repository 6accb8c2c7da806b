"""Linked answers against those of full recompute, and those of another engine against the torch engine's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from pictool.doctor.verdict import Verdict, VerdictStatus
from pictool.engines.base import Engine, first_token_kl
from pictool.fidelity.divergence import MAX_KL, Divergence, measure_divergence
from pictool.linker.grid import LabelledPolicy

MAX_APART = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}  # nats between two engines, by dtype


JUDGED = "legolink-16"  # fails if its answers are beyond `MAX_KL`; those of others are told

Policies = Sequence[LabelledPolicy]


def examine_answers(
    engine: Engine, policies: Policies, measured: list[Divergence], reference: Sequence[Divergence] = ()
) -> Iterator[Verdict]:
    """Compare linked answers with those of full recompute, and with those of another engine.

    Args:
        measured: what was measured is appended. reference: the same, of the torch engine.

    Raises:
        PicError: as of `measure_divergence`.
    """
    section = f"answers of the {engine.name} engine"
    measured += measure_divergence(engine, [labelled.policy for labelled in policies], is_timed=True)
    for labelled, divergence in zip(policies, measured, strict=True):
        yield _verdict(section, labelled.label, divergence)
    if reference:
        pairs = zip(policies, reference, measured, strict=True)
        yield from (_agreement(section, labelled.label, a, b, engine.model.dtype) for labelled, a, b in pairs)


def _verdict(section: str, label: str, divergence: Divergence) -> Verdict:
    is_judged = label == JUDGED
    kl, ttft_s, full_s = divergence.mean_kl, median(divergence.ttft_s), median(divergence.full_ttft_s)
    if not kl < float("inf") or (is_judged and kl > MAX_KL):
        status = VerdictStatus.FAILED
    else:
        status = VerdictStatus.OK if is_judged else VerdictStatus.NOTE
    limit = f" (limit {MAX_KL:g})" if is_judged else ""
    text = (
        f"KL to full recompute {kl:.2g} nats{limit}, TTFT {ttft_s * 1e3:.1f} ms ({full_s * 1e3:.1f} in full, "
        f"{divergence.speedup:.1f}x)"
    )
    values = {"kl": kl, "ttft_s": ttft_s, "full_ttft_s": full_s, "speedup": divergence.speedup}
    return Verdict(section, label, status, text, values)


def _agreement(section: str, label: str, ours: Divergence, theirs: Divergence, dtype: str) -> Verdict:
    """Rule 10: two engines give the same answer for the same spec, to the noise of the dtype."""
    limit = MAX_APART[dtype]
    kl = fmean(first_token_kl(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))
    status = VerdictStatus.OK if kl <= limit else VerdictStatus.FAILED
    text = f"KL between the torch engine's answers and these {kl:.2g} nats (limit {limit:g})"
    return Verdict(section, f"{label} as on torch", status, text, {"kl": kl, "limit": limit})
