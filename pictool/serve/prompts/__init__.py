"""From a request to the pieces of a prompt."""
