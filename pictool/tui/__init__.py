"""The screens of `pic tui`: they render frozen results, and know no model."""
