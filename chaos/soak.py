"""`lightkeeper chaos soak`: one fault after another, drawn from a seed, on one job, for some minutes.

When each fault is due and whom it hits is a pure function of seed and minutes. A fault waits for the one before it to
be mended, and for all groups to train again: so a slow machine does fewer of the same faults in the same order.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

from lightkeeper.chaos import checkers
from lightkeeper.chaos.acts import CannotStrike
from lightkeeper.chaos.checkers import Check, Outcome, Struck
from lightkeeper.chaos.faults import FAULTS, ONES, RUN, Fault, Plan, plan
from lightkeeper.chaos.journal import Journal
from lightkeeper.chaos.run import ended_by_sigterm, report, teller
from lightkeeper.chaos.strikes import Striker
from lightkeeper.chaos.supervised import Supervised
from lightkeeper.chaos.workloads import Workload
from lightkeeper.demo.runner import new_folder
from lightkeeper.errors import ToldError
from lightkeeper.events import read_run

RESTARTS = 1_000_000
BACK_S_MAX = 700.0  # a group that dies again and again is held back, longer each time
SEEDS = 1 << 31


@dataclass(frozen=True)
class Due:
    """A fault of the schedule, and when it is due: seconds after all groups train."""

    at_s: float
    plan: Plan


def schedule(minutes: float, seed: int, interval_s: float, supervised: bool = False) -> list[Due]:
    """All faults of a soak: the same for the same arguments. A supervised one does each class once, and then again."""
    chance = random.Random(f"soak {seed}")
    drawn = [fault for fault in FAULTS.values() if fault.soak and (supervised or not fault.shape.supervised)]
    count = int(60 * minutes / interval_s)
    if not supervised:
        return [Due(interval_s * n, plan(chance.choice(drawn), chance.randrange(SEEDS))) for n in range(count)]
    order: list[Fault] = []
    while len(order) < count:
        order += chance.sample(drawn, len(drawn))
    return [Due(interval_s * n, plan(fault, chance.randrange(SEEDS))) for n, fault in enumerate(order[:count])]


def soak(minutes: float, seed: int, interval_s: float, supervised: bool, wanted: Path | None, as_json: bool) -> int:
    """Starts a job, does one fault after another, ends the job, prints what held.

    Returns:
        0 if every check holds, else 1.
    """
    dues = schedule(minutes, seed, interval_s, supervised)
    folder = new_folder(wanted, "soak")
    command = f"lightkeeper chaos soak --minutes {minutes:g} --seed {seed} --interval-s {interval_s:g}"
    command += " --supervised" if supervised else ""
    asked = {"minutes": minutes, "seed": seed, "interval_s": interval_s, "supervised": supervised}
    journal = Journal(folder, command, asked, teller(as_json))
    for due in dues:
        journal.write("planned", due_s=due.at_s, **due.plan.as_dict())
    with ended_by_sigterm():
        job = Supervised(folder, RUN, seed) if supervised else Workload(folder, ONES, seed, RESTARTS, warm=True)
        with job:
            checks = _soak(job, dues, 60 * minutes, journal)
    return report("chaos soak", checks, journal, folder, as_json)


def _soak(job: Supervised | Workload, dues: list[Due], for_s: float, journal: Journal) -> list[Check]:
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    codes: dict[str, int | None] = {}
    left: list[str] = []
    struck: list[Struck] = []
    trouble = ""
    striker, names = Striker(job, journal, BACK_S_MAX), set(ONES.names)
    try:
        journal.write("started", f"{len(names)} groups are started, in {job.folder}")
        job.start()
        job.await_steps(names, 2, "all train")
        before, began_s = job.descriptors(names), time.monotonic()
        for due in dues:
            until_s = began_s + due.at_s
            job.until(lambda until_s=until_s: time.monotonic() >= until_s, "the next fault is due", for_s)  # type: ignore[misc]
            if time.monotonic() - began_s > for_s:
                journal.write("skipped", f"{due.plan.fault.name}: the time is over", **due.plan.as_dict())
                continue
            _one(striker, due.plan, struck, journal)
        after = job.descriptors(names)
        codes, left = job.finish(), job.leftovers()
    except ToldError as error:
        trouble = str(error)
        journal.write("trouble", trouble)
        codes = job.exit_codes()
    supervised = isinstance(job, Supervised)
    return checkers.check(Outcome(
        read_run(job.folder).events, ONES.names, struck, codes, left, before, after, trouble, supervised,
    ))  # fmt: skip


def _one(striker: Striker, planned: Plan, struck: list[Struck], journal: Journal) -> None:
    try:
        done = striker.strike(planned)
    except CannotStrike as error:
        journal.write("skipped", f"{planned.fault.name}: {error}", **planned.as_dict())
        return
    except ToldError:
        struck.append(Struck(planned))  # for what is said of it at the end
        raise
    struck.append(Struck(planned, tuple(done.back)))
