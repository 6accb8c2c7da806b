"""vLLM from outside: its engines, its server, its set-up."""
