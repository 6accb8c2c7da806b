"""Linked answers against those of full recompute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from pictool.doctor.verdict import Verdict, VerdictStatus
from pictool.engines.base import Engine
from pictool.fidelity.divergence import FEW_NATS, MAX_SHARE, Divergence, measure_divergence
from pictool.linker.grid import LabelledPolicy, named_policy
from pictool.linker.policies import DEFAULT

Policies = Sequence[LabelledPolicy]


def examine_answers(engine: Engine, policies: Policies) -> Iterator[Verdict]:
    """Compare linked answers with those of full recompute. The default policy fails if they are far; others are told.

    Raises:
        PicError: as of `measure_divergence`.
    """
    section = f"answers of the {engine.name} engine"
    measured = measure_divergence(engine, [labelled.policy for labelled in policies], is_timed=True)
    for labelled, divergence in zip(policies, measured, strict=True):
        yield _verdict(section, labelled.label, divergence)


def _verdict(section: str, label: str, divergence: Divergence) -> Verdict:
    is_judged = divergence.policy == named_policy(DEFAULT)
    if not divergence.nats < float("inf") or (is_judged and divergence.is_far(MAX_SHARE)):
        status = VerdictStatus.FAILED
    else:
        status = VerdictStatus.OK if is_judged else VerdictStatus.NOTE
    limit = f" (limits {FEW_NATS:g} nats and {MAX_SHARE:.0%})" if is_judged else ""
    full_s = median(each.ttft_s for each in divergence.own)
    ttft_s = median(each.ttft_s / each.speedup for each in divergence.own)
    speedup = median(each.speedup for each in divergence.own)
    text = f"{divergence}{limit}; TTFT {ttft_s * 1e3:.1f} ms ({full_s * 1e3:.1f} in full, {speedup:.1f}x)"
    values = {
        "answer_kl": divergence.nats, "share": divergence.share, "kl": fmean(each.kl for each in divergence.own),
        "same_answers": sum(each.same_answer for each in divergence.own),
        "ttft_s": ttft_s, "full_ttft_s": full_s, "speedup": speedup,
    }  # fmt: skip
    return Verdict(section, label, status, text, values)
