"""Linked answers against those of full recompute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from pictool.doctor.verdict import Verdict, VerdictStatus
from pictool.engines.base import Engine
from pictool.fidelity.divergence import MAX_KL, Divergence, measure_divergence
from pictool.linker.grid import LabelledPolicy

JUDGED = "legolink-16"  # fails if its answers are beyond `MAX_KL`; those of others are told

Policies = Sequence[LabelledPolicy]


def examine_answers(engine: Engine, policies: Policies) -> Iterator[Verdict]:
    """Compare linked answers with those of full recompute.

    Raises:
        PicError: as of `measure_divergence`.
    """
    section = f"answers of the {engine.name} engine"
    measured = measure_divergence(engine, [labelled.policy for labelled in policies], is_timed=True)
    for labelled, divergence in zip(policies, measured, strict=True):
        yield _verdict(section, labelled.label, divergence)


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
