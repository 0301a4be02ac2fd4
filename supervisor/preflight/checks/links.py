"""Whether the network's interfaces are up, as fast as is asked, and without errors now (sysfs's `class/net`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightkeeper.supervisor.preflight.checks import infiniband
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped
from lightkeeper.words import counted

NET = Path("/sys/class/net")
WINDOW_S = 1.0
COUNTERS = ("rx_errors", "tx_errors", "rx_crc_errors", "rx_missed_errors", "tx_carrier_errors", "rx_dropped")
ALLOWED = frozenset({"rx_dropped"})  # unknown protocols count there too: evidence, no fault


def look(
    request: Request,
    earlier: Mapping[str, Result],
    net: Path = NET,
    ports: Path = infiniband.INFINIBAND,
    window_s: float = WINDOW_S,
) -> Result:
    """An interface that is down is a fault if it was asked for by `--link`: a node may have ports without a cable."""
    before = states(net)
    devices = {name.partition("/")[0] for name in infiniband.ports(ports)}
    asked = {name: gbit for name, gbit in request.links.items() if name.partition("/")[0] not in devices}
    if not before and not asked:
        return skipped(f"{net} has no interface but the loopback")
    time.sleep(window_s)
    after = states(net)
    wrong = [line for name, gbit in asked.items() if (line := _against(name, gbit, after.get(name)))]
    for name, state in after.items():
        for counter, count in state["errors"].items():
            rising = count - before.get(name, state)["errors"].get(counter, count)
            if rising > 0 and counter not in ALLOWED:
                wrong.append(f"{name}: {rising} {counter} within {window_s:g} s")
    if wrong:
        return failed("; ".join(wrong), {"links": after})
    up = [f"{name} {state['gbit']:g} Gbit/s" if state["gbit"] else name for name, state in after.items() if state["up"]]
    return ok(f"{counted(len(up), 'interface')} up: {', '.join(up)}", {"links": after})


def _against(name: str, gbit: float, state: dict[str, Any] | None) -> str:
    if state is None:
        return f"{name}: there is no such interface"
    if not state["up"]:
        return f"{name} is {state['state']}"
    if state["gbit"] is not None and state["gbit"] < gbit:
        return f"{name} runs at {state['gbit']:g} Gbit/s, {gbit:g} expected"
    return ""


def states(net: Path = NET) -> dict[str, dict[str, Any]]:
    """By interface but the loopback: whether it is up, its rate in Gbit/s (None: it does not tell), its errors."""
    found = {}
    for path in sorted(net.iterdir()) if net.is_dir() else []:
        if path.name == "lo" or not path.is_dir():
            continue
        state = _read(path / "operstate") or "unknown"
        speed = _read(path / "speed")
        errors = {name: _read(path / "statistics" / name) for name in COUNTERS}
        found[path.name] = {
            "state": state,
            "up": state == "up" or (state == "unknown" and _read(path / "carrier") == "1"),
            "gbit": int(speed) / 1000 if speed and int(speed) > 0 else None,
            "errors": {name: int(count) for name, count in errors.items() if count},
        }
    return found


def _read(path: Path) -> str:
    """A line of sysfs; empty where the driver does not tell (`speed` of an interface that is down is an error)."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
