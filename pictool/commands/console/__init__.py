"""The terminal: notes, tables, progress, pages, errors."""
