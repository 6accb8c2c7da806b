"""How much of a log of requests could be reused: by a prefix cache, by linking, and at most. Loads no model."""
