"""The figures of the paper on span queries, measured here: documents, judges, moves, bulks, trees; with quality."""
