"""Chats: templates, and what an answer of a model says by their rules (calls, reasoning, JSON of a schema)."""
