"""The router of requests with which `serve_fleet` measures."""
