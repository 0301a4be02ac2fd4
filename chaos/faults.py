"""The faults: what is broken, in a job of which shape, and what must follow from it. A table, without I/O.

An *act* (`acts.py`) breaks something from outside; an *inside* fault is one that a rank does to itself
(`manager/faults.py`). Whom a fault hits is drawn from the seed: `plan` is a pure function of both.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from lightkeeper.errors import UsageError
from lightkeeper.words import unknown

VICTIM, OTHER, THIRD, SPARE = "victim", "other", "third", "spare"  # roles
FIRST_STEP, LAST_STEP = 10, 16  # a fault strikes within these: enough before it to know what is normal
AT_ONCE = 5.0  # seconds in which a death must be seen: milliseconds, and what a busy machine adds
OF_LEASE = 8.0  # the lease of 2 s once somebody stands, and the same
OF_DEADLINE = 40.0  # a quarter of the outage budget of these jobs, or three of their longest steps


@dataclass(frozen=True)
class Shape:
    """Of a job.

    Attributes:
        groups: how many.
        ranks: of each group, on each of its nodes.
        spares: how many of the groups compute nothing.
        nodes: of group g0.
        apart: whether the victim runs in a network namespace of its own.
        supervised: whether `lightkeeper run` runs it, with a spare node and more, and checkpoints.
    """

    groups: int = 3
    ranks: int = 1
    spares: int = 0
    nodes: int = 1
    apart: bool = False
    supervised: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """g0, g1, ..."""
        return tuple(f"g{index}" for index in range(self.groups))


ONES, PAIRS = Shape(), Shape(groups=2, ranks=2)
RUN = Shape(supervised=True)
NODES, SPARED, HOSTS = Shape(groups=2, nodes=2), Shape(spares=1), Shape(apart=True)


@dataclass(frozen=True)
class Expected:
    """What must follow.

    Attributes:
        lost: the roles whose groups are lost, and nobody else's.
        by: how the victim's loss may be found (`group_lost.detected_by`); empty if nobody is lost.
        within_s: seconds from the fault within which that must be said.
        kinds: events about the victim that there must be.
        none: kinds of events of which there must be none, about anybody.
        recovery: whether a step must have been repeated, or an entry adopted.
        away: of these roles, those that do not come back.
        verdict: as what the verdict (`events/verdict.py`) may hold the victim guilty; empty: as anything.
        codes: of those who do not, the exit codes that may be.
        whose: whose fault the supervisor may say that it was, of a group that ended for it.
        back_to_disk: whether nobody is left who holds the state: steps since the newest checkpoint are done again.
        torn_log: whether the victim's events have a gap, so that rules which need them all cannot be asked.
    """

    lost: tuple[str, ...] = (VICTIM,)
    by: tuple[str, ...] = ()
    within_s: float = AT_ONCE
    kinds: tuple[str, ...] = ()
    none: tuple[str, ...] = ()
    recovery: bool = False
    away: tuple[str, ...] = ()
    verdict: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()
    whose: tuple[str, ...] = ("maybe", "node")
    back_to_disk: bool = False
    torn_log: bool = False


@dataclass(frozen=True)
class Fault:
    """One fault of the list.

    Attributes:
        name: as on the command line.
        what: one line for people.
        expected: what must follow.
        shape: of the job that it is tried on.
        act: what is done from outside; empty: the rank does it to itself.
        inside: ``KIND[=VALUE]:PHASE`` of `manager/faults.py`.
        inside_again: the same for the victim's next start, at any step.
        then: a second act: once there is an event of this kind about the group of this role, which on whose trainer.
        rank: which rank is hit; None: drawn from the seed.
        live: whether it can be done to a job that is not ours.
        soak: whether it is one of those that a soak draws from.
        hits: the roles of the groups that the act hits at once; empty: it hits no group.
    """

    name: str
    what: str
    expected: Expected
    shape: Shape = ONES
    act: str = ""
    inside: str = ""
    inside_again: str = ""
    then: tuple[str, str, str, str] | None = None
    rank: int | None = 0
    live: bool = False
    soak: bool = False
    hits: tuple[str, ...] = (VICTIM,)


SEEN = ("manager", "stream")
FEW = (*SEEN, "lease")  # when too few are left to go on, a lease is waited for
OF_RETURN = 60.0  # when nobody is left, nobody waits, and the lighthouse may say it only when they come again
BEATS = 40.0  # until a node that does not answer is given up
NOBODY = Expected(lost=(), none=("group_lost", "fenced"))
FROZEN = Expected(by=("frozen",), within_s=OF_LEASE, verdict=("frozen",), kinds=("fenced",))
SILENT = Expected(by=("lease",), within_s=OF_LEASE, verdict=("silent",))
STUCK = Expected(by=("progress",), within_s=OF_DEADLINE, kinds=("stuck",), verdict=("stuck",), recovery=True)

_ALL = (
    Fault("kill", "SIGKILL of a trainer", Expected(by=SEEN, verdict=("killed",)), act="kill", live=True, soak=True),
    Fault(
        "kill-rank", "SIGKILL of one rank of two: the other is a victim, and its group is lost as a whole",
        Expected(by=SEEN, verdict=("killed",)), PAIRS, act="kill", rank=None,
    ),
    Fault(
        "kill-group", "SIGKILL of a manager and all its ranks at once", Expected(by=SEEN), act="kill-group",
        live=True, soak=True,
    ),
    Fault(
        "exit", "a trainer exits with code 1", inside="exit:compute",
        expected=Expected(by=SEEN, away=(VICTIM,), verdict=("exit",), codes=(1,)),
    ),
    Fault(
        "raise", "the user's code raises in one group", inside="raise:compute",
        expected=Expected(by=SEEN, kinds=("user_error",), away=(VICTIM,), verdict=("exception",), codes=(1,)),
    ),
    Fault(
        "freeze", "SIGSTOP of a trainer", FROZEN, act="freeze", live=True, soak=True,
    ),
    Fault(
        "freeze-in-reduce", "SIGSTOP of a trainer inside a reduce", inside="freeze:reduce",
        expected=Expected(by=("frozen",), within_s=OF_LEASE, verdict=("frozen",), kinds=("fenced",), recovery=True),
    ),
    Fault(
        "freeze-manager", "SIGSTOP of a group's manager", SILENT, act="freeze-manager", live=True, soak=True,
    ),
    Fault(
        "freeze-group", "SIGSTOP of a manager and all its ranks; thawed, they find themselves left out",
        SILENT, act="freeze-group", live=True, soak=True,
    ),
    Fault(
        "freeze-agent", "SIGSTOP of the agent of a group's second node",
        Expected(by=SEEN, within_s=OF_LEASE), NODES, act="freeze-agent",
    ),
    Fault(
        "freeze-short", "the same for less than the lease: the others wait, and nobody is left out", NOBODY,
        act="freeze-short", live=True, soak=True,
    ),
    Fault("stall-in-compute", "a trainer sleeps for ever while the others wait for it", STUCK, inside="stall:compute"),
    Fault("stall-in-reduce", "a trainer never puts its part into the reduce", STUCK, inside="stall:reduce"),
    Fault(
        "hold", "a C call holds a trainer's interpreter lock for longer than the lease: it is alive", NOBODY,
        inside="hold=4:compute",
    ),
    Fault(
        "hold-for-ever", "a C call never lets go of a trainer's interpreter lock", STUCK, inside="hold:compute",
    ),
    Fault(
        "slow", "a trainer takes twice as long for every microbatch from some step on", inside="slow=100:compute",
        expected=Expected(lost=(), kinds=("slow",), verdict=("slow",), none=("group_lost", "fenced", "stuck")),
    ),
    Fault(
        "cut-link", "one TCP connection between two groups is cut, and nobody dies", act="cut-link",
        expected=Expected(lost=(), none=("group_lost", "fenced"), verdict=("network",), recovery=True),
        live=True, soak=True,
    ),
    Fault(
        "cut-host", "a group's host is cut off: packets are dropped, nobody is told; then it is reachable again",
        SILENT, HOSTS, act="cut-host",
    ),
    Fault(
        "lighthouse-kill", "SIGKILL of the lighthouse while all train, and its new start", NOBODY,
        act="lighthouse-kill", live=True, soak=True, hits=(),
    ),
    Fault(
        "manager-kill", "SIGKILL of a group's manager: its ranks end with it", Expected(by=SEEN), act="manager-kill",
        live=True, soak=True,
    ),
    Fault(
        "agent-kill", "SIGKILL of the agent of a group's second node", Expected(by=SEEN), NODES, act="agent-kill",
    ),
    Fault(
        "log-unwritable", "no event of a group can be written any more, then again", act="log-unwritable",
        expected=Expected(lost=(), kinds=("events_dropped",), none=("group_lost", "fenced"), torn_log=True),
        live=True, soak=True,
    ),
    Fault(
        "clock-forward", "a trainer's wall clock jumps ahead by an hour", NOBODY, inside="clock=3600:compute",
    ),
    Fault("clock-back", "a trainer's wall clock jumps back by an hour", NOBODY, inside="clock=-3600:reduce"),
    Fault(
        "donor-kill", "a group is killed and comes back; while it heals one of its donors is killed",
        Expected(lost=(VICTIM, OTHER), by=SEEN), act="kill", then=("healing", VICTIM, "kill", OTHER),
    ),
    Fault(
        "joiner-kill", "a group is killed and comes back; while it heals it is killed again",
        Expected(by=SEEN), act="kill", inside_again="kill:heal",
    ),
    Fault(
        "raise-and-freeze", "the user's code raises in one group, and another is frozen: the third is nobody's culprit",
        inside="raise:compute", then=("user_error", VICTIM, "freeze", OTHER),
        expected=Expected(
            lost=(VICTIM, OTHER), by=SEEN, within_s=OF_LEASE, kinds=("user_error",), away=(VICTIM,),
            verdict=("exception",), codes=(1,),
        ),
    ),
    Fault(
        "spare-bad", "a member is killed, and the spare that takes over is killed as it does so",
        Expected(lost=(VICTIM, SPARE), by=SEEN), SPARED, act="kill", then=("promoted", SPARE, "kill", SPARE),
    ),
    Fault(
        "node-kill", "SIGKILL of what stands for a node, which ends all that runs there",
        Expected(by=SEEN, whose=("node",)), RUN, act="node-kill", soak=True,
    ),
    Fault(
        "node-freeze", "SIGSTOP of what stands for a node: it answers nobody, and is given up",
        Expected(by=SEEN, within_s=BEATS, whose=("node",)), RUN, act="node-freeze", soak=True,
    ),
    Fault(
        "node-drain", "an operator drains a node: its group leaves in good order and goes to another",
        Expected(lost=(), none=("group_lost", "fenced"), kinds=("left", "rejoined"), whose=("nobody",)), RUN,
        act="node-drain", soak=True,
    ),
    Fault(
        "supervisor-kill", "SIGKILL of the supervisor; the next one takes up what runs", NOBODY, RUN,
        act="supervisor-kill", soak=True, hits=(),
    ),
    Fault(
        "freeze-for-good", "SIGSTOP of a manager and all its ranks, which nobody thaws: they are ended", SILENT, RUN,
        act="freeze-for-good", soak=True,
    ),
    Fault(
        "lighthouse-freeze", "SIGSTOP of the lighthouse: it is ended and started again", NOBODY, RUN,
        act="lighthouse-freeze", soak=True, hits=(),
    ),
    Fault(
        "stall", "a trainer stands still in its step while the others wait for it", STUCK, RUN, act="stall", soak=True,
    ),
    Fault(
        "raise-once", "the user's code raises in one group, once",
        Expected(by=SEEN, kinds=("user_error",), verdict=("exception",), whose=("job",)), RUN, act="raise", soak=True,
    ),
    Fault(
        "kill-two", "SIGKILL of two groups of three at one moment: fewer are left than the job's minimum",
        Expected(lost=(VICTIM, OTHER), by=FEW, within_s=OF_LEASE), RUN, act="kill-group", soak=True,
        hits=(VICTIM, OTHER),
    ),
    Fault(
        "kill-all", "SIGKILL of all groups at one moment: the run goes on from its newest checkpoint",
        Expected(lost=(VICTIM, OTHER, THIRD), by=FEW, within_s=OF_RETURN, back_to_disk=True), RUN, act="kill-group",
        soak=True, hits=(VICTIM, OTHER, THIRD),
    ),
)  # fmt: skip
FAULTS = {fault.name: fault for fault in _ALL}


def named(name: str) -> Fault:
    """The fault of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in FAULTS:
        raise UsageError(unknown("fault", name, FAULTS))
    return FAULTS[name]


