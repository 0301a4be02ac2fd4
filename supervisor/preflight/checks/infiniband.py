"""Whether InfiniBand's ports are active, as fast as is asked, and without errors now (sysfs's `class/infiniband`)."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped
from lightkeeper.words import counted

INFINIBAND = Path("/sys/class/infiniband")
WINDOW_S = 1.0
COUNTERS = (
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors",
)  # fmt: skip
_RATE = re.compile(r"([\d.]+) Gb/sec")


def look(
    request: Request, earlier: Mapping[str, Result], root: Path = INFINIBAND, window_s: float = WINDOW_S
) -> Result:
    """A port whose cable is in and that is not active is a fault; one without a cable only if `--link` asks for it."""
    before = ports(root)
    if not before:
        return skipped(f"no InfiniBand device: {root} is {'empty' if root.is_dir() else 'not there'}")
    time.sleep(window_s)
    after = ports(root)
    wrong = []
    for name, port in after.items():
        device = name.partition("/")[0]
        gbit = request.links.get(name, request.links.get(device))
        if not port["active"] and (gbit is not None or port["cable"]):
            wrong.append(f"{name} is {port['state']} ({port['physical']})")
        elif gbit is not None and port["gbit"] < gbit:
            wrong.append(f"{name} runs at {port['gbit']:g} Gbit/s, {gbit:g} expected")
        for counter, count in port["errors"].items():
            rising = count - before.get(name, port)["errors"].get(counter, count)
            if rising > 0:
                wrong.append(f"{name}: {rising} {counter} within {window_s:g} s")
    if wrong:
        return failed("; ".join(wrong), {"ports": after})
    active = [f"{name} {port['gbit']:g} Gbit/s" for name, port in after.items() if port["active"]]
    return ok(f"{counted(len(active), 'port')} active: {', '.join(active)}", {"ports": after})


def ports(root: Path = INFINIBAND) -> dict[str, dict[str, Any]]:
    """By ``device/port``: its states, its rate in Gbit/s, its error counters.

    The files say e.g. ``4: ACTIVE``, ``5: LinkUp``, ``400 Gb/sec (4X NDR)``.
    """
    found = {}
    for path in sorted(root.glob("*/ports/*")):
        state, physical = (_word(path / name) for name in ("state", "phys_state"))
        rate = _RATE.search(_read(path / "rate"))
        errors = {name: _read(path / "counters" / name) for name in COUNTERS}
        found[f"{path.parts[-3]}/{path.name}"] = {
            "state": state,
            "physical": physical,
            "active": state == "ACTIVE",
            "cable": physical == "LinkUp",
            "gbit": float(rate[1]) if rate else 0.0,
            "errors": {name: int(count) for name, count in errors.items() if count},
        }
    return found


def _word(path: Path) -> str:
    return _read(path).partition(": ")[2] or "unknown"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
