"""Errors that are told to a person in one line, without a traceback."""

from __future__ import annotations


class ToldError(Exception):
    """Something the person at the terminal can put right; the command line prints it as one line.

    Attributes:
        exit_code: what the process exits with.
    """

    exit_code = 1


class UsageError(ToldError):
    """A wrong option or argument."""

    exit_code = 2


class UserCodeError(RuntimeError):
    """The user's code raised outside a rank's loop, for instance in a data worker; the message may quote anything."""


class RunFolderError(ToldError):
    """The run folder cannot be made or written."""

    exit_code = 2
