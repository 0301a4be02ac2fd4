"""Whether memory is free: what the node has left, or the share of it that this process's group of processes may use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok

CGROUP = Path("/sys/fs/cgroup")
GIB = 1 << 30


def look(request: Request, earlier: Mapping[str, Result], cgroup: Path = CGROUP) -> Result:
    """Judged if `--memory-gib` says how much is needed; said in any case."""
    import psutil

    memory = psutil.virtual_memory()
    allowed = cgroup_free(cgroup)
    free = memory.available if allowed is None else min(memory.available, allowed)
    evidence = {"available_bytes": memory.available, "total_bytes": memory.total, "cgroup_free_bytes": allowed}
    told = f"{free / GIB:.1f} GiB free" + (" of what the container may use" if free != memory.available else "")
    if free < request.memory_gib * GIB:
        return failed(f"{told}, {request.memory_gib:g} needed", evidence)
    return ok(told if request.memory_gib else f"{told} (--memory-gib says how much is needed)", evidence)


def cgroup_free(root: Path = CGROUP) -> int | None:
    """Bytes that the control group leaves; None if it sets no bound. Both versions of control groups are known."""
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            highest, used = ((root / name).read_text().strip() for name in (limit, usage))
        except OSError:
            continue
        if highest != "max" and int(highest) < 1 << 62:  # version 1 says "no bound" by a number near 2**63
            return max(0, int(highest) - int(used))
    return None
