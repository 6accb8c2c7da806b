"""Requests on the torch engine, in this process."""
