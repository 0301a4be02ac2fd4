"""Whether a GPU is slowed by heat or power: it would slow everybody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightkeeper.supervisor.preflight.nvml import BAD_REASONS, clocks, counters
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped


def look(request: Request, earlier: Mapping[str, Result], nvml: Any = None) -> Result:
    """By the reasons that NVML gives; the clocks are evidence alone, since idle GPUs are slow as well."""
    found, _ = counters(nvml)
    wrong, told, evidence = [], 0, []
    for gpu, clock in zip(found, clocks(nvml), strict=True):
        reasons = gpu["throttle_reasons"]
        evidence.append({"index": gpu["index"], "reasons": reasons, "temperature_c": gpu["temperature_c"], **clock})
        try:
            bits = int(reasons, 16)
        except ValueError:
            continue  # the text of NVML's error: this GPU does not tell
        told += 1
        why = [name for bit, name in BAD_REASONS.items() if bits & bit]
        if why:
            wrong.append(f"GPU {gpu['index']}: {', '.join(why)} at {gpu['temperature_c']} C")
    if wrong:
        return failed("; ".join(wrong), {"gpus": evidence})
    if not told:
        return skipped("no GPU tells whether it is slowed", {"gpus": evidence})
    return ok(f"none of {told} GPUs is slowed", {"gpus": evidence})
