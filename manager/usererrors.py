"""An exception that starts in the user's code is the user's bug: told to the manager before it ends this rank.

A collective of the group's own fails in the user's code as well when another of its ranks dies. Which of the two it is,
the manager finds out; here is only seen what kind of exception it is.
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TextIO

import torch.distributed as dist

from lightkeeper.errors import ToldError, UserCodeError
from lightkeeper.manager import local
from lightkeeper.manager.within import Apart
from lightkeeper.words import say

TEXT_CHARS_MAX = 16_384
CHAIN_MAX = 16
_BROKEN = re.compile(r"gloo/transport|gloo::IoException|NCCL (error|communicator)")
_previous = sys.excepthook


def report_exceptions(
    send: Callable[[local.RankError], None], step: Callable[[], int], quiet: tuple[type[BaseException], ...]
) -> None:
    """Sends a `RankError` for an exception that nothing catches, then lets Python print it as always.

    What a person can put right is told in one line, and ends the process with its own code.

    Args:
        send: sends it to the group's manager.
        step: the step at which the rank is.
        quiet: exceptions that are not the user's: the manager knows of them.
    """
    stream = sys.stderr  # as in `tell_in_one_line`

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt) and not isinstance(error, quiet):
            text = "".join(traceback.format_exception(kind, error, trace))
            send(
                local.RankError(
                    step=step(),
                    type=kind.__name__,
                    message=str(error)[:TEXT_CHARS_MAX],
                    where=innermost(trace),
                    traceback=text[-TEXT_CHARS_MAX:],
                    broken=is_broken(error),
                )
            )
        if isinstance(error, quiet):
            say(f"lightkeeper: {error}")
        elif isinstance(error, ToldError):
            _tell_and_end(error, trace, stream)
        else:
            _previous(kind, error, trace)

    sys.excepthook = hook


def tell_in_one_line() -> None:
    """Until there is a manager to send to: what a person can put right is told in one line, all else as always.

    The process then ends with the error's own code, as the command line does.
    """
    stream = sys.stderr  # torch's own hook, around this one, keeps what is printed until this one returns

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ToldError):
            _previous(kind, error, trace)
            return
        _tell_and_end(error, trace, stream)

    sys.excepthook = hook


def _tell_and_end(error: ToldError, trace: TracebackType | None, stream: TextIO) -> None:
    """One line, no traceback, but with the place in the user's own code."""
    where = user_frame(trace)
    with contextlib.redirect_stderr(stream):
        say(f"lightkeeper: {error}{f' ({where})' if where else ''}")
    if error.exit_code != 1:
        raise SystemExit(error.exit_code)  # out of this hook, that is what Python ends with


def is_broken(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised from, is that of a collective whose connection broke.

    A data set may read over the network, and its error quotes what it met there: only what names the library of the
    group's own collectives counts, and never what is known to come from elsewhere.
    """
    for _ in range(CHAIN_MAX):
        if error is None:
            return False
        if isinstance(error, Apart | dist.DistError):
            return True
        if isinstance(error, ToldError | UserCodeError):
            return False
        if isinstance(error, RuntimeError) and _BROKEN.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def user_frame(trace: TracebackType | None) -> str:
    """``train.py:12`` of the innermost frame that is not the runtime's own; empty if there is none."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(trace) if not _is_own(frame)]
    if not frames:
        return ""
    frame, line = frames[-1]
    return f"{Path(frame.f_code.co_filename).name}:{line}"


def _is_own(frame: FrameType) -> bool:
    """The runtime's, or what Python runs when the runtime is imported."""
    module = str(frame.f_globals.get("__name__", ""))
    if module.partition(".")[0] == "importlib":
        return True
    return module.startswith("lightkeeper.") and not module.startswith("lightkeeper.examples.")


def innermost(trace: TracebackType | None) -> str:
    """``file.py:12 in name`` of the frame in which the exception was raised; alike in all groups for one bug."""
    frames = traceback.extract_tb(trace)
    if not frames:
        return ""
    last = frames[-1]
    return f"{Path(last.filename).name}:{last.lineno} in {last.name}"
