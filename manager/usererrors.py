"""An exception that starts in the user's code is the user's bug: told to the manager before it ends this rank."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from lightkeeper.errors import ToldError
from lightkeeper.manager import local
from lightkeeper.words import say

TEXT_CHARS_MAX = 16_384
_previous = sys.excepthook


def report_exceptions(
    send: Callable[[local.RankError], None], step: Callable[[], int], quiet: tuple[type[BaseException], ...]
) -> None:
    """Sends a `RankError` for an exception that nothing catches, then lets Python print it as always.

    Args:
        send: sends it to the group's manager.
        step: the step at which the rank is.
        quiet: exceptions that are not the user's: the manager knows of them.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told = isinstance(error, ToldError)
        if not issubclass(kind, KeyboardInterrupt) and not isinstance(error, quiet):
            text = "".join(traceback.format_exception(kind, error, trace))
            send(
                local.RankError(
                    step=step(),
                    type=kind.__name__,
                    message=str(error)[:TEXT_CHARS_MAX],
                    where=innermost(trace),
                    traceback=text[-TEXT_CHARS_MAX:],
                )
            )
        if told:  # one line, no traceback
            say(f"lightkeeper: {error}")
        else:
            _previous(kind, error, trace)

    sys.excepthook = hook


def innermost(trace: TracebackType | None) -> str:
    """``file.py:12 in name`` of the frame in which the exception was raised; alike in all groups for one bug."""
    frames = traceback.extract_tb(trace)
    if not frames:
        return ""
    last = frames[-1]
    return f"{Path(last.filename).name}:{last.lineno} in {last.name}"
