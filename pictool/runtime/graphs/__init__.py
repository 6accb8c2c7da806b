"""Links on an accelerator whose layers are replayed: static tensors, and graphs over them (docs/design.md §5)."""
