"""Whether the CPUs are slowed: by heat, counted while it is looked, or by a frequency that somebody has capped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped

CPUS = Path("/sys/devices/system/cpu")
WINDOW_S = 1.0
CAPPED_SHARE = 0.7  # of its highest frequency: a cap below that is no fine tuning


def look(request: Request, earlier: Mapping[str, Result], cpus: Path = CPUS, window_s: float = WINDOW_S) -> Result:
    """Two looks at the counters; those of long ago are said alone."""
    before = _throttled(cpus)
    caps = _caps(cpus)
    if not before and not caps:
        return skipped(f"{cpus} has neither throttle counters nor frequencies (a virtual machine?)")
    time.sleep(window_s)
    after = _throttled(cpus)
    rising = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
    capped = {name: share for name, share in caps.items() if share < CAPPED_SHARE}
    evidence = {"rising": rising, "capped": capped, "total": sum(after.values())}
    if rising:
        return failed(f"{len(rising)} CPUs are slowed by heat now, e.g. {min(rising)}", evidence)
    if capped:
        name = min(capped)
        return failed(
            f"{len(capped)} CPUs are capped, e.g. {name} at {100 * capped[name]:.0f} % of its clock", evidence
        )
    return ok(f"not slowed; {sum(after.values())} times since it was started", evidence)


def _throttled(cpus: Path) -> dict[str, int]:
    found = {}
    for name in ("core_throttle_count", "package_throttle_count"):
        for path in cpus.glob(f"cpu[0-9]*/thermal_throttle/{name}"):
            found[f"{path.parts[-3]} {name.split('_')[0]}"] = int(path.read_text())
    return found


def _caps(cpus: Path) -> dict[str, float]:
    found = {}
    for path in cpus.glob("cpu[0-9]*/cpufreq/scaling_max_freq"):
        highest = int((path.parent / "cpuinfo_max_freq").read_text())
        if highest > 0:
            found[path.parts[-3]] = int(path.read_text()) / highest
    return found
