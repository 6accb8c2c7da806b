"""Stored documents that are recognised in prompts, and where in them an object is linked. Knows no model."""
