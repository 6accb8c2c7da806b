"""How the embedded models are made: tokenizers, data, training, scores. Not part of the package."""
