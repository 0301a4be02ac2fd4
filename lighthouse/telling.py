"""What the lighthouse says of the members: who is lost, what all did last, for whom somebody waits, who is slow."""

from __future__ import annotations

from collections.abc import Sequence

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Action, Note
from lightkeeper.lighthouse.group import Group
from lightkeeper.lighthouse.leaving import Leaves
from lightkeeper.lighthouse.names import Membership
from lightkeeper.lighthouse.slow import EVICT_WINDOWS, WINDOW_STEPS, Pace, SlowGroup, may_leave

NAMED_MAX = 8
PHASES_MAX = 64  # groups whose phases one event tells
HEAL_S = 60.0  # until another group is in the place of one that leaves, before one was seen to come in
SAY_STANDING_S = 1.0


class Telling(Leaves):
    """A job that says what goes on in it."""

    def _last_phases(self, now: float) -> list[Action]:
        """What all ranks did when they were last heard of; of many groups first of those that do not stand."""
        members = sorted(self._members(), key=lambda group: group.beat is not None and group.beat.waiting_ms > 0)
        told = [group for group in members if group.beat is not None][:PHASES_MAX]
        if not told or self.recovery is None:
            return []
        phases = {group.name: doing(group, now) for group in told}
        silent_s = {group.name: round(now - group.heard, 3) for group in told}
        return [Note("last_phases", {"epoch": self.recovery.epoch, "phases": phases, "silent_s": silent_s})]

    def _say_waiting(self, now: float) -> list[Action]:
        whom, why, since_s = self.waiting(now)
        if not whom and not self._quiet:
            whom, why, since_s = self._stood_for(now)
        if not whom:
            return []
        whom = few(whom)
        waiting = m.Waiting(whom, why, round(since_s * 1000))
        actions: list[Action] = [Note("waiting", {"whom": ", ".join(whom), "why": why, "since_s": since_s})]
        for group in self.groups.values():
            if group.in_touch:
                actions += self._send(group, waiting)
        return actions

    def _stood_for(self, now: float) -> tuple[tuple[str, ...], str, float]:
        """For whom members stand in a reduce for longer than usual, and what those do; as `waiting`."""
        standing = [g for g in self._members() if g.gone is None and g.beat is not None and g.beat.waiting_ms]
        if not standing or self.stopped is not None:
            return (), "", 0.0
        longest = max(standing, key=lambda group: group.beat.waiting_ms if group.beat else 0)
        assert longest.beat is not None
        at, since_s = (longest.beat.epoch, longest.beat.step), longest.beat.waiting_ms / 1000 + now - longest.heard
        pace_s = min((g.pace_s for g in self._members() if g.pace_s), default=0.0)
        if since_s < max(SAY_STANDING_S, 2.0 * pace_s) or now - longest.heard > self.patience.lease_s:
            return (), "", 0.0
        late = [g for g in self._members() if g.gone is None and g not in standing and g.beat is not None]
        late = [g for g in late if g.beat is not None and (g.beat.epoch, g.beat.step) <= at and _at_work(g.beat)]
        return tuple(g.name for g in late), "; ".join(doing(g, now) for g in late[:NAMED_MAX]), since_s

    # ------------------------------------------------------------ who is slow

    def _mind_slow(self, now: float) -> list[Action]:
        """Who is slow is said; who has been for long is asked to leave, if that is wanted and pays."""
        if self.newest is None or self.config is None or self.recovery is not None or self.stopped is not None:
            return []
        members = [group for group in self._members() if group.gone is None and group.beat is not None]
        number = self.newest.epoch.number
        if len(members) < 2 or any(group.beat is None or group.beat.epoch != number for group in members):
            return []
        step = max(group.beat.step for group in members if group.beat)
        total = max(group.beat.total for group in members if group.beat)
        paces = _paces(self.newest, members)
        slow, ended = self.slows.look(step, paces, total)
        actions: list[Action] = [self._slow_note(one, "reported") for one in slow]
        actions += [Note("slow_ended", {"group": name, "step": step}) for name in ended]
        self.slow.update({one.group: one for one in slow})
        for name in ended:
            self.slow.pop(name, None)
        return actions + self._evict_slow(step, [pace for pace in paces if pace.speed and pace.microbatch_us], total)

    def _evict_slow(self, step: int, paces: Sequence[Pace], total: int) -> list[Action]:
        assert self.newest is not None and self.config is not None
        if not self.config.evicts_slow or self._leavers() or self.prepared or not self.reigns:
            return []
        spare = bool(self.newest.spares)
        for name, one in self.slow.items():
            group = self._member(name)
            long = self.slows.slow_for(name, step) >= EVICT_WINDOWS * WINDOW_STEPS
            if group is None or group.drain is not None or not long or not group.in_touch:
                continue
            enough = len(self.newest.members) > self.config.minimum
            if enough and may_leave(name, paces, total, spare, self.heal_s or HEAL_S):
                return self._ask_slow_to_leave(group, one)
        return []

    def _ask_slow_to_leave(self, group: Group, slow: SlowGroup) -> list[Action]:
        self._quiet = False
        reason = f"slow: {slow.factor:.2f} times what the others take for a microbatch, rank {slow.rank}"
        group.drain = m.Drain(reason)
        evidence = (
            f"for {slow.steps} steps up to step {slow.step}; it costs {100 * slow.costs:.0f} % of everybody's time"
        )
        quarantined = {"group": group.name, "node": _node(group), "reason": reason, "evidence": evidence}
        note = self._slow_note(slow, "asked to leave")
        return [note, Note("quarantined", quarantined), *self._send(group, group.drain)]

    def _slow_note(self, slow: SlowGroup, done: str) -> Note:
        group = self._member(slow.group)
        about = {"group": slow.group, "incarnation": "" if group is None else group.incarnation}
        told = {
            "rank": slow.rank, "node": "" if group is None else _node(group), "factor": round(slow.factor, 3),
            "costs": round(slow.costs, 4), "steps": slow.steps, "step": slow.step, "wait_s": slow.wait_s,
            "others_wait_s": slow.others_wait_s, "flaps": slow.flaps, "done": done,
        }  # fmt: skip
        return Note("slow", {**about, **told})


