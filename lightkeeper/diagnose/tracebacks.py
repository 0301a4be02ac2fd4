"""Which lines of a log belong to a Python or C++ stack, which name an exception, and which exceptions are one chain.

The source that a stack quotes is no evidence (`raise RuntimeError("NCCL error")` may stand there without having been
run), so its lines are passed over. Of a chain the first exception is the cause: what was raised while it was handled,
or because of it, came after it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightkeeper.diagnose.lines import Line

BEGIN = re.compile(r"^\s*(?:traceback : )?(?:Original )?Traceback \(most recent call last\)")
_ORIGINAL = re.compile(r"^\s*Original Traceback")
_CHAINED = re.compile(
    r"^\s*(?:The above exception was the direct cause of|During handling of the above exception, another)"
)
_IGNORED = re.compile(r"^Exception ignored in|^Exception in thread (?!MainThread)")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line \d+')
_CODE = re.compile(r"^\s{4,}\S|^\s+\[Previous line repeated")
_NATIVE = re.compile(r"^\s*(?:frame )?#\d+:? |^Exception raised from |^\s*C\+\+ CapturedTraceback")
_BOX = re.compile(r"^\s*[│╭╰┃┏┗]")  # rich's tracebacks
_BOX_END = re.compile(r"^\s*╰─")
_NAME = re.compile(r"^\s*[A-Za-z_][\w.]*(?:\[[^\]]*\])?(?::|\s*$|\()")
_LOADER = re.compile(r"torch/utils/data/_utils/(?:worker|fetch|collate)\.py")
CODE_AFTER_FRAME = 3  # a quoted line and its carets


@dataclass(frozen=True)
class Place:
    """What a line is.

    Attributes:
        part: "stack": passed over; "exception": names one; "": any other line.
        chain: which chain of exceptions it belongs to, -1 for none.
        loader: whether the exception came out of a data loader.
        ignored: whether Python itself said that it goes on.
    """

    part: str = ""
    chain: int = -1
    loader: bool = False
    ignored: bool = False


@dataclass
class _Stack:
    open: bool = False
    frame: int = -9  # lines since the last `File "..."`
    indent: int = 0  # of that line: the source that it quotes stands further in
    chain: int = -1
    linked: bool = False
    loader: bool = False
    ignored: bool = False


class Tracebacks:
    """Told every line in order; the ranks of one log, where its lines name them, are followed apart."""

    def __init__(self) -> None:
        self._stacks: dict[int | None, _Stack] = {}
        self._chains = 0

    def place(self, line: Line) -> Place:
        """What this line is."""
        stack = self._stacks.setdefault(line.rank, _Stack())
        text = line.text
        stack.frame += 1
        if BEGIN.match(text):
            if not (stack.linked or _ORIGINAL.match(text)):
                self._chains += 1
                stack.chain, stack.loader = self._chains, False
            stack.open, stack.linked, stack.frame = True, False, -1
            return Place("stack", stack.chain)
        if _CHAINED.match(text):
            stack.linked = True
            return Place("stack", stack.chain)
        if _IGNORED.match(text):
            stack.ignored = True
            return Place("stack")
        if found := _FRAME.match(text):
            stack.frame, stack.indent = 0, _indent(text)
            stack.loader = stack.loader or bool(_LOADER.search(found["file"]))
            return Place("stack", stack.chain)
        if _NATIVE.match(text) or (_BOX.match(text) and not _BOX_END.match(text)):
            return Place("stack", stack.chain)
        if _BOX_END.match(text):  # what follows a box is its exception
            if not stack.linked:
                self._chains += 1
                stack.chain = self._chains
            stack.open, stack.linked = True, False
            return Place("stack", stack.chain)
        quoted = _CODE.match(text) and _indent(text) > stack.indent
        if stack.open and quoted and 0 <= stack.frame <= CODE_AFTER_FRAME:
            return Place("stack", stack.chain)
        return self._after(stack, text)

    def _after(self, stack: _Stack, text: str) -> Place:
        if not stack.open or not text.strip():
            return Place()
        if not _NAME.match(text):
            return Place()  # another rank's line in between: the exception is still to come
        stack.open = False
        ignored, stack.ignored = stack.ignored, False
        return Place("exception", stack.chain, stack.loader, ignored)


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())
