"""One module per verb: parse, call one function, print."""
