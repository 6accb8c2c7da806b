"""The parts of `pic bench`."""
