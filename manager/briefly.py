"""An error as short as a person on call wants to read it: one line, of a broken connection only what broke and where.

Pure: a text in, a text out. The events keep the whole text.
"""

from __future__ import annotations

import re

_PLACE = re.compile(r"\[[^\]\s]*\.(?:cc|cpp|h):\d+\] ?")  # of the line in gloo's source
_ADVICE = re.compile(r"\.? ?This is typically caused by .*|\.? ?Check the logs of the remote .*| ?GLHF!.*")
_TRACE = re.compile(r"Exception raised from .*")
_IO_ERROR = re.compile(r"\b(?:Read|Write) error (\S+): (Connection reset by peer|Broken pipe)")
_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:(\d+)")
_CAPITAL = re.compile(
    r"\b(?:Connection|Read|Write|Socket closed|Connect timeout|Application timeout|Timed out|Broken pipe)\b"
)


def briefly(error: str) -> str:
    """`connection closed by peer 127.0.0.1:1234`, whatever torch says around that; of other texts the first line.

    What follows the first line is most often a traceback; the events have it.
    """
    first = error.strip().partition("\n")[0].rstrip()
    if _PLACE.search(first) is None and _ADVICE.search(first) is None:
        return first
    text = _ADVICE.sub("", _TRACE.sub("", _PLACE.sub("", first))).strip()
    text = _ADDRESS.sub(_address, _IO_ERROR.sub(r"\2 \1", text))
    return _CAPITAL.sub(lambda found: found.group()[0].lower() + found.group()[1:], text)


def _address(found: re.Match[str]) -> str:
    host, port = found.groups()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
