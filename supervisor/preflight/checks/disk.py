"""Whether the disks have room: bytes, and names for files."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped

GIB = 1 << 30


def look(request: Request, earlier: Mapping[str, Result]) -> Result:
    """Of each `--disk PATH:GIB`, and of the folder for checkpoints, whose room is said."""
    asked = dict(request.disks)
    if request.checkpoint:
        asked.setdefault(request.checkpoint, 0.0)
    if not asked:
        return skipped("no --disk PATH:GIB is given")
    wrong, told, evidence = [], [], {}
    for path, gib in asked.items():
        try:
            stat = os.statvfs(path)
        except OSError as error:
            wrong.append(f"{path}: {error.strerror or error}")
            continue
        free = stat.f_bavail * stat.f_frsize
        evidence[path] = {"free_bytes": free, "free_files": stat.f_favail, "files": stat.f_files}
        if free < gib * GIB:
            wrong.append(f"{path}: {free / GIB:.1f} GiB free, {gib:g} needed")
        elif stat.f_files and not stat.f_favail:  # some file systems do not count files at all
            wrong.append(f"{path}: no more files can be made")
        else:
            told.append(f"{path}: {free / GIB:.1f} GiB free")
    return failed("; ".join(wrong), evidence) if wrong else ok("; ".join(told), evidence)
