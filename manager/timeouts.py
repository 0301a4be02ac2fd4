"""Everything that bounds a wait, derived from one number, and the order that these bounds must have.

Time-outs are layers. If a lower one is longer than the one above it, that one strikes first: the process is killed
before anybody could heal it. So there is one number, the outage budget. What is derived from it is in order by
construction; what is given instead is compared with its neighbours, and refused by name (`docs/timeouts.md`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lightkeeper.errors import UsageError

BUDGET = "outage_budget_s"
BUDGET_S, BUDGET_S_MAX = 60.0, 86_400.0
DERIVED = {  # in outage budgets
    "evidence_s": 1 / 30,
    "stall_floor_s": 1 / 4,
    "form_timeout_s": 1 / 2,
    "quorum_wait_s": 1 / 2,
    "stop_deadline_s": 5.0,
    "start_budget_s": 10.0,
    "first_step_s": 10.0,
    "reduce_timeout_s": 12.0,
    "collective_timeout_s": 20.0,
}
MAY_BE_0 = ("quorum_wait_s",)
TIMEOUT_S_MAX = 40 * BUDGET_S_MAX
HEARTBEAT_BUDGETS = 25  # of NCCL's watchdog, if nobody says
LEASES = 1.25  # the least that a derived stall floor is: else beats could not be missed before it


@dataclass(frozen=True, slots=True)
class Pair:
    """Two bounds of which the first must be below the second."""

    lower: str
    upper: str
    why: str


PAIRS = (
    Pair("evidence_s", "form_timeout_s", "the peers of a group whose evidence is taken already wait for its ranks"),
    Pair("stall_floor_s", BUDGET, "a stuck rank must be found before those that wait for it give up"),
    Pair("form_timeout_s", BUDGET, "an epoch that does not form must be tried again before anybody gives up"),
    Pair("quorum_wait_s", BUDGET, "the job must end as one, and be kept, before each group gives up by itself"),
    Pair(BUDGET, "start_budget_s", "groups may be started further apart than a lighthouse may be away"),
    Pair("stall_floor_s", "first_step_s", "a first step compiles and warms up"),
    Pair(BUDGET, "reduce_timeout_s", "who stands without a lighthouse must name the silent before the reduce fails"),
    Pair("first_step_s", "reduce_timeout_s", "the others stand in their reduce while one does its first step"),
    Pair("reduce_timeout_s", "collective_timeout_s", "a group's ranks wait for the one that stands in a reduce"),
    Pair("start_budget_s", "collective_timeout_s", "the group's ranks meet by it, on nodes that are started apart"),
)
LEASE_PAIRS = (  # the lease is the lighthouse's, so they can be compared only once it has said it
    Pair("lease_s", "stall_floor_s", "a rank whose node is silent is not one that is stuck"),
    Pair("lease_s", BUDGET, "who waits would give up before the silent one is left out"),
)


@dataclass(frozen=True)
class Timeouts:
    """What bounds a group's waits, in seconds.

    Attributes:
        outage_budget_s: how long anything in a running job is waited for.
        evidence_s: how long evidence is taken before a group is ended.
        stall_floor_s: no phase of a step has a shorter progress deadline. See `stall_floor`.
        form_timeout_s: how long the process group of an epoch may take to form.
        quorum_wait_s: how long the job may stand below its minimum before it ends, and is kept; 0: not at all.
        stop_deadline_s: how long the group that keeps the last committed step may take to end after it was told to.
        start_budget_s: how long the first epoch, and a group's nodes, are waited for: schedulers start minutes apart.
        first_step_s: the progress deadline of a first step, and the highest that any phase gets.
        reduce_timeout_s: how long a reduce may stand for a member that lives but does not arrive.
        collective_timeout_s: of the group's own process groups and their rendezvous, if the script does not say.
        told_by: where what is not derived comes from, by name.
    """

    outage_budget_s: float
    evidence_s: float
    stall_floor_s: float
    form_timeout_s: float
    quorum_wait_s: float
    stop_deadline_s: float
    start_budget_s: float
    first_step_s: float
    reduce_timeout_s: float
    collective_timeout_s: float
    told_by: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, budget_s: float, given: Mapping[str, float | None], told_by: Mapping[str, str]) -> Timeouts:
        """Derives what is not given.

        Args:
            budget_s: the outage budget, in seconds.
            given: names of `DERIVED` to seconds; None is derived.
            told_by: where values come from ("LIGHTKEEPER_REDUCE_TIMEOUT_S"), as far as that is known.

        Raises:
            UsageError: a value is out of range.
        """
        if not 1 <= budget_s <= BUDGET_S_MAX:
            raise UsageError(f"{BUDGET} {budget_s}: give 1 to {BUDGET_S_MAX:.0f} seconds")
        values, sources = {}, {BUDGET: told_by.get(BUDGET, "the default" if budget_s == BUDGET_S else "given")}
        for name, budgets in DERIVED.items():
            value = given.get(name)
            if value is not None:
                enough = value >= 0 if name in MAY_BE_0 else value > 0
                if not (math.isfinite(value) and enough and value <= TIMEOUT_S_MAX):
                    least = "0 or more seconds" if name in MAY_BE_0 else "seconds above 0"
                    raise UsageError(f"{name} {value}: give {least}, at most {TIMEOUT_S_MAX:.0f}")
                sources[name] = told_by.get(name, "given")
            values[name] = budget_s * budgets if value is None else value
        return cls(budget_s, **values, told_by=sources)

    def check(self) -> None:
        """Compares all that does not depend on the lighthouse.

        Raises:
            UsageError: two are in the wrong order; both, where they come from, and what to do are named.
        """
        for problem in self._inverted(PAIRS, {}):
            raise UsageError(problem)

    def against(self, lease_s: float) -> str:
        """What is wrong with the order, once the lighthouse has said its lease; empty if nothing is."""
        known = {"lease_s": lease_s, "stall_floor_s": self.stall_floor(lease_s)}
        return next(self._inverted((*LEASE_PAIRS, *PAIRS), known), "")

    def stall_floor(self, lease_s: float) -> float:
        """The shortest progress deadline under this lease, in seconds: a derived one gives way to the lease."""
        return self.stall_floor_s if "stall_floor_s" in self.told_by else max(self.stall_floor_s, LEASES * lease_s)

    def check_declared(self, seconds: float) -> None:
        """Whether work that a loop declares (`Manager.expect`) may take so long.

        The other groups stand in their reduce meanwhile, and the group's other ranks in a collective; both bounds are
        above `reduce_timeout_s` or are it.

        Raises:
            UsageError: it may not; the pair is named.
        """
        if not (math.isfinite(seconds) and seconds > 0):
            raise UsageError(f"seconds={seconds!r}: give a number of seconds above 0")
        if seconds >= self.reduce_timeout_s:
            raise UsageError(
                f"seconds={seconds:g} must be below {self.said('reduce_timeout_s')}: the other groups stand in their "
                f"reduce meanwhile, and would give the epoch up; {self._raise('reduce_timeout_s')}"
            )

    @property
    def heartbeat_s(self) -> int:
        """For NCCL's watchdog, in whole seconds: above all else, since it kills the process without a word."""
        return math.ceil(max(HEARTBEAT_BUDGETS * self.outage_budget_s, 1.25 * self.collective_timeout_s))

    def source(self, name: str) -> str:
        """Where a value comes from, in words."""
        if name in self.told_by:
            return self.told_by[name]
        if name == "lease_s":
            return "--lease-s of the lighthouse"
        budgets = DERIVED[name]
        return f"{budgets:g} x {BUDGET}" if budgets >= 1 else f"{BUDGET} / {1 / budgets:g}"

    def _inverted(self, pairs: tuple[Pair, ...], known: Mapping[str, float]) -> Iterator[str]:
        for pair in pairs:
            lower, upper = (known.get(name, getattr(self, name, math.nan)) for name in (pair.lower, pair.upper))
            if not lower < upper:
                yield (
                    f"{self.said(pair.lower, lower)} must be below {self.said(pair.upper, upper)}: {pair.why}; "
                    f"{self._put_right(pair)}"
                )

    def said(self, name: str, value: float | None = None) -> str:
        """Name, value and source, for a line."""
        value = getattr(self, name) if value is None else value
        source = self.source(name)
        if name not in self.told_by and name != "lease_s" and value != getattr(self, name):
            source = f"{LEASES:g} x lease_s"
        return f"{name} {value:g} ({source})"

    def _put_right(self, pair: Pair) -> str:
        if pair.lower == "lease_s":
            return f"give the lighthouse a shorter --lease-s, or {self._raise(pair.upper)}"
        if pair.lower in self.told_by and pair.lower != BUDGET:
            return f"lower {pair.lower} or leave it out, or {self._raise(pair.upper)}"
        return self._raise(pair.upper)

    def _raise(self, name: str) -> str:
        if name in self.told_by and name != BUDGET:
            return f"raise {name} or leave it out"
        return f"raise {BUDGET}" + ("" if name == BUDGET else f", from which {name} is derived")
