"""Linking inside unmodified vLLM: a KV connector, and the engine behind `--engine vllm`. vllm is imported only here."""
