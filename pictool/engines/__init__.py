"""Engines: what answers a request. `torch` is ours."""
