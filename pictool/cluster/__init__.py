"""More than one process or machine, on Ray. The only package that imports ray."""
