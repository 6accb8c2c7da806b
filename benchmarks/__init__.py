"""Benchmarks whose raw results are committed beside them."""
