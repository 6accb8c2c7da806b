"""Others that reuse KV, each on the same prompts as pictool, beside a cold run of its own."""
