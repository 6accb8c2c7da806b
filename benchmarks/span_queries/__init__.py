"""The figures of the paper on span queries: `python -m benchmarks.span_queries --help`."""
