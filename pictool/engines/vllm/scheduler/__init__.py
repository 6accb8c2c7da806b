"""The connector's part in vLLM's scheduler."""
