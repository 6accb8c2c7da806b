"""What answers requests: the torch engine, or vLLM."""
