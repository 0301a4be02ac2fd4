"""`lightkeeper chaos run`: one fault, on a job of its own, judged."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import msgspec

from lightkeeper.chaos import checkers
from lightkeeper.chaos.acts import CannotStrike
from lightkeeper.chaos.checkers import Check, Outcome, Struck
from lightkeeper.chaos.faults import Plan, named, plan
from lightkeeper.chaos.journal import Journal, begun
from lightkeeper.chaos.strikes import Strike, Striker
from lightkeeper.chaos.supervised import Supervised
from lightkeeper.chaos.workloads import Workload
from lightkeeper.demo.runner import new_folder
from lightkeeper.errors import ToldError
from lightkeeper.events import read_run


def run(name: str, seed: int, wanted: Path | None, as_json: bool) -> int:
    """Starts a job, does the fault, ends the job, prints what held.

    Returns:
        0 if every check holds, else 1.
    """
    planned = plan(named(name), seed)
    folder = new_folder(wanted, "chaos")
    journal = Journal(
        folder, f"lightkeeper chaos run {name} --seed {seed}", {"name": name, "seed": seed}, teller(as_json)
    )
    journal.write("planned", **planned.as_dict())
    with ended_by_sigterm():
        checks = _run(planned, folder, journal)
    return report(f"chaos run {name}", checks, journal, folder, as_json)


def repeat(folder: Path, wanted: Path | None, as_json: bool) -> int:
    """Does again what a journal tells; arguments and result as of `run`."""
    entry = begun(folder)
    asked = entry["asked"]
    teller(as_json)(entry["command"])
    if "minutes" in asked:
        from lightkeeper.chaos.soak import soak

        supervised = asked.get("supervised", False)
        return soak(asked["minutes"], asked["seed"], asked["interval_s"], supervised, wanted, as_json)
    return run(asked["name"], asked["seed"], wanted, as_json)


def _run(planned: Plan, folder: Path, journal: Journal) -> list[Check]:
    shape, done, trouble = planned.fault.shape, Strike(planned), ""
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    codes: dict[str, int | None] = {}
    left: list[str] = []
    inside = {planned.victim: planned.inside} if planned.inside else {}
    with Supervised(folder, shape, planned.seed) if shape.supervised else Workload(folder, shape, planned.seed) as job:
        try:
            journal.write("started", f"{len(shape.names)} groups are started, in {folder}")
            if isinstance(job, Workload):
                job.start(inside, cold=planned.victim if planned.inside_again else "")
            else:
                job.start()
            unhurt = set(shape.names) - {planned.roles[role] for role in planned.fault.expected.lost} - {planned.victim}
            job.await_steps(set(shape.names), 2, "all train")
            before = job.descriptors(unhurt)
            if not planned.inside:
                job.until(lambda: job.step_of(planned.victim) >= planned.step, f"step {planned.step}")
            done = Striker(job, journal).strike(planned)
            after = job.descriptors(unhurt)
            codes = job.finish()
            left = job.leftovers()
        except CannotStrike:
            raise
        except ToldError as error:
            trouble = str(error)
            journal.write("trouble", trouble)
            codes = job.exit_codes()
    struck = Struck(planned, tuple(done.back))
    return checkers.check(Outcome(
        read_run(folder).events, shape.names, [struck], codes, left, before, after, trouble, shape.supervised,
    ))  # fmt: skip


def report(title: str, checks: Sequence[Check], journal: Journal, folder: Path, as_json: bool) -> int:
    """Prints the checks, and what repeats the run; 0 if all hold."""
    result = checkers.as_dict(checks)
    journal.write("result", **result)
    if as_json:
        said = {"chaos": title, "command": journal.command, "run_folder": str(folder), **result}
        sys.stdout.write(msgspec.json.encode(said).decode() + "\n")
    else:
        show(checks)
        print(f"journal {journal.path}; again: {journal.command}")
    return 0 if result["ok"] else 1


def show(checks: Sequence[Check]) -> None:
    """A line for each."""
    width = max((len(each.name) for each in checks), default=0)
    for each in checks:
        print(f"{'ok' if each.holds else 'FAILED':<7} {each.name:<{width}}  {each.text}")


def teller(as_json: bool) -> Callable[[str], None]:
    """Where lines on the way go: beside the one object of ``--json``."""
    return lambda line: print(line, file=sys.stderr if as_json else sys.stdout, flush=True)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what is running as an interrupt does: with all its processes."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
