"""Whether the GPUs that are expected are there: how many, and of which kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightkeeper.supervisor.preflight.nvml import counters
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped
from lightkeeper.words import counted


def look(request: Request, earlier: Mapping[str, Result], nvml: Any = None) -> Result:
    """Counts them by NVML; GPUs of two kinds in one node are a fault too."""
    found, why = counters(nvml)
    names = [str(gpu["name"]) for gpu in found]
    evidence = {"names": names, "uuids": [gpu["uuid"] for gpu in found], "why_none": why}
    if request.gpus is None and not request.gpu_name and not found:
        return skipped(f"no GPU, and none is expected: {why or 'NVML counts none'}", evidence)
    if request.gpus is not None and len(found) != request.gpus:
        told = f": {why}" if why else ""
        return failed(f"{counted(request.gpus, 'GPU')} expected, {len(found)} found{told}", evidence)
    if request.gpu_name and not found:
        return failed(f"a GPU named {request.gpu_name!r} is expected, none is found: {why}", evidence)
    strange = sorted({name for name in names if request.gpu_name not in name})
    if strange:
        return failed(f"{request.gpu_name!r} is expected, found {', '.join(strange)}", evidence)
    if len(set(names)) > 1:
        return failed(f"GPUs of several kinds: {', '.join(sorted(set(names)))}", evidence)
    return ok(f"{len(found)} x {names[0]}" if found else "none, as expected", evidence)
