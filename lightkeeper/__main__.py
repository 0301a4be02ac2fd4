"""`python -m lightkeeper` is the command `lightkeeper`."""

from lightkeeper.cli import main

if __name__ == "__main__":
    main()
