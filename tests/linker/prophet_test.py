"""ProphetKV: the tail's attention against transformers' own, the chosen rows, and links against the dense reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import tiny
import torch
from alone import link
from subjects import (
    HEAD,
    LENGTH_DEPENDENT,
    LENGTHS,
    PLACED,
    TAIL,
    Subject,
    each_kind,
    families,
    make_chunks,
    max_difference,
    parts_of,
    subject,
)

from pictool.linker.link import Linked
from pictool.linker.policies import make_policy
from pictool.store.store import Store

RATIO = 0.2


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("compiled"))


def tail_rows(linked: Linked) -> torch.Tensor:
    rows = torch.zeros(linked.image.layout.num_tokens, dtype=torch.bool)
    rows[linked.image.layout.tail[0] :] = True
    return rows


def attention_of_the_tail(one: Subject, linked: Linked) -> np.ndarray:
    """What each token of the context gets: highest of the heads, summed over rows and layers of a kind, as a share."""
    rows = tail_rows(linked)
    weights = reference.attention(one.reference, parts_of(linked), rows)[:, :, rows]
    weights = weights / weights.sum(-1, keepdim=True)  # a learned sink takes its part and gives no value
    by_layer = weights.amax(1).sum(1)[:, : linked.image.layout.num_context]
    kinds = np.asarray(getattr(one.model.config, "layer_types", None) or ["full"] * len(by_layer))
    of_kind = [by_layer[torch.from_numpy(kinds == kind)].sum(0) for kind in np.unique(kinds)]
    return torch.stack([weights / weights.sum() for weights in of_kind]).mean(0).numpy()


@pytest.mark.parametrize(
    ("architecture", "head"),
    [
        *((name, HEAD) for name in families(*LENGTH_DEPENDENT, *PLACED, *tiny.HYBRIDS)),
        *((name, "") for name in each_kind(*PLACED)),
    ],
)
def test_scores_are_the_attention_of_the_tail_and_the_highest_are_computed(
    architecture: str, head: str, compiled: Store
) -> None:
    one, policy = subject(architecture), make_policy("prophet", {"ratio": RATIO})
    linked = link(one.model, compiled, make_chunks(LENGTHS), TAIL, policy, head=head, after="none")
    layout = linked.image.layout
    first = layout.chunks[0][0] if head else layout.chunks[1][0]
    wanted = attention_of_the_tail(one, linked)
    assert linked.scores is not None
    np.testing.assert_allclose(linked.scores[first : layout.num_context], wanted[first:], atol=1e-4)
    chosen = linked.rows[0, : layout.num_context]
    assert chosen.sum() == np.ceil(RATIO * layout.num_context) and not chosen[:first].any()
    assert (
        linked.scores[: layout.num_context][chosen].min()
        >= linked.scores[first : layout.num_context][~chosen[first:]].max()
    )
    assert (linked.rows == linked.rows[0]).all()
    dense = reference.link(one.reference, parts_of(linked), torch.from_numpy(linked.rows[0]))
    assert max_difference(linked, dense) <= 1e-4
