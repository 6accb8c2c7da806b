"""The HTTP service: one router, and the home that it is mounted in (docs/reference/serving.md)."""
