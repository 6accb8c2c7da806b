"""Requests inside vLLM's own server."""
