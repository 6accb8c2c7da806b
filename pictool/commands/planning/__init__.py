"""The tiers that `pic plan` reads, and its report."""
