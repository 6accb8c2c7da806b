"""`python -m pictool` is `pic`."""

from pictool.commands import main

if __name__ == "__main__":
    main()
