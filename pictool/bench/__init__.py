"""Speed, measured so that others can repeat it: one request after another, on models of any shape (`pic bench`)."""
