"""One fault done to a job of ours: struck, waited out, mended. What came of it is judged later, by `checkers.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightkeeper.chaos.acts import ACTS, Act, Hit
from lightkeeper.chaos.faults import OTHER, Plan
from lightkeeper.chaos.journal import Journal
from lightkeeper.chaos.supervised import SUPERVISOR, Supervised
from lightkeeper.chaos.watched import STEP_S_MAX, Watched
from lightkeeper.chaos.workloads import Workload
from lightkeeper.events import schema
from lightkeeper.events.of_progress import Slow, Stuck
from lightkeeper.events.schema import Committed, Event, FaultInjected, GroupLost

SETTLE_STEPS = 3  # that the others do after the fault before anything is mended
KIND_S_MAX = 120.0  # for an event that takes a window of steps
BACK_S_MAX = 150.0  # a cold start imports torch, and a group that died twice is held back
KINDS: dict[str, type[Event]] = {
    "stuck": Stuck, "slow": Slow, "user_error": schema.UserError, "fenced": schema.Fenced,
    "events_dropped": schema.EventsDropped, "healing": schema.Healing, "promoted": schema.Promoted,
    "left": schema.Left, "rejoined": schema.Rejoined,
}  # fmt: skip


@dataclass
class Strike:
    """What was done, for those who judge it.

    Attributes:
        plan: which fault, to whom.
        fired: the events that say so; empty: it was not done.
        hit: the groups that were hit, in order.
        back: the groups that came back.
    """

    plan: Plan
    fired: list[FaultInjected] = field(default_factory=list)
    hit: list[str] = field(default_factory=list)
    back: list[str] = field(default_factory=list)


class Striker:
    """Does faults to one job.

    Args:
        workload: the job.
        journal: told of each step.
        back_s: how long a group may take to be back.
    """

    def __init__(self, workload: Watched, journal: Journal, back_s: float = BACK_S_MAX) -> None:
        self._job, self._journal, self._back_s = workload, journal, back_s
        self._killed: list[str] = []  # launchers that are to be started again

    def strike(self, plan: Plan) -> Strike:
        """Breaks what the plan says, waits until that was dealt with, mends it, waits until all train again.

        Raises:
            Trouble: something that had to follow did not, in time.
            CannotStrike: this machine does not allow it.
        """
        done, expected = Strike(plan), plan.fault.expected
        since = len(self._job.events)
        for group in plan.stays_away:
            self._job.ends_so(group)
        hit, act = self._break(plan, done)
        if plan.fault.then is not None:
            self._break_further(plan, done, since)
        if plan.inside_again:
            self._break_again(plan, done, since)
        self._await_consequences(plan, done, since)
        others = set(self._job.shape.names) - plan.expects_lost - ({plan.victim} if expected.torn_log else set())
        self._job.await_steps(others, SETTLE_STEPS, "the others go on")
        self._mend(plan, hit, act)
        if expected.torn_log:
            self._await_kinds(plan, since)
        self._await_return(plan, done)
        return done

    # ------------------------------------------------------------ breaking

    def _break(self, plan: Plan, done: Strike) -> tuple[Hit | None, Act | None]:
        job, fault = self._job, plan.fault
        if plan.inside:
            self._note_fired(done, self._fired(plan.victim))
            return None, None
        if fault.act == "cut-host":
            self._injected(plan, plan.victim, f"host of {plan.victim}", done)
            assert job.host is not None
            job.host.cut()
            return None, None
        act = ACTS[fault.act]
        hit = Hit(job.processes, plan.victim, plan.rank, plan.roles.get(OTHER, ""), plan.hits)
        if fault.act == "supervisor-kill":
            job.ends_so(SUPERVISOR)
        elif fault.act in ("manager-kill", "kill-group"):
            self._killed.append(plan.victim)
        elif fault.act == "agent-kill":
            self._killed.append(f"{plan.victim}.1")
        for name in self._killed:
            job.ends_so(name)
        for group in plan.hits or ("",):
            self._injected(plan, group, act.target(hit, group), done)
        act.strike(hit)
        return hit, act

    def _injected(self, plan: Plan, group: str, target: str, done: Strike) -> None:
        """Says what is about to be broken, before it is."""
        processes, since = self._job.processes, len(self._job.events)
        self._job.injected(plan.fault.name, target, group, processes.incarnation(group) if group else "")
        self._note_fired(done, self._job.await_event(FaultInjected, since, "the event of the fault", STEP_S_MAX))

    def _fired(self, group: str, since: int = 0) -> FaultInjected:
        return self._job.await_event(FaultInjected, since, f"the fault in {group} strikes", STEP_S_MAX, group=group)

    def _note_fired(self, done: Strike, event: FaultInjected) -> None:
        done.fired.append(event)
        if event.group:
            done.hit.append(event.group)
        where = f" in {event.phase}" if event.phase else ""
        self._journal.write(
            "injected", f"{event.fault} of {event.target}{where}, step {event.step}",
            fault=event.fault, group=event.group, incarnation=event.incarnation, step=event.step, phase=event.phase,
        )  # fmt: skip

    def _break_further(self, plan: Plan, done: Strike, since: int) -> None:
        """Hits a second group's trainer, at a moment that an event tells."""
        assert plan.fault.then is not None
        kind, about, act, role = plan.fault.then
        group = plan.roles[role]
        what = f"{plan.roles[about]} has an event {kind}"
        self._job.await_event(KINDS[kind], since, what, BACK_S_MAX, group=plan.roles[about])
        hit = Hit(self._job.processes, group)
        self._injected(plan, group, ACTS[act].target(hit), done)
        ACTS[act].strike(hit)  # what is frozen here is killed by its manager

    def _break_again(self, plan: Plan, done: Strike, since: int) -> None:
        """Starts the victim again with a fault inside."""
        group, job = plan.victim, self._job
        assert isinstance(job, Workload)
        job.ends_so(group)
        job.await_event(GroupLost, since, f"{group} is lost", plan.fault.expected.within_s, group=group)
        job.until(lambda: job.ended(group), f"the launcher of {group} ends")
        begun = len(job.events)
        job.start_group(group, plan.inside_again, restarts=0)
        job.ends_so(group)
        self._journal.write("started", f"{group} is started again, with {plan.inside_again}")
        fault = self._job.await_event(FaultInjected, begun, f"the fault in {group} strikes", BACK_S_MAX, group=group)
        self._note_fired(done, fault)
        what = f"{group} is lost again"
        job.await_event(GroupLost, begun, what, STEP_S_MAX, group=group, incarnation=fault.incarnation)
        job.until(lambda: job.ended(group), f"the launcher of {group} ends")
        self._killed.append(group)

    # ------------------------------------------------------------ what follows

    def _await_consequences(self, plan: Plan, done: Strike, since: int) -> None:
        expected = plan.fault.expected
        for fault in [fault for fault in done.fired if fault.group in plan.expects_lost]:
            lost = self._job.await_event(
                GroupLost, since, f"{fault.group} is said to be lost", expected.within_s + STEP_S_MAX,
                group=fault.group, incarnation=fault.incarnation,
            )  # fmt: skip
            line = f"{lost.group} is lost: {lost.cause}, found by {lost.detected_by}"
            self._journal.write("lost", line, group=lost.group, cause=lost.cause, detected_by=lost.detected_by)
        if not expected.torn_log:
            self._await_kinds(plan, since)

    def _await_kinds(self, plan: Plan, since: int) -> None:
        for kind in plan.fault.expected.kinds:
            what = f"an event {kind} about {plan.victim}"
            event = self._job.await_event(KINDS[kind], since, what, KIND_S_MAX, group=plan.victim)
            self._journal.write("seen", f"{what}, of {event.process}", kind=kind)

    # ------------------------------------------------------------ mending

    def _mend(self, plan: Plan, hit: Hit | None, act: Act | None) -> None:
        job = self._job
        if hit is not None and act is not None:
            act.mend(hit)
        if plan.fault.act == "cut-host":
            assert job.host is not None
            job.host.join()
            self._journal.write("mended", f"the host of {plan.victim} can be reached again")
        if plan.fault.act == "supervisor-kill":
            assert isinstance(job, Supervised)
            self._journal.write("started", job.start_supervisor())
        if plan.fault.act.startswith("lighthouse-"):
            self._journal.write("started", job.restart_lighthouse())
        while self._killed:
            name = self._killed.pop()
            self._journal.write("started", job.start_again(name), group=name.partition(".")[0])

    def _await_return(self, plan: Plan, done: Strike) -> None:
        job = self._job
        gone = {(fault.group, fault.incarnation) for fault in done.fired}
        returning = plan.expects_lost - plan.stays_away
        for group in dict.fromkeys(fault.group for fault in done.fired if fault.group in returning):
            job.until(lambda group=group: self._is_back(group, gone), f"{group} is back", self._back_s)  # type: ignore[misc]
            done.back.append(group)
            self._journal.write("back", f"{group} is a member again, at step {job.step_of(group)}", group=group)
        job.await_steps(set(job.shape.names) - plan.stays_away, SETTLE_STEPS, "all train on")

    def _is_back(self, group: str, gone: set[tuple[str, str]]) -> bool:
        newest: Committed | None = self._job.newest(group)
        return newest is not None and (group, newest.incarnation) not in gone
