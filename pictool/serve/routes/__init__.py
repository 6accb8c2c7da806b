"""HTTP routes, by API."""
