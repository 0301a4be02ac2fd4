"""One history from its seed: what is planned, what came of it."""

from __future__ import annotations

import dataclasses
import random
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightkeeper.simulator.checkers import Violation
from lightkeeper.simulator.faults import Fault, Faults, draw_plan, draw_stalls
from lightkeeper.simulator.liveness import Liveness
from lightkeeper.simulator.shape import Shape, draw_checkpoints, draw_shape, draw_spares, draw_speeds
from lightkeeper.simulator.world import World

LATE_WINDOWS = 3.0  # of the usual time for a job that goes on well
SETTLE_BUDGETS = 12
FAULTS_MIN = 3
MESSAGES_MIN = 30


@dataclass(frozen=True)
class Plan:
    """What a history is made of: with the same plan it happens again, event by event."""

    seed: int
    shape: Shape
    faults: tuple[Fault, ...]


@dataclass
class Outcome:
    """What came of a history.

    Attributes:
        invariant: the one that does not hold, empty if all do.
        what: in one line.
        counts: whether enough happened for the history to count.
        cells: faults by (kind, phase).
        trace: the transcript, if one was asked for.
    """

    seed: int
    invariant: str = ""
    what: str = ""
    at_s: float = 0.0
    faults: int = 0
    messages: int = 0
    events: int = 0
    commits: int = 0
    adopted: int = 0
    finished: bool = False
    stopped: str = ""
    restarts: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    cells: dict[tuple[str, str], int] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)

    @property
    def counts(self) -> bool:
        """Whether enough happened for it to count."""
        return self.faults >= FAULTS_MIN and self.messages >= MESSAGES_MIN


def plan_history(
    seed: int,
    groups: int = 0,
    window_s: float = 24.0,
    faults: float = 12.0,
    favoured: Sequence[str] = (),
    shape: Mapping[str, Any] | None = None,
    stalls: bool = False,
) -> Plan:
    """The plan of a seed.

    Args:
        seed: of everything that is drawn.
        groups: how many; 0 draws that as well.
        window_s: faults strike until then, in seconds.
        faults: how many strike on average.
        favoured: kinds that make up most of the faults.
        shape: fields of the shape that are given, and not drawn.
        stalls: whether ranks stall, and those that make no progress are found; else all is as without that.
    """
    draw = random.Random(f"plan {seed}")
    drawn = draw_shape(draw, groups, window_s)
    count = (shape or {}).get("groups", drawn.groups)
    spares = draw_spares(random.Random(f"spares {seed}"), count)  # each of its own: the rest is as without it
    speeds = draw_speeds(random.Random(f"speeds {seed}"), drawn.groups)
    checkpoints = draw_checkpoints(random.Random(f"checkpoints {seed}"), count, drawn.until)
    drawn = dataclasses.replace(drawn, **{**spares, **speeds, **checkpoints, **(shape or {})})
    count = max(FAULTS_MIN, round(faults * draw.uniform(0.5, 1.5)))
    strike_s = min(window_s, 1.0 + drawn.until * _step_s(drawn) * 1.5)  # beyond that the run is over
    planned = draw_plan(draw, strike_s, count, drawn.start_window_s > 0, favoured)
    if stalls:
        planned += draw_stalls(random.Random(f"stalls {seed}"), strike_s)
        drawn = dataclasses.replace(drawn, watched=True)
    return Plan(seed, drawn, tuple(sorted(planned, key=lambda fault: fault.at_s)))


def _step_s(shape: Shape) -> float:
    return 0.04 + sum(shape.microbatch_s) / 2 * (shape.microbatches + 0.5) / shape.members


def run_history(plan: Plan, traces: bool = False) -> Outcome:
    """Runs a history to its end."""
    world = World(plan.seed, plan.shape, traces)
    faults = Faults(world, plan.faults)
    liveness = Liveness(world, faults)
    outcome = Outcome(plan.seed)
    try:
        limit_s = usual_s = plan.shape.window_s + SETTLE_BUDGETS * plan.shape.budget_s
        while not world.run(limit_s):
            looked_s = max(world.checkers.last_commit_s, liveness.quiet_since)
            if world.clock.now < min(LATE_WINDOWS * usual_s, looked_s + 2 * liveness.bound_s):
                limit_s = plan.shape.budget_s  # more: it goes on well, or somebody has just looked, and came to it late
                continue
            states = {name: (g.alive, g.ranks[0].phase, g.ranks[0].step) for name, g in world.groups.items()}
            raise Violation("liveness", f"the job has not ended after {world.clock.now:.0f} s: {states}")
        told = [g.reason for g in world.groups.values() if g.reason.startswith("a bug:")]
        if told:
            raise Violation("I4", told[0])
    except Violation as violation:
        outcome.invariant, outcome.what = violation.invariant, str(violation)
    except Exception as error:  # whatever a machine raises is a finding: its seed repeats it
        where = traceback.extract_tb(error.__traceback__)[-1]
        name = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
        outcome.invariant, outcome.what = "crash", f"{type(error).__name__} in {name}: {error}"
    outcome.at_s, outcome.events = world.clock.now, world.clock.events
    outcome.restarts = world.restarts
    outcome.faults, outcome.kinds, outcome.cells = faults.struck, faults.kinds, faults.cells
    outcome.messages, outcome.commits, outcome.adopted = (
        world.network.messages,
        world.checkers.commits,
        world.checkers.adopted,
    )
    outcome.finished, outcome.stopped, outcome.trace = world.done and not world.stopped, world.stopped, world.trace
    return outcome


def transcript(plan: Plan, lines: Sequence[str], last: int = 0) -> str:
    """A history as a person reads it."""
    shown = list(lines[-last:] if last else lines)
    if len(shown) < len(lines):
        shown.insert(0, f"... {len(lines) - len(shown)} lines before")
    faults = [f"  {f.at_s:8.3f}  {f.kind} {f.phase and 'at ' + f.phase} {f.length_s} s" for f in plan.faults]
    return "\n".join([f"seed {plan.seed}: {plan.shape}", "faults planned:", *faults, "what happened:", *shown])
