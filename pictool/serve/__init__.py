"""The HTTP service: one router, and the backend that it is mounted in (docs/reference/serving.md)."""
