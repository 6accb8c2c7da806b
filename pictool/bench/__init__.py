"""Speed, measured so that others can repeat it: one request after another, many at once, long contexts, storage."""