@dataclass(frozen=True)
class Plan:
    """A fault with all that its seed decides.

    Attributes:
        fault: which.
        seed: from which the rest was drawn; also the job's.
        roles: role to group.
        rank: of the victim.
        step: at or after which it strikes.
    """

    fault: Fault
    seed: int
    roles: dict[str, str] = field(default_factory=dict)
    rank: int = 0
    step: int = FIRST_STEP

    @property
    def victim(self) -> str:
        """The group that is hit first."""
        return self.roles[VICTIM]

    @property
    def expects_lost(self) -> set[str]:
        """The groups that must be lost."""
        return {self.roles[role] for role in self.fault.expected.lost}

    @property
    def hits(self) -> tuple[str, ...]:
        """The groups that the act hits at once."""
        return tuple(self.roles[role] for role in self.fault.hits)

    @property
    def stays_away(self) -> set[str]:
        """Those of them that do not come back."""
        return {self.roles[role] for role in self.fault.expected.away}

    @property
    def inside(self) -> str:
        """What the victim is told as ``LIGHTKEEPER_FAULT``; empty if it is hit from outside."""
        return _inside(self.fault.inside, self, str(self.step)) if self.fault.inside else ""

    @property
    def inside_again(self) -> str:
        """The same for its next start."""
        return _inside(self.fault.inside_again, self, "any") if self.fault.inside_again else ""

    def as_dict(self) -> dict[str, Any]:
        """For the journal."""
        return {
            "fault": self.fault.name, "seed": self.seed, "roles": self.roles, "rank": self.rank, "step": self.step,
        }  # fmt: skip


def _inside(text: str, plan: Plan, step: str) -> str:
    kind, phase = text.split(":")
    return f"{kind}:{plan.victim}/{plan.rank}:{phase}:{step}"


def plan(fault: Fault, seed: int) -> Plan:
    """Whom and when a fault strikes: the same for the same seed."""
    chance, shape = random.Random(f"{fault.name} {seed}"), fault.shape
    names = list(shape.names)
    if shape.nodes > 1:
        victim = names[0]  # the one that has several nodes
    elif shape.spares:
        victim = chance.choice(names[: -shape.spares])
    elif shape.apart:
        victim = names[-1]
    else:
        victim = chance.choice(names)
    rest = [name for name in names if name != victim]
    spares = rest[-shape.spares :] if shape.spares else []
    roles = {VICTIM: victim, OTHER: chance.choice([name for name in rest if name not in spares])}
    if third := [name for name in rest if name not in (roles[OTHER], *spares)]:
        roles[THIRD] = third[0]
    if spares:
        roles[SPARE] = spares[0]
    rank = chance.randrange(shape.ranks) if fault.rank is None else fault.rank
    return Plan(fault, seed, roles, rank, chance.randint(FIRST_STEP, LAST_STEP))
