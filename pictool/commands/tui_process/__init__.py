"""The process in which the terminal interface runs a model."""
