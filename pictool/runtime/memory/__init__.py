"""KV on the device: images, a pool of them, plans of moves (CIDRA)."""
