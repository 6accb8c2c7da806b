"""Evaluation: datasets of cases, the metrics that score their answers, and runs that can be continued."""

EXTRA = ("eval", "an evaluation", "rouge_score", "scipy")  # what needs them: ROUGE-L, and bootstrap intervals
