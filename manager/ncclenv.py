"""What torch's NCCL backend is told by environment variables: `docs/nccl.md` is the table.

Inside a group it shall fail fast: a group whose ranks lost each other is of no use, and comes back by a heal. But not
before its runtime can act, for which every time-out must be above the longest that a rank may rightly take. Across the
groups it shall never end a process: a peer that is gone is what this package is for.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator, Mapping, MutableMapping

from lightkeeper.errors import UsageError
from lightkeeper.manager.timeouts import Timeouts

HANDLING, MONITORING = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"
HEARTBEAT, NONBLOCKING = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_NONBLOCKING_TIMEOUT"
BLOCKING, RECORDED = "TORCH_NCCL_BLOCKING_WAIT", "TORCH_FR_BUFFER_SIZE"
HEARTBEAT_S = 480  # torch's own
TEARS_DOWN = ("1", "3")  # of torch's four ways to handle an error
OLD_NAMES = {  # torch still reads them
    HANDLING: "NCCL_ASYNC_ERROR_HANDLING",
    BLOCKING: "NCCL_BLOCKING_WAIT",
    RECORDED: "TORCH_NCCL_TRACE_BUFFER_SIZE",
}
ACROSS_GROUPS = {HANDLING: "0", MONITORING: "0", BLOCKING: "0"}
_changing = threading.Lock()


def unset(environment: Mapping[str, str], timeouts: Timeouts) -> dict[str, str]:
    """The variables of the table that nobody has set, with the values that they get."""
    wanted = {
        HANDLING: "3",  # with 1 the watchdog aborts what the flight recorder is to show (pytorch issue 121055)
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        RECORDED: "2000",
        HEARTBEAT: str(timeouts.heartbeat_s),
        NONBLOCKING: str(math.ceil(timeouts.form_timeout_s)),
    }
    return {
        name: value
        for name, value in wanted.items()
        if name not in environment and OLD_NAMES.get(name, name) not in environment
    }


def settle(environment: MutableMapping[str, str], timeouts: Timeouts, made: bool) -> list[str]:
    """Sets what nobody has set, and checks the rest.

    Args:
        environment: of this process; changed.
        timeouts: the group's.
        made: whether the group has process groups over NCCL already: they read it when they were made.

    Returns:
        Lines on what is kept and may do harm, or was set too late.

    Raises:
        UsageError: a variable would end the process before this package can act.
    """
    lines = []
    missing = unset(environment, timeouts)
    if made and HEARTBEAT in missing and _watched(environment) and timeouts.reduce_timeout_s >= HEARTBEAT_S:
        lines.append(
            f"{HEARTBEAT} was not set when the group's NCCL process groups were made, and torch's {HEARTBEAT_S} s must "
            f"be above {timeouts.said('reduce_timeout_s')}: set it to {timeouts.heartbeat_s} where this is started"
        )
    if HEARTBEAT in environment:
        _check_heartbeat(environment, timeouts)
    handling = _value(environment, HANDLING)
    if handling is not None and handling not in TEARS_DOWN:
        lines.append(
            f"{HANDLING}={handling}: kept, but a group whose ranks lost each other then stands until its progress "
            f"deadline; give {' or '.join(TEARS_DOWN)}"
        )
    if NONBLOCKING in environment and (seconds := _number(environment, NONBLOCKING)) >= timeouts.outage_budget_s:
        lines.append(
            f"{NONBLOCKING}={seconds:g}: kept, but it must be below {timeouts.said('outage_budget_s')}: an epoch that "
            "does not form must be tried again before anybody gives up"
        )
    environment.update(missing)
    return lines


@contextlib.contextmanager
def across_groups(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """A process group that is made inside ends no process: not by an error, nor by a watchdog that stands.

    torch reads these variables when it makes one, so they are others for so long. One thread at a time.
    """
    with _changing:
        before = {name: environment.get(name) for name in ACROSS_GROUPS}
        environment.update(ACROSS_GROUPS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del environment[name]
                else:
                    environment[name] = value


def _check_heartbeat(environment: Mapping[str, str], timeouts: Timeouts) -> None:
    seconds = _number(environment, HEARTBEAT)
    if seconds <= timeouts.reduce_timeout_s and _watched(environment):
        raise UsageError(
            f"{HEARTBEAT}={seconds:g} must be above {timeouts.said('reduce_timeout_s')}: NCCL's watchdog would end the "
            f"process before this package can act; leave it out ({timeouts.heartbeat_s} is set then), or {MONITORING}=0"
        )


def _watched(environment: Mapping[str, str]) -> bool:
    return environment.get(MONITORING, "1").lower() not in ("0", "n", "no", "f", "false")


def _value(environment: Mapping[str, str], name: str) -> str | None:
    return environment.get(name, environment.get(OLD_NAMES.get(name, name)))


def _number(environment: Mapping[str, str], name: str) -> float:
    """Raises UsageError: it is none."""
    try:
        return int(environment[name])
    except ValueError as error:
        raise UsageError(f"{name}={environment[name]!r} is not a whole number of seconds") from error
