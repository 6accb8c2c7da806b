"""How far linked answers are from full recompute: on sample prompts, and on a share of the requests served."""
