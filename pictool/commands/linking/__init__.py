"""Links of the command line: requests, batches, a server that links."""