def doing(group: Group, now: float) -> str:
    """What a group's ranks did when it was last heard: ``ranks 0-2 reduce of step 12 for 0.4 s, rank 3 compute``."""
    if group.beat is None:
        return ""
    if not group.beat.ranks:
        return f"{group.beat.phase} of step {group.beat.step}"
    told = []
    for one in group.beat.ranks:
        what = f"{_ranks(one.ranks)} {one.phase} of step {one.step}"
        stopped = " (stopped by a signal)" if one.stopped_ms else ""
        since_s = max(one.idle_ms, one.waiting_ms, one.stopped_ms) / 1000
        told.append(f"{what}{stopped}" + (f" for {since_s + now - group.heard:.1f} s" if since_s else ""))
    return ", ".join(told)


def _at_work(beat: m.Beat) -> bool:
    """Whether some rank is at its own turn, and so is what the others stand for; of a silent group the lease tells."""
    return any(one.idle_ms for one in beat.ranks)


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    said = "/".join("-".join(map(str, span)) for span in spans[:NAMED_MAX]) + ("/..." if spans[NAMED_MAX:] else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {said}"


def _paces(newest: Membership, members: Sequence[Group]) -> list[Pace]:
    found = []
    for group in members:
        slot = newest.slot_of(group.name)
        if group.beat is not None and slot is not None:
            beat = group.beat
            found.append(Pace(group.name, beat.microbatch_us, beat.slowest, beat.wait_us, newest.speed_of(slot)))
    return found


def _node(group: Group) -> str:
    """Host of its manager."""
    return group.hello.manager.rpartition(":")[0].strip("[]") if group.hello is not None else ""


def few(names: Sequence[str]) -> tuple[str, ...]:
    """Said to all of them: with all of their names it would be O(N²)."""
    more = len(names) - NAMED_MAX
    return tuple(names) if more <= 0 else (*names[:NAMED_MAX], f"{more} more")
