"""Whether the memory of a GPU is damaged: uncorrected ECC errors, and rows that wait to be remapped or could not be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightkeeper.supervisor.preflight.nvml import counters
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped


def look(request: Request, earlier: Mapping[str, Result], nvml: Any = None) -> Result:
    """Fails for errors since the driver was loaded, a remap that waits for a reset, and one that failed.

    Rows that were remapped are no fault: that is how the memory is mended. They are said.
    """
    found, _ = counters(nvml)
    wrong: list[str] = []
    silent: list[str] = []
    remapped = 0
    evidence = []
    for gpu in found:
        ecc, rows = gpu["ecc_uncorrected"], gpu["remapped_rows"]
        evidence.append({"index": gpu["index"], "ecc_uncorrected": ecc, "remapped_rows": rows})
        if isinstance(ecc, int) and ecc:
            wrong.append(f"GPU {gpu['index']}: {ecc} uncorrected ECC errors")
        if isinstance(rows, list):
            _, uncorrectable, pending, failure = rows
            remapped += uncorrectable
            if failure:
                wrong.append(f"GPU {gpu['index']}: a row could not be remapped; it must be replaced")
            elif pending:
                wrong.append(f"GPU {gpu['index']}: a row waits to be remapped; it must be reset")
        if not isinstance(ecc, int) and not isinstance(rows, list):
            silent.append(str(gpu["index"]))
    if wrong:
        return failed("; ".join(wrong), {"gpus": evidence})
    if len(silent) == len(found):
        return skipped("these GPUs tell neither ECC errors nor remapped rows", {"gpus": evidence})
    return ok(f"no uncorrected error; {remapped} rows remapped for one", {"gpus": evidence})
