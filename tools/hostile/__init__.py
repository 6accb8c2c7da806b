"""Hostile input: a fuzzer over everything that `pic` reads. `fuzz.py` runs it; `surfaces/` has one module per kind."""
