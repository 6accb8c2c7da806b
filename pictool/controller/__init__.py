"""The loading controller (CacheBlend §5.1): measuring, kept profiles, cost model, choice."""
