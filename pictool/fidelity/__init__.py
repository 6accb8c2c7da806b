"""How far linked answers are from full recompute: on made-up prompts, and on a share of a batch's requests."""
