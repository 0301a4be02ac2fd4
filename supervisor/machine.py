"""What runs where, and what follows when it ends. No I/O: it is told what happened and when, and says what to do.

As the dispatcher of a bus line: a broken bus is taken off the road and its driver gets another one, the other buses
go on; when too few are left the line starts anew from the depot; and when three buses break down at the same bend it is
the bend, and somebody must look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightkeeper.supervisor.actions import (
    Action,
    Ask,
    Check,
    Finish,
    Launch,
    Note,
    Over,
    Requeue,
    StartLighthouse,
    Tell,
)
from lightkeeper.supervisor.attempts import Attempts
from lightkeeper.supervisor.attribution import Blame, End, blame
from lightkeeper.supervisor.jobfile import JobFile
from lightkeeper.supervisor.places import AT_WORK, CHECKING, DONE, ENDING, PAUSED, WAITING, Group
from lightkeeper.supervisor.pool import Pool

ENDS_BUDGETS = 6.0  # outage budgets for a group to end in good order: one may keep the last step meanwhile
LEFT_OUT_S_MIN = 10.0  # or a quarter of an outage budget, for who was left out to end by itself
QUORUM_LONG_S = 600.0  # after which a human is told that the quorum is not there


class Supervisor:
    """One job.

    Args:
        job: what the job file says.
        nodes: names of the nodes that there are.
        quarantined: node to reason, from earlier.
        now: monotonic seconds.
    """

    def __init__(self, job: JobFile, nodes: Iterable[str], quarantined: Mapping[str, str], now: float) -> None:
        self.job = job
        self.pool = Pool(nodes, quarantined, job.burn_in.enabled)
        self.groups = {name: Group(since=now) for name in job.group_names}
        self.began = now
        self.attempts = Attempts(job.budget)
        self.step = -1  # the newest that is committed
        self.stopping = ""  # why no further start comes
        self._again = False  # whether the run is to go on in another allocation
        self.restarting = ""  # why all groups are ended before all start again
        self.finished = False
        self.failure, self._code = "", 1  # why the run is given up, and with which exit code
        self.over: Over | None = None
        self._starved_s: float | None = None
        self._told_starved = False
        self._resume_at = 0.0
        self._ending_s: float | None = None  # since when nothing is started any more

    # ------------------------------------------------------------ the one before

    def state(self) -> dict[str, Any]:
        """What the next supervisor of this run must know, as JSON."""
        return {
            "attempts": self.attempts.state(),
            "step": self.step,
            "nodes": self.pool.state(),
            "groups": {
                name: [list(one.nodes), one.starts, one.start, one.failures, one.state in (AT_WORK, ENDING)]
                for name, one in self.groups.items()
            },
        }

    def take_up(self, state: Mapping[str, Any], now: float) -> None:
        """Goes on where another supervisor was; before `start`. Ends since then are told as those that come.

        Args:
            state: as it left it.
            now: monotonic seconds.
        """
        self.attempts.take_up(state["attempts"])
        self.step = state["step"]
        self.pool.take_up(state["nodes"])
        for name, (nodes, starts, start, failures, at_work) in state["groups"].items():
            group = self.groups.get(name)
            if group is None:
                continue
            group.starts, group.start, group.failures = starts, start, failures
            if at_work and all(node in self.pool.nodes for node in nodes):  # else nothing of it can be there
                group.nodes = tuple(nodes)
                self._enter(group, AT_WORK, now)
                self.pool.give(nodes, name)

    # ------------------------------------------------------------ what happens

    def start(self, now: float) -> list[Action]:
        """The beginning."""
        return [StartLighthouse(), *self._go_on(now)]

    def lighthouse_ended(self, now: float) -> list[Action]:
        """It is started again with its log: groups train on meanwhile."""
        return [] if self.over or (self.stopping and self._all_still()) else [StartLighthouse()]

    def committed(self, step: int) -> None:
        """The run has come so far."""
        self.step = max(self.step, step)

    def left_out(self, name: str, now: float) -> None:
        """The job goes on without a group, by the lighthouse's word; its processes may not have ended."""
        group = self.groups.get(name)
        if group is not None and group.state == AT_WORK and group.out is None:
            group.out = now

    def came_back(self, name: str) -> None:
        """A group that was left out has joined again: its launcher has started it where it was."""
        group = self.groups.get(name)
        if group is not None:
            group.out = None

    def node_came(self, name: str, now: float) -> list[Action]:
        """A node is there, for the first time or again."""
        return [*self.pool.came(name), *self._go_on(now)]

    def node_leaving(self, name: str, why: str, now: float) -> list[Action]:
        """A node is to be left: it is drained, or preempted soon. Nobody is to blame for what ends there."""
        actions = self.pool.leaving(name, why)
        if not actions:
            return []
        of = self.pool.nodes[name].group
        if of in self.groups and self.groups[of].state == AT_WORK:
            actions.append(Ask(of, f"{name} is to be left: {why}"))
        return actions + self._go_on(now)

    def node_lost(self, name: str, why: str, now: float) -> list[Action]:
        """A node is gone; the end of what ran there comes by itself."""
        actions = self.pool.lost(name, why)
        return actions + self._go_on(now) if actions else []

    def misasked(self, why: str, now: float) -> list[Action]:
        """What preflight is asked by the job file makes no sense: no node is to blame."""
        return [*self._give_up("usage", why, code=2), *self._go_on(now)]

    def checked(self, name: str, group_name: str, problem: str, evidence: str, now: float) -> list[Action]:
        """A node's preflight has ended; `problem` is empty if it is fit."""
        group = self.groups[group_name]
        seconds = round(now - group.since, 3)
        note = {"node": name, "group": group_name, "problem": problem, "seconds": seconds}
        actions: list[Action] = [Note("node_checked", note), *self.pool.checked(name, problem, evidence)]
        if group.state == CHECKING and name in group.nodes:
            group.unchecked.discard(name)
        return actions + self._go_on(now)

    def not_checked(self, name: str, group_name: str, now: float) -> list[Action]:
        """Nothing could be started on a node for its preflight: nobody knows whose fault that is."""
        group = self.groups[group_name]
        self.pool.nodes[name].failures += 1
        if group.state == CHECKING and name in group.nodes:
            self._release(group)
            group.failures += 1
            self._enter(group, PAUSED, now)
            group.until = now + max(self.job.budget.pause_s, self.attempts.pause_s(group.failures))
        return self._go_on(now)

    def ended(self, name: str, end: End, now: float) -> list[Action]:
        """A group's start has ended, with all its processes."""
        group = self.groups[name]
        worked_s = now - group.since if group.state in (AT_WORK, ENDING) else 0.0
        nodes, ending = group.nodes, group.state == ENDING
        self._release(group)
        self._enter(group, WAITING, now)
        found = blame(end)
        if ending and found.kind not in ("finished", "quorum"):
            found = Blame("nobody", "ended", "the supervisor ended it")
        note = {
            "group": name, "nodes": list(nodes), "code": end.code, "whose": found.whose, "failure": found.kind,
            "step": end.step, "reason": found.why, "after_s": round(end.after_s, 3),
        }  # fmt: skip
        actions: list[Action] = [Note("group_ended", note)]
        if found.kind == "finished":
            self.finished = True
            self._enter(group, DONE, now)
        elif found.kind == "quorum":
            actions += self._restart_all(found.why, now)
        elif found.kind in ("ended", "left", "unseen"):
            pass  # nobody is to blame
        else:
            actions += self._failed(name, group, nodes, end, found, worked_s, now)
        return actions + self._go_on(now)

    def burn_in_broke_off(self, name: str, now: float) -> list[Action]:
        """The node was lost during its burn-in, or could not say how it went: it is tried again."""
        self.pool.burn_in_broke_off(name, now)
        return self._go_on(now)

    def burned_in(self, name: str, returns: bool, why: str, now: float) -> list[Action]:
        """A burn-in of a node that is in quarantine has ended; whether it gets work again, and why or why not."""
        return [*self.pool.burned_in(name, returns, why), *self._go_on(now)]

    def quarantine_is(self, reasons: Mapping[str, str], now: float) -> list[Action]:
        """Who is in quarantine, with the reason: somebody has changed it. Who is at work stays there."""
        return [*self.pool.quarantine_is(reasons), *self._go_on(now)]

    def stop(self, why: str, now: float, again: bool = False) -> list[Action]:
        """The run ends in good order: groups leave, nothing is started any more.

        Args:
            why: an operator's word, a notice, a time limit.
            now: monotonic seconds.
            again: whether it is to go on by itself, in another allocation.
        """
        if self.stopping or self.over:
            return []
        self.stopping, self._again = why, again
        return [Note("run_stopping", {"reason": why}), *self._ask_all(why), *self._go_on(now)]

    def tick(self, now: float) -> list[Action]:
        """Time passes."""
        limit_s = self.job.budget.time_limit_s
        if limit_s and now - self.began >= limit_s and not self.stopping:
            return self.stop(f"the time limit of {limit_s:g} s", now, again=True)
        return self._go_on(now)

    # ------------------------------------------------------------ what follows

    def _failed(
        self, name: str, group: Group, nodes: tuple[str, ...], end: End, found: Blame, worked_s: float, now: float
    ) -> list[Action]:
        group.failures = 1 if worked_s >= self.job.budget.good_s else group.failures + 1
        on, actions = self.pool.ended_on(nodes, end, found, name)
        put_aside = found.whose in ("node", "maybe") and on and self.pool.nodes[on].excluded
        if found.whose != "nobody" and not put_aside:
            self.attempts.alike(found.kind, end.step, on or "+".join(nodes), group.start)
        self._enter(group, PAUSED, now)
        group.until = now + self.attempts.pause_s(group.failures)
        self.attempts.failed(self.step, group.start)
        if found.fatal:
            actions += self._give_up("usage", f"{name}: {found.why}", end.evidence, found.kind, name, code=2)
        elif why := self.attempts.hopeless(found, end.step, len(self.pool.nodes) == 1):
            kind = "crash_loop" if "same" in why else "budget"
            actions += self._give_up(kind, f"{why}; last: {name}: {found.why}", end.evidence, found.kind, name)
        return actions

    def _restart_all(self, why: str, now: float) -> list[Action]:
        if self.restarting or self.stopping or self.finished:
            return []
        self.restarting = why
        self.attempts.job_restarts += 1
        self.attempts.failed(self.step, max(group.start for group in self.groups.values()))
        number, most = self.attempts.job_restarts, self.job.budget.job_restarts
        note: list[Action] = [Note("job_restarts", {"number": number, "step": self.step, "reason": why})]
        if number > most:
            return note + self._give_up("budget", f"{most} whole-job restarts are used up: {why}")
        if idle := self.attempts.idle():
            return note + self._give_up("budget", f"{idle}: {why}")
        self._resume_at = now + self.attempts.job_pause_s()
        for name, group in self.groups.items():
            if group.state == AT_WORK:
                self._enter(group, ENDING, now)
                note.append(Finish(name, f"the whole job starts again: {why}"))
        return note

    def _give_up(
        self, kind: str, why: str, evidence: str = "", cause: str = "", group: str = "", code: int = 1
    ) -> list[Action]:
        self.stopping = self.stopping or why
        self.failure, self._code = why, code
        told = "failed" if kind == "usage" else kind
        failed = Note("run_failed", {"failure": kind, "reason": why})
        actions: list[Action] = [failed, Tell(told, why, evidence, cause, group)]
        return actions + self._ask_all(why)

    def _ask_all(self, why: str) -> list[Action]:
        return [Ask(name, why) for name, group in self.groups.items() if group.state == AT_WORK]

    def _leave_unfit(self, now: float) -> None:
        """A group in preflight one of whose nodes is not fit takes others, whatever made it so."""
        for group in self.groups.values():
            if group.state == CHECKING and not all(self.pool.nodes[node].fit for node in group.nodes):
                self._release(group)
                self._enter(group, WAITING, now)

    # ------------------------------------------------------------ what is to be done now

    def _go_on(self, now: float) -> list[Action]:
        if self.over is not None:
            return []
        self._leave_unfit(now)
        if self.stopping or self.finished:
            return [*self._end_left_out(now), *self._end_if_still(now)]
        if self.restarting:
            if not self._all_still() or now < self._resume_at:
                return []
            self.restarting = ""
            for group in self.groups.values():
                self._enter(group, WAITING, now)
        actions = self._end_left_out(now)
        for name, group in self.groups.items():
            if group.state == PAUSED and now >= group.until:
                self._enter(group, WAITING, now)
            if group.state == WAITING:
                actions += self._allocate(name, group, now)
            if group.state == CHECKING and not group.unchecked:
                group.starts, group.start = group.starts + 1, self.attempts.started()
                self._enter(group, AT_WORK, now)
                started = {"group": name, "nodes": list(group.nodes), "start": group.starts}
                actions += [Note("group_started", started), Launch(name, group.nodes, group.starts)]
        return actions + self.pool.to_burn_in(now) + self._mind_starvation(now)

    def _end_left_out(self, now: float) -> list[Action]:
        """Who was left out and has not ended, with a good time for what it keeps of that, is frozen or hangs."""
        within_s = max(LEFT_OUT_S_MIN, self.job.outage_budget_s / 4)
        actions: list[Action] = []
        for name, group in self.groups.items():
            if group.state == AT_WORK and group.out is not None and now - group.out >= within_s:
                group.out = None
                actions.append(Finish(name, f"it was left out {within_s:g} s ago, and still runs"))
        return actions

    def _allocate(self, name: str, group: Group, now: float) -> list[Action]:
        group.nodes = self.pool.take(self.job.nodes_per_group, name)
        if not group.nodes:
            return self._say_waits(name, group)
        group.waits = ""
        self._enter(group, CHECKING, now)
        if not self.job.preflight.enabled:
            return []
        group.unchecked = set(group.nodes)
        return [Check(node, name) for node in group.nodes]

    def _say_waits(self, name: str, group: Group) -> list[Action]:
        """Says once why a group has no node, and again when that is another reason."""
        why = self.pool.why_none()
        if group.waits == why:
            return []
        group.waits = why
        return [Note("group_waits", {"group": name, "reason": why})]

    def _mind_starvation(self, now: float) -> list[Action]:
        """No node is left for so many groups that the quorum is not there."""
        waits = sum(group.state == WAITING for group in self.groups.values())
        if len(self.groups) - waits >= self.job.minimum:
            self._starved_s, self._told_starved = None, False
            return []
        self._starved_s = now if self._starved_s is None else self._starved_s
        if none := self.pool.why_none_comes():
            return [*self._give_up("quorum_lost", f"no node is left: {none}"), *self._go_on(now)]
        if now - self._starved_s >= QUORUM_LONG_S and not self._told_starved:
            self._told_starved = True
            return [Tell("quorum_lost", f"fewer than {self.job.minimum} groups have nodes since {QUORUM_LONG_S:g} s")]
        return []

    def _all_still(self) -> bool:
        """Whether nothing is at work."""
        return all(group.state not in (AT_WORK, ENDING) for group in self.groups.values())

    def _end_if_still(self, now: float) -> list[Action]:
        for group in self.groups.values():
            if group.state in (WAITING, CHECKING, PAUSED):
                self._release(group)
                self._enter(group, DONE, now)
        if not self._all_still():
            return self._end_late(now)
        if self.finished:
            self.over = Over(0, "the run is finished")
        elif self.failure:
            self.over = Over(self._code, self.failure)
        else:
            self.over = Over(0, f"stopped as asked ({self.stopping}); the same command goes on from there")
        requeue: list[Action] = [Requeue(self.stopping)] if self._again and not (self.finished or self.failure) else []
        well = self.finished and not self.failure  # of a failure somebody was told already
        actions: list[Action] = [Tell("finished", self.over.reason)] if well else []
        return [*actions, *requeue, Note("run_ended", {"code": self.over.code, "reason": self.over.reason}), self.over]

    def _end_late(self, now: float) -> list[Action]:
        """Who has not ended in good order long after it was to is ended."""
        self._ending_s = now if self._ending_s is None else self._ending_s
        if now - self._ending_s < ENDS_BUDGETS * self.job.outage_budget_s:
            return []
        actions: list[Action] = []
        for name, group in self.groups.items():
            if group.state == AT_WORK:
                self._enter(group, ENDING, now)
                actions.append(Finish(name, f"it did not end within {now - self._ending_s:.0f} s"))
        return actions

    def _release(self, group: Group) -> None:
        self.pool.release(group.nodes)
        group.nodes, group.unchecked = (), set()

    def _enter(self, group: Group, state: str, now: float) -> None:
        group.state, group.since, group.out = state, now, None
