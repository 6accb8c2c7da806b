"""Compiling: text → chunks → objects."""
