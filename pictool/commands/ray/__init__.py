"""Commands on a Ray cluster."""
