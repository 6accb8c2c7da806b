"""Speed, measured so that others can repeat it: single requests, many users, long contexts, storage."""
