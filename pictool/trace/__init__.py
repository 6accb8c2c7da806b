"""Traces of links: the file format, counts, comparison, and analysis by running the model again."""
