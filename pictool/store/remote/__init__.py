"""Stores elsewhere: URLs that objects come from and go to."""
