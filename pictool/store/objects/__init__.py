"""The object file: its format, prefix chains of objects, archives of many."""
