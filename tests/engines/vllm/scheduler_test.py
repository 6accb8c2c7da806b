"""Salts tell every way of linking apart; without vLLM."""

from __future__ import annotations

import numpy as np
import vllm_rig as rig

from pictool.engines.vllm.planning import make_plan
from pictool.engines.vllm.scheduler import Salter
from pictool.linker.policies import make_policy

NAIVE = make_policy("naive", {})
FIXUP = make_policy("fixup", {"ratio": 0.2})


def test_salts_tell_every_way_of_linking_apart() -> None:
    tokens, salter = rig.ids(*range(20)), Salter()
    a, b, second = rig.match("a", 3, 3, 4), rig.match("b", 3, 3, 4), rig.match("a", 8, 8, 9)
    plans = [
        make_plan(policy, tokens, objects)
        for policy in (NAIVE, make_policy("legolink", {"k": 4}), make_policy("legolink", {"k": 5}))
        for objects in ([a], [b], [a, second])
    ]
    salts = [salter.salt_of(plan, own) for plan in plans for own in (None, "tenant")]
    assert len(set(salts)) == len(salts)
    assert salts == [salter.salt_of(plan, own) for plan in plans for own in (None, "tenant")]
    assert salter.unique() != salter.unique()
    assert Salter().salt_of(plans[0], None) != salts[0], "a client could name a salt"


def test_rows_of_other_tables_are_told_apart() -> None:
    plan, salter = make_plan(FIXUP, rig.ids(*range(9)), [rig.match("a", 0, 0, 1, 2, 3)]), Salter()
    rows = np.eye(3, 8, dtype=bool)
    assert len({salter.salt_of(plan, None, selected) for selected in (None, *rows)}) == 4
    assert salter.salt_of(plan, None, rows[0]) == salter.salt_of(plan, None, rows[0].copy())
