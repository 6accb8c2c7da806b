"""`python -m pictool` is `pic`."""

from pictool.commands import main

main()
