"""What this node is made of, as facts; compared with those of another node if `--expect` names them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightkeeper.supervisor.preflight import nvml as devices
from lightkeeper.supervisor.preflight.checks.infiniband import INFINIBAND, ports
from lightkeeper.supervisor.preflight.compare import differences
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok

DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER = re.compile(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)")
_CUDA = re.compile(r"^cuda\b[^=]*=\s*'([^']*)'", re.MULTILINE)


def look(request: Request, earlier: Mapping[str, Result], nvml: Any = None) -> Result:
    """The facts are the evidence: a report in JSON is what another node's `--expect` takes."""
    found = facts(nvml)
    told = ", ".join(f"{name} {found[name]}" for name in ("torch", "torch_cuda", "driver", "nccl") if found[name])
    if wrong := differences(found, request.expect):
        return failed("; ".join(wrong), found)
    return ok(told + (f"; as expected in {len(request.expect)} facts" if request.expect else ""), found)


def facts(nvml: Any = None, infiniband: Path = INFINIBAND) -> dict[str, Any]:
    """What must be the same on all nodes of a job. Nothing is imported for it: torch takes seconds."""
    gpus, _ = devices.counters(nvml)
    found = devices.versions(nvml)
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "lightkeeper": _version("lightkeeper"),
        "torch": _version("torch"),
        "torch_cuda": _torch_cuda(),
        "nccl": _nccl(),
        "driver": found["driver"] or _driver(),
        "driver_cuda": found["driver_cuda"],
        "gpus": [str(gpu["name"]) for gpu in gpus],
        "infiniband": {name: [port["state"], port["gbit"]] for name, port in ports(infiniband).items()},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """The CUDA that torch was built for, from its `version.py`."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        found = _CUDA.search((Path(spec.origin).parent / "version.py").read_text("utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def _nccl() -> str | None:
    """The NCCL that was installed with torch: a package for each CUDA, of which there is at most one."""
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.startswith("nvidia-nccl-cu"):
            return distribution.version
    return None


def _driver() -> str | None:
    try:
        found = _DRIVER.search(DRIVER.read_text("utf-8"))
    except OSError:
        return None
    return found[1] if found else None
