"""Linking: which rows to compute (policies), and the pass that computes them."""
