"""What must hold in every history, checked when something happens that it speaks of; apart from the world.

The names are those of the protocol's invariants: I1 one entry per final step, I2 what an evicted group does has no
effect, I3 names only rise, I4 same bits, I5 microbatches exactly once, I6 bounded waits, I7 the sum is the whole
step's, I8 names are never mixed. ``blame`` is rule R2: nobody is left out for a reason that is not so. ``log`` is what
the lighthouse must have on disk before it speaks. ``shares`` is rule D2: work is seldom dealt by other speeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Activated, Note, Record
from lightkeeper.lighthouse.names import Entry, Epoch, Membership, Term
from lightkeeper.lighthouse.spares import MEMBER
from lightkeeper.lighthouse.speeds import EVERY_STEPS, changed
from lightkeeper.manager import local
from lightkeeper.manager.actions import Action, Tell, ToRanks
from lightkeeper.manager.ends import ENDS_S_MAX
from lightkeeper.manager.progress import STANDING
from lightkeeper.simulator.state import Part, Reduced, State

if TYPE_CHECKING:
    from lightkeeper.simulator.groups import GroupProcess
    from lightkeeper.simulator.lighthouses import Lighthouse
    from lightkeeper.simulator.network import Stream
    from lightkeeper.simulator.ranks import Rank
    from lightkeeper.simulator.world import World

FENCED_LEASES = 3
STOOD_LEASES = 0.9  # so long somebody has stood for whom one is left out that is silent


class Violation(AssertionError):
    """An invariant does not hold.

    Attributes:
        invariant: its name.
    """

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class Life:
    """A job from a first epoch on, until no member is left and it starts anew.

    Attributes:
        final: by step, the state after it, of the steps that are final.
        over: the last step, once a lighthouse has ended it for want of groups; None before.
        kept: which incarnation saved it at its end, and the state that it saved.
    """

    def __init__(self, number: int, epoch: Epoch) -> None:
        self.number, self.epoch = number, epoch
        self.final: dict[int, State] = {}
        self.over: int | None = None
        self.kept: tuple[str, State] | None = None
        self.began = False
        self.dealt_anew: int | None = None  # the last step that was dealt by other speeds than the one before


@dataclass
class LeftOut:
    """Since when an incarnation could know that it was left out, and by whom."""

    since: float
    lighthouse: Lighthouse
    starts: int


class Checkers:
    """One history's."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.adopted = self.kept_jobs = 0
        self.dealt_anew = 0
        self.commits = 0
        self.last_commit_s = 0.0
        self.lives: list[Life] = []
        self.newest: Membership | None = None  # highest that was ever activated or shown to be in force
        self._lives: dict[Epoch, Life] = {}
        self._in_epoch: dict[Epoch, Membership] = {}
        self._worked: dict[Epoch, frozenset[str]] = {}  # by epoch, the incarnations that are dealt work
        self._terms: set[Term] = set()
        self._memberships: dict[Epoch, tuple[str, ...]] = {}
        self._of: dict[tuple[int, int, str], Epoch] = {}
        self._entries: dict[Entry, int] = {}
        self._committed: dict[tuple[Epoch, int], Entry] = {}
        self._obeyed: dict[str, tuple[int, Membership | None, Term | None]] = {}
        self._left_out: dict[str, LeftOut] = {}
        self._stands: dict[str, Membership | None] = {}  # by lighthouse, unless it has heard that it is over
        self._waiting: dict[tuple[str, str], tuple[float, int]] = {}  # last beat by lighthouse and incarnation

    # ------------------------------------------------------------ names

    def reigns(self, term: Term) -> None:
        """A lighthouse starts a term."""
        if term in self._terms:
            raise Violation("I3", f"term {term} is there twice")
        self._terms.add(term)

    def epoch_of(self, plan: local.Plan) -> Epoch:
        """The epoch's full name."""
        key = (plan.epoch, plan.term, plan.lighthouse)
        epoch = self._of.get(key)
        if epoch is None:
            epoch = self._of[key] = Epoch(plan.epoch, Term(plan.term, plan.lighthouse))
        return epoch

    def one_membership(self, plan: local.Plan, members: tuple[str, ...]) -> None:
        """An epoch's name stands for one membership."""
        if plan.members != members:
            raise Violation("I3", f"epoch {plan.epoch} means {members} and {plan.members}")

    def obeyed(self, process: GroupProcess) -> None:
        """A manager has taken an event: what it obeys has only risen."""
        machine = process.machine
        promised, known, acknowledged = self._obeyed.get(process.incarnation, (0, None, None))
        if machine.promised == promised and machine.known is known and machine.acknowledged is acknowledged:
            return
        if machine.promised < promised:
            raise Violation("I3", f"{process.incarnation} promised {machine.promised} after {promised}")
        if machine.known is not known and machine.known is not None:
            self._knows(process.incarnation, machine.known, known)
        if acknowledged is not None and (machine.acknowledged is None or machine.acknowledged < acknowledged):
            raise Violation("I3", f"{process.incarnation} acknowledges {machine.acknowledged} after {acknowledged}")
        self._obeyed[process.incarnation] = (machine.promised, machine.known, machine.acknowledged)

    def received(self, process: GroupProcess, message: m.ToManager, actions: Sequence[Action]) -> None:
        """A manager has taken a message: what is lower than it has promised, or repeated, has no effect."""
        promised, known, acknowledged = self._obeyed.get(process.incarnation, (0, None, None))
        if isinstance(message, m.Activate):
            epoch = message.membership.epoch
        elif isinstance(message, m.Prepare):
            epoch = message.epoch
        else:
            return
        lower = epoch.number < promised or (acknowledged is not None and epoch.term < acknowledged)
        repeated = known is not None and epoch.number <= known.epoch.number
        obeys = any(
            isinstance(a, ToRanks) or (isinstance(a, Tell) and isinstance(a.message, m.Promise)) for a in actions
        )
        if obeys and (lower or repeated):
            where = f"in {known and known.epoch}, has promised {promised} and acknowledged {acknowledged}"
            raise Violation("I3", f"{process.incarnation} is {where}, and obeys {_brief(message)}")

    def _knows(self, who: str, known: Membership, before: Membership | None) -> None:
        if before is not None and known.epoch.number <= before.epoch.number:
            raise Violation("I3", f"{who} goes from {before.epoch} to {known.epoch}")
        names = tuple(member.incarnation for member in known.members)
        if self._memberships.setdefault(known.epoch, names) != names:
            raise Violation("I3", f"{known.epoch} means {self._memberships[known.epoch]} and {names}")
        self.world.say(f"{who} is in {known.epoch} with {', '.join(known.groups)}")
        self._in_force(known)

    def _in_force(self, membership: Membership) -> Life:
        life = self._lives.get(membership.epoch)
        self._in_epoch.setdefault(membership.epoch, membership)
        if life is None:
            life = None if membership.base is None else self._lives.get(membership.base)
            if life is None:
                self._nobody_stays(membership)
                life = Life(len(self.lives), membership.epoch)
                self.lives.append(life)
            self._lives[membership.epoch] = life
            self._at_work(membership)
        if self.newest is None or membership.epoch > self.newest.epoch:
            self.newest = membership
        return life

    def _at_work(self, membership: Membership) -> None:
        """As many work as are to; and whoever worked goes on, unless one that comes in has the better right."""
        shape, members = self.world.shape, membership.members
        working = frozenset(one.incarnation for slot, one in enumerate(members) if membership.speed_of(slot))
        if len(working) != min(shape.members, len(members)):
            raise Violation("A1", f"{len(working)} of {len(members)} work in {membership.epoch}, not {shape.members}")
        self._worked[membership.epoch] = working
        before = self._worked.get(membership.base, frozenset()) if membership.base is not None else frozenset()
        for one in members:
            if one.incarnation in before - working and shape.role_of(one.group) == MEMBER:
                raise Violation("A2", f"{one.incarnation} worked before {membership.epoch}, and is a spare in it")

    def _nobody_stays(self, membership: Membership) -> None:
        """A job begins anew only when no member of the one before lives: silence is not death.

        Or when it was ended below its minimum: all that promised are in no epoch any more, the others are left out.
        """
        if self.lives and self.lives[-1].over is not None:
            return
        for member in self.newest.members if self.newest is not None and self.lives[-1].final else ():
            process = self.world.groups.get(member.group)
            if process is None or process.incarnation != member.incarnation or not process.alive:
                continue
            machine = process.machine
            if machine.died is None and not machine.errors and not machine.exits and machine.known == self.newest:
                raise Violation("I1", f"{membership.epoch} begins the job anew, and {member.incarnation} lives")

    # ------------------------------------------------------------ entries

    def reduced(self, epoch: Epoch, step: int, parts: dict[str, Part], total: Reduced) -> None:
        """The first bucket of a step completes somewhere: the step before it is final."""
        life = self._lives.get(epoch)
        if life is None:
            raise Violation("I3", f"{epoch} reduces and was never activated")
        if life is not self.lives[-1] and self.lives[-1].began:
            raise Violation(
                "I1", f"{epoch} of a job that ended goes on beside the one that {self.lives[-1].epoch} began"
            )
        life.began = True
        states = {member: part.state for member, part in parts.items()}
        first = next(iter(states.values()))
        for member, state in states.items():
            if state.bits != first.bits:
                raise Violation(
                    "I4", f"{member} reduces step {step} of {epoch} on {state.name}, others on {first.name}"
                )
        if first.step != step - 1:
            raise Violation("I8", f"step {step} of {epoch} is reduced on the state of step {first.step}")
        self._final(life, first)
        if step < self.world.shape.until and not total.again:
            self._whole(total)
            self._alike_before(total, parts)

    def _whole(self, entry: Reduced) -> None:
        summed = sorted(k for _, k in entry.microbatches)
        if summed != list(range(self.world.total(entry.name.step))):
            raise Violation("I5", f"{entry.name} summed {entry.microbatches}")

    def _alike_before(self, entry: Reduced, parts: dict[str, Part]) -> None:
        """All microbatches were computed with the before extras that the entry holds."""
        for member, part in parts.items():
            if not part.used <= {entry.before}:
                raise Violation("S7", f"{member} computed {entry.name} with {set(part.used)}, it holds {entry.before}")

    def _final(self, life: Life, state: State) -> None:
        """This state's entry, and all before it, are final."""
        known = life.final.get(state.step)
        if known is not None:
            if known.bits != state.bits:
                raise Violation("I1", f"step {state.step} is final as {known.name} and as {state.name}")
            return
        before = life.final.get(state.step - 1)
        if before is not None and (state.before is None or state.before.bits != before.bits):
            raise Violation("I1", f"{state.name} follows another entry than {before.name}, which is final")
        if life.over is not None and state.step > life.over:
            raise Violation("E1", f"step {state.step} is final, and the job was ended after step {life.over}")
        life.final[state.step] = state
        self.world.checkpoints.final(state, self._in_epoch.get(state.name.epoch))
        if before is not None:
            self._dealt(life, before, state)

    def _dealt(self, life: Life, before: State, state: State) -> None:
        """Members that stay are dealt work by other proportions at most once in so many steps."""
        old, new = (self._in_epoch.get(one.name.epoch) for one in (before, state))
        if old is None or new is None or old is new or not changed(old, new):
            return
        last, life.dealt_anew = life.dealt_anew, state.step
        self.dealt_anew += 1
        if last is not None and state.step - last < EVERY_STEPS:
            raise Violation("shares", f"step {state.step} is dealt by other speeds, and so was step {last}")

    def committed(self, rank: Rank, entry: Reduced, before: State) -> None:
        """A rank has applied an entry."""
        self.commits += 1
        self.last_commit_s = self.world.clock.now
        if self.world.traces:
            self.world.say(f"{rank.name} ({rank.group.incarnation}) commits {entry.name}")
        if entry.base != before.bits or entry.name.step != before.step + 1:
            raise Violation("I8", f"{rank.name} applies {entry.name} on {before.name}, which it does not follow")
        if self._entries.setdefault(entry.name, entry.serial) != entry.serial:
            raise Violation("I8", f"two sums have the name {entry.name}")
        if entry.again:
            raise Violation("I5", f"{rank.name} commits {entry.name}, which is not whole")
        known = rank.group.machine.known
        if known is None or rank.plan is None:
            return
        epoch = self.epoch_of(rank.plan)
        if self._committed.setdefault((epoch, rank.step), entry.name) != entry.name:
            other = self._committed[epoch, rank.step]
            raise Violation("I1", f"members of {epoch} commit {other} and {entry.name}")
        alone = len(rank.plan.members) == 1 and not entry.ready  # what takes another in is final when that one has it
        if alone and (life := self._lives.get(epoch)) is not None:
            self._final(life, rank.state)

    def finished(self, rank: Rank) -> None:
        """A rank ends the run in good order: its last step must be final, and its state that of all."""
        known = rank.group.machine.known
        if known is not None and len(known.members) == 1 and (life := self._lives.get(known.epoch)) is not None:
            self._final(life, rank.state)  # alone in an epoch, what it holds is final
        last = self.world.shape.until - 1
        final = self.lives[-1].final.get(last) if self.lives else None
        others = [
            g for g in self.world.groups.values() if g.alive and g.machine.known is not None and g is not rank.group
        ]
        kept = self.lives[-1].kept if self.lives and not others else None
        if final is None and kept is not None and kept[1].step == last:
            final = kept[1]  # it is saved as the job ends, and nobody lives who could go on from anything else
        if final is None:
            raise Violation("I1", f"{rank.name} ends the run, and step {rank.step - 1} is not final")
        if final.bits != rank.state.bits:
            raise Violation("I4", f"{rank.name} ends the run with another state than {final.name}")

    def kept(self, rank: Rank) -> None:
        """A rank saves what it holds as the job ends: a whole job that starts from it misses nothing that is final.

        It is the only one that does, and all of its group's ranks save the same.
        """
        state, known = rank.state, rank.group.machine.known
        life = self.lives[-1] if known is None else self._lives[known.epoch]
        if life is not self.lives[-1]:
            raise Violation("E1", f"{rank.name} keeps {state.name} of a job that another one has followed")
        newest = max(life.final, default=-1)
        held: State | None = state
        while held is not None and held.step > newest:
            held = held.before
        if newest in life.final and (held is None or held.bits != life.final[newest].bits):
            raise Violation("E1", f"{rank.name} keeps {state.name}, and {life.final[newest].name} is final")
        if life.over is not None and life.over != state.step:
            raise Violation("E1", f"{rank.name} keeps step {state.step}, and the job was ended after step {life.over}")
        incarnation, other = life.kept or (rank.group.incarnation, state)
        if (incarnation, other.bits) != (rank.group.incarnation, state.bits):
            raise Violation("E1", f"{rank.name} keeps {state.name}, and {incarnation} has kept {other.name}")
        life.kept = (incarnation, other)
        self.kept_jobs += 1
        self.world.checkpoints.kept(state)
        self.world.say(f"{rank.name} ({rank.group.incarnation}) keeps {state.name}")

    def overwrites(self, rank: Rank) -> None:
        """A rank takes a state from others: only a joiner may."""
        known = rank.group.machine.known
        if known is not None and known.slot_of(rank.group.group, rank.group.incarnation) is not None:
            raise Violation("I8", f"{rank.name} is a member of {known.epoch}, and its state is overwritten")

    # ------------------------------------------------------------ the lighthouse

    def hears(self, lighthouse: Lighthouse, stream: Stream, message: m.ToLighthouse) -> None:
        """A message has arrived at a lighthouse."""
        if isinstance(message, m.Beat):
            self._waiting[lighthouse.address, stream.process.incarnation] = (lighthouse.now, message.waiting_ms)
        if isinstance(message, m.Promise):
            self.world.checkpoints.hears(lighthouse, stream, message)
        self.looks(lighthouse, message)
        if self.world.traces and not isinstance(message, m.Beat):
            self.world.say(f"{stream.process.incarnation} -> {lighthouse.address}: {_brief(message)}")

    def logged(self, lighthouse: Lighthouse, record: Record) -> None:
        """A lighthouse has written a record."""
        self.world.say(f"{lighthouse.address} logs {_brief(record)}")
        if isinstance(record, Activated):
            self._in_force(record.membership)
            if record.membership.base is None and (
                wrong := self.world.checkpoints.begins(lighthouse, record.membership)
            ):
                raise Violation("W11", wrong)

    def spoken(self, lighthouse: Lighthouse, message: m.ToManager) -> None:
        """A lighthouse sends a message: it must be on its disk."""
        disk = lighthouse.disk.history
        if isinstance(message, m.Prepare):
            if message.epoch.number > disk.highest:
                raise Violation("log", f"{message.epoch} is spoken of but not logged")
        elif isinstance(message, m.Activate):
            if disk.membership != message.membership:
                raise Violation("log", f"{message.membership.epoch} is activated but not logged")
        elif isinstance(message, m.Welcome) and message.term.number > lighthouse.disk.number:
            raise Violation("log", f"{message.term} is spoken of but not logged")

    def noted(self, lighthouse: Lighthouse, note: Note) -> None:
        """A lighthouse says something: that somebody is gone must be so, and whoever is left out must end."""
        fields = note.fields
        if note.kind == "group_lost":
            self._blamed(lighthouse, str(fields["group"]), str(fields["incarnation"]), str(fields["detected_by"]))
        elif note.kind == "fenced":
            left_out = LeftOut(self.world.clock.now, lighthouse, lighthouse.starts)
            self._left_out[str(fields["incarnation"])] = left_out
            if "lags by more" in str(fields.get("reason")):
                self._lags(lighthouse, str(fields["group"]), str(fields["incarnation"]))
        elif note.kind == "job_stopped" and "contradicts itself" in str(fields["reason"]):
            raise Violation("I1", str(fields["reason"]))
        elif note.kind == "job_stopped" and str(fields["reason"]).startswith(m.QUORUM_LOST):
            self._given_up(lighthouse)

    def _given_up(self, lighthouse: Lighthouse) -> None:
        """A job ends below its minimum, after the last step that anybody has promised to hold."""
        machine = lighthouse.machine
        assert machine.recovery is not None and machine.newest is not None
        last = [promise.last for promise in machine.recovery.promises.values()]
        life = self._lives[machine.newest.epoch]
        life.over = max(entry.step if entry is not None else -1 for entry in last)
        if max(life.final, default=-1) > life.over:
            raise Violation("E1", f"step {max(life.final)} is final, and the job is ended after step {life.over}")

    def _blamed(self, lighthouse: Lighthouse, group: str, incarnation: str, detected_by: str) -> None:
        process = self.world.groups.get(group)
        silent_s = lighthouse.now - max(lighthouse.heard.get(incarnation, -1e9), lighthouse.awake_s)
        if detected_by == "lease" and silent_s < lighthouse.machine.patience.lease_s * 0.99:
            raise Violation("blame", f"{incarnation} is called silent {silent_s:.2f} s after it was heard")
        if process is None or process.incarnation != incarnation:
            return
        if detected_by == "lease" and process.alive:
            self._waited_for(lighthouse, incarnation)
        late_s = self.world.longest_still_s + self.world.shape.lease_s  # what says so may have been held up
        if detected_by == "progress":
            if not any(rank.stood_still_at > self.world.clock.now - late_s for rank in process.ranks):
                raise Violation("blame", f"{incarnation} is called stuck, and is not")
            return
        if detected_by != "frozen":
            return
        if not any(rank.frozen_until > self.world.clock.now - late_s or not rank.alive for rank in process.ranks):
            raise Violation("blame", f"{incarnation} is called frozen, and is not")

    def looks(self, lighthouse: Lighthouse, message: m.ToLighthouse | None = None) -> None:
        """A lighthouse is about to decide something: whether its epoch stands, by what it has heard up to now."""
        machine = lighthouse.machine
        newest = None if machine.recovery is not None or isinstance(message, m.Failed | m.Hello) else machine.newest
        groups = [machine.groups.get(name) for name in newest.groups] if newest is not None else []
        over = any(group is not None and group.failed is not None for group in groups)
        self._stands[lighthouse.address] = None if over else newest

    def _waited_for(self, lighthouse: Lighthouse, incarnation: str) -> None:
        """Silence alone is no reason: the epoch has ended, or one of the others said that it stands for a lease."""
        stands = self._stands.get(lighthouse.address)
        bound_ms = STOOD_LEASES * lighthouse.machine.patience.lease_s * 1000
        for member in stands.members if stands is not None else ():
            beat_s, waiting_ms = self._waiting.get((lighthouse.address, member.incarnation), (-1e9, 0))
            if member.incarnation != incarnation and waiting_ms >= bound_ms and beat_s >= lighthouse.awake_s:
                return
        if stands is not None:
            raise Violation("blame", f"{incarnation} is left out of {stands.epoch} for its silence, and nobody waits")

    def _lags(self, lighthouse: Lighthouse, group: str, incarnation: str) -> None:
        """Whoever is left out for lagging does."""
        process, activation = self.world.groups.get(group), lighthouse.machine.activation
        if process is None or process.incarnation != incarnation or activation is None:
            return
        if process.machine.step >= activation.first_step - 1:
            step = process.machine.step
            raise Violation("blame", f"{incarnation} is left out for lagging, and is at step {step}")

    # ------------------------------------------------------------ time

    def waits(self) -> None:
        """Called now and then: nothing waits without a bound, and who was left out does not go on for long."""
        world = self.world
        for process in world.groups.values():
            if process.alive and not process.frozen:
                self._waits_bounded(process)
        limit_s = FENCED_LEASES * world.shape.lease_s
        for incarnation, left_out in list(self._left_out.items()):
            found = next((p for p in world.groups.values() if p.incarnation == incarnation and p.alive), None)
            if found is None or left_out.lighthouse.starts != left_out.starts:
                del self._left_out[incarnation]  # it has ended, or nobody knows that it was left out
            elif not _hear_each_other(found, left_out.lighthouse):
                left_out.since = world.clock.now
            elif world.clock.now - left_out.since > limit_s + (ENDS_S_MAX if found.machine.errors else 0.0):
                raise Violation("I2", f"{incarnation} was left out {limit_s:.0f} s ago, is in touch, and goes on")

    def _waits_bounded(self, process: GroupProcess) -> None:
        settings = process.settings
        if process.machine.parked:
            return  # as long as it takes
        for rank in process.ranks:
            if not rank.alive or rank.frozen or rank.phase == "ended":
                continue
            bound_s = settings.outage_budget_s
            if process.machine.known is None or rank.phase in STANDING:
                bound_s = settings.timeouts.start_budget_s
            bound_s += 2 * self.world.longest_still_s + 2.0
            waited_s = self.world.clock.now - rank.since
            if waited_s > bound_s:
                raise Violation("I6", f"{rank.name} has been in phase {rank.phase} for {waited_s:.0f} s")


def _hear_each_other(process: GroupProcess, lighthouse: Lighthouse) -> bool:
    stream, network = process.stream, process.world.network
    if stream is None or stream.lighthouse is not lighthouse or not stream.at_lighthouse:
        return False
    return lighthouse.up and not lighthouse.frozen and not process.frozen and network.whole and not network.slow_s


def _brief(message: object) -> str:
    """A message on one line of a transcript."""
    text = str(message)
    for term in ("Epoch(number=", "term=Term(number=", "lighthouse="):
        text = text.replace(term, "")
    return text if len(text) <= 300 else text[:300] + "..."
