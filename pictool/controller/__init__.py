"""The loading controller (CacheBlend §5.1): calibration, cost model, decision."""
