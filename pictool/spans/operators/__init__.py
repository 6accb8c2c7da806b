"""The operators of span queries, one class each: how it is read, written, rewritten and run."""
