"""Folders of real files: found, read in a bounded process, cut into passages with their places, and ranked by BM25."""
