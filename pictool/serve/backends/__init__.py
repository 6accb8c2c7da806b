"""What answers requests: an engine of this process (torch, llama.cpp), or vLLM servers behind it."""
