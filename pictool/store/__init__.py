"""Object files and the store that keeps them. Knows no model and imports no torch."""
