"""How much of a log of requests could be reused: by a prefix cache, and by linking. Loads no model."""
