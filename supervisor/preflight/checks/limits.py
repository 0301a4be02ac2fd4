"""Whether the limits of this process are wide enough for a trainer: open files, locked memory, shared memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from lightkeeper.supervisor.preflight.checks.infiniband import INFINIBAND, ports
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok

GIB = 1 << 30
LOCKED_BYTES_MIN = 1 << 30  # InfiniBand locks all buffers that it sends from; fewer end in "cannot allocate memory"


def look(request: Request, earlier: Mapping[str, Result], shm: str = "/dev/shm", root: Path = INFINIBAND) -> Result:
    """Soft limits, which are what a rank starts with; locked memory matters where there is InfiniBand."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    wrong = []
    if files != resource.RLIM_INFINITY and files < request.open_files:
        wrong.append(f"{files} open files allowed, {request.open_files} needed (ulimit -n)")
    if ports(root) and locked != resource.RLIM_INFINITY and locked < LOCKED_BYTES_MIN:
        wrong.append(f"{locked} bytes of locked memory allowed, InfiniBand needs more (ulimit -l unlimited)")
    try:
        stat = os.statvfs(shm)
        size = stat.f_blocks * stat.f_frsize
    except OSError as error:
        size = 0
        wrong.append(f"{shm}: {error.strerror or error}")
    else:
        if size < request.shm_gib * GIB:
            wrong.append(f"{shm} has {size / GIB:.3g} GiB, {request.shm_gib:g} needed (docker's --shm-size)")
    evidence = {"open_files": files, "locked_bytes": locked, "shm_bytes": size}
    if wrong:
        return failed("; ".join(wrong), evidence)
    return ok(f"{_many(files)} open files, {_many(locked)} bytes locked, {size / GIB:.1f} GiB shared", evidence)


def _many(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
