"""torchtitan's time-outs of a group's own collectives, which know nothing of groups that wait for each other."""

from __future__ import annotations

import dataclasses
import math

from torchtitan.config import CommConfig

from lightkeeper.errors import UsageError
from lightkeeper.manager.settings import Settings

FIELDS = ("init_timeout_seconds", "train_timeout_seconds")
_TORCHTITANS = CommConfig()


def comm_of(comm: CommConfig, settings: Settings, ranks: int) -> CommConfig:
    """The same, with the group's own time-out where torchtitan's default stands; one rank alone waits for none.

    Raises:
        UsageError: another one is not above the time-out of a reduce across the groups.
    """
    timeouts, changed = settings.timeouts, {}
    for name in FIELDS:
        seconds = getattr(comm, name)
        if seconds == getattr(_TORCHTITANS, name):
            changed[name] = math.ceil(timeouts.collective_timeout_s)
        elif ranks > 1 and seconds <= timeouts.reduce_timeout_s:
            raise UsageError(
                f"comm.{name} {seconds} must be above {timeouts.said('reduce_timeout_s')}: a group's ranks wait for "
                "the one that stands in a reduce; leave it out, or lower outage_budget_s"
            )
    return dataclasses.replace(comm, **changed)
