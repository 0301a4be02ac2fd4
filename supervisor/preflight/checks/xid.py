"""Whether the kernel's log has a recent Xid (a GPU's error) or a fatal SXid (an NVSwitch's)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping

from lightkeeper.manager.evidence.kernel import KMSG, kernel_lines
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped

# "Xid Errors" of NVIDIA's GPU deployment pages: these are what a faulty program causes, or follow from its end. Any
# other code speaks against the GPU, those that are not known today too.
OF_PROGRAMS = frozenset({13, 31, 43, 45})
DRIVER = "/proc/driver/nvidia/version"
_XID = re.compile(r"NVRM: Xid \((?P<where>[^)]*)\): (?P<code>\d+)")
_SXID = re.compile(r"SXid \((?P<where>[^)]*)\): (?P<code>\d+), (?P<fatal>Fatal)")


def look(request: Request, earlier: Mapping[str, Result], path: str = KMSG, driver: str = DRIVER) -> Result:
    """Reads the log since `--xid-s` ago."""
    lines, why = kernel_lines(time.clock_gettime(time.CLOCK_MONOTONIC) - request.xid_s, path)
    of_hardware, of_programs = sort_lines(lines)
    evidence = {"lines": [*of_hardware, *of_programs][-20:], "why_none": why}
    if of_hardware:
        return failed(f"{len(of_hardware)} in the last {request.xid_s:.0f} s, the last: {of_hardware[-1]}", evidence)
    if why:
        return skipped(why, evidence)
    if not os.path.exists(driver):
        return skipped("no NVIDIA driver is loaded, and the kernel tells of none", evidence)
    return ok(f"none of hardware, {len(of_programs)} of programs in the last {request.xid_s:.0f} s", evidence)


def sort_lines(lines: list[str]) -> tuple[list[str], list[str]]:
    """Lines that speak against the hardware, and those that a program may have caused."""
    of_hardware: list[str] = []
    of_programs: list[str] = []
    for line in lines:
        if found := _XID.search(line):
            (of_programs if int(found["code"]) in OF_PROGRAMS else of_hardware).append(line)
        elif _SXID.search(line):
            of_hardware.append(line)
    return of_hardware, of_programs
