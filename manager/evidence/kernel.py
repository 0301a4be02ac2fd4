"""The kernel's own words on an incident: the OOM killer, Xid errors of a GPU, a segmentation fault, a failing disk."""

from __future__ import annotations

import os
import re

KMSG = "/dev/kmsg"
RECORD_BYTES_MAX = 8192  # the kernel's own bound on one record
LINES_MAX = 500
TELLING = re.compile(
    r"NVRM|Xid|[Oo]ut of memory|oom[-_ ]?kill|oom_reaper|Killed process|segfault|general protection|trap |"
    r"I/O error|hung_task|blocked for more than|MCE|Hardware Error|EDAC|nvidia-nvlink|mlx5|Remounting filesystem"
)


def kernel_lines(since_s: float, path: str = KMSG) -> tuple[list[str], str]:
    """What the kernel has said that may have ended a process.

    Args:
        since_s: seconds since boot, as CLOCK_MONOTONIC; what was said before is left out.
        path: the kernel's log.

    Returns:
        The lines, oldest first, each with its seconds since boot; and why there are none, empty if it could be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return [], f"{path}: {error.strerror or error}"
    found: list[str] = []
    try:
        while True:
            try:
                record = os.read(descriptor, RECORD_BYTES_MAX)
            except BrokenPipeError:
                continue  # the ring has moved on: the next read goes on with what is left
            except BlockingIOError:
                break
            if not record:
                break
            line = _line_of(record, since_s)
            if line is not None and TELLING.search(line):
                found.append(line)
    except OSError as error:
        return found[-LINES_MAX:], f"{path}: {error.strerror or error}"
    finally:
        os.close(descriptor)
    return found[-LINES_MAX:], ""


def _line_of(record: bytes, since_s: float) -> str | None:
    """``6,339,5140900,-;text`` and continuation lines as one line; None for one that is older."""
    prefix, _, text = record.decode(errors="replace").partition(";")
    try:
        at_s = int(prefix.split(",")[2]) / 1e6
    except (IndexError, ValueError):
        return None
    return f"[{at_s:.6f}] {text.partition(chr(10))[0]}" if at_s >= since_s else None
