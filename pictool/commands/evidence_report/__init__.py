"""The parts of `pic evidence`, and its page."""
