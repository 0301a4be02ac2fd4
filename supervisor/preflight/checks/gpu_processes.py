"""Whether a process holds memory of a GPU: a rank of an earlier run, or somebody else's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightkeeper.supervisor.preflight.nvml import counters
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok

FREE_BYTES_MAX = 2 << 30  # what the driver itself takes of a large GPU is several hundred MiB


def look(request: Request, earlier: Mapping[str, Result], nvml: Any = None) -> Result:
    """Names the processes; memory in use by nobody that can be seen counts too (another container's process)."""
    found, _ = counters(nvml)
    holders, evidence = [], []
    for gpu in found:
        pids, used = gpu["pids"], gpu["memory_used_bytes"]
        evidence.append({"index": gpu["index"], "pids": pids, "memory_used_bytes": used})
        if isinstance(pids, list) and pids:
            who = ", ".join(f"{pid} ({_command(pid)})" for pid in pids[:4])
            holders.append(f"GPU {gpu['index']} is used by process {who}")
        elif isinstance(used, int) and used > FREE_BYTES_MAX:
            holders.append(f"GPU {gpu['index']}: {used / 2**30:.1f} GiB in use by a process that cannot be seen here")
    if holders:
        return failed("; ".join(holders), {"gpus": evidence})
    return ok(f"nobody uses the {len(found)} GPUs", {"gpus": evidence})


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read(64).decode(errors="replace").strip()
    except OSError:
        return "not of this container"
