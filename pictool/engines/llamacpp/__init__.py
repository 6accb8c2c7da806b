"""The engine `llamacpp`: GGUF files through unmodified llama.cpp; the only package that imports llama_cpp.

`library.py` calls its C API, `state.py` reads and writes the KV of a sequence, `trial.py` tries a file in a process of
its own, `model.py` and `tokenizer.py` make it a model, `link.py` links, `names.py` finds files.
"""
