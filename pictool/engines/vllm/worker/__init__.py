"""The connector's part in vLLM's workers."""
