"""Links of the command line: requests, batches, folders."""
