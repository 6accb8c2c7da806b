"""What the browser lists."""

from __future__ import annotations

from subjects import make_chunks, run, subject

from pictool.linker.policies import make_policy
from pictool.store.store import Store
from pictool.tui.listing import Listing


def test_blocks_of_prefix_chains_are_left_out(store: Store) -> None:
    chunks = make_chunks((29,))
    run(subject("llama"), store, make_policy("naive", {}), chunks)
    documents = set(store.keys())
    run(subject("llama"), store, make_policy("prefix", {"block": 4}), chunks)
    assert documents < set(store.keys())
    listing = Listing(store)
    listing.refresh()
    listing.read_headers(lambda: None, lambda: False)
    assert {entry.key for entry in listing.objects("", "key", False, {})} == documents
