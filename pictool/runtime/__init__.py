"""A transformer run layer by layer on chosen rows. Knows no store."""
