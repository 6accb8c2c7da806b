"""The synthetic world on which the embedded models are trained and scored."""
