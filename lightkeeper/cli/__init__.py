"""The command line: one file per command, which imports what it needs when it runs: `--help` is quick."""

from lightkeeper.cli.app import main

__all__ = ["main"]
