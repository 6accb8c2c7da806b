"""Linking inside unmodified vLLM: a KV connector, and a `vllm serve` with it. vllm is imported only here.

A linked request goes through the modules in this order: connector (vLLM's calls), setup and request (what the server
and the request ask for), matching and planning (objects, spans, rows), scheduler (salts, jobs), messages (jobs to the
workers), worker (the jobs of a step), kv (objects into blocks), forward (rows through the model).
"""
