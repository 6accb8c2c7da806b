"""The screens of `pic tui`: they render frozen results and load no model."""
