"""Settings and options that commands share, and what they open."""
