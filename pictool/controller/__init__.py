"""The loading controller (CacheBlend §5.1): measured and kept speeds, delays, the ratio that is free."""
