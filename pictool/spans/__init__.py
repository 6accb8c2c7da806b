"""Span queries: programs over model calls whose joins say whether order matters (Span queries §4)."""
