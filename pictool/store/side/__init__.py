"""Databases beside the objects: the index, counts of use, sources, search."""
