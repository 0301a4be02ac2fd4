"""What goes wrong in a history: a plan drawn from its seed, each fault with all that it needs to strike the same again.

To add one: write a method of `Faults` that returns whether it struck, and it is planned, counted and shown.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from lightkeeper.simulator.phases import PHASES, joiners, living, members, phases_now

if TYPE_CHECKING:
    from lightkeeper.simulator.followers import Follower
    from lightkeeper.simulator.groups import GroupProcess
    from lightkeeper.simulator.lighthouses import Lighthouse
    from lightkeeper.simulator.world import World

T = TypeVar("T")
AIM_S = 6.0  # a fault aimed at a phase waits so long for it, then strikes anyway
AIM_END_S = 60.0  # the same, if aimed at the run's end
LOOK_S = 0.001  # between two looks whether the phase is there
STARTS_S = 2.0  # a fault aimed at the start begins to wait within so long
FAVOUR = 0.7  # share of the faults that are of favoured kinds, if there are any
AIMED = 0.75  # share of the faults that are aimed at a phase


@dataclass(frozen=True)
class Fault:
    """A planned fault.

    Attributes:
        kind: name of a method of `Faults`.
        at_s: when it strikes; if aimed, when it begins to wait for the phase.
        phase: the phase it is aimed at, or none.
        pick: chooses whom, among those whom it can strike.
        length_s: how long it lasts, if it does.
        delay_s: once the phase is there.
    """

    kind: str
    at_s: float
    phase: str = ""
    pick: int = 0
    length_s: float = 1.0
    delay_s: float = 0.0


class Faults:
    """Lets a plan strike.

    Args:
        world: the history.
        plan: what is to strike.

    Attributes:
        struck: how many did.
        cells: how many of a kind struck in a phase.
    """

    def __init__(self, world: World, plan: Sequence[Fault]) -> None:
        self.world = world
        self.struck = 0
        self.cells: dict[tuple[str, str], int] = {}
        self.kinds: dict[str, int] = {}
        self.last_s = 0.0  # when the last effect of the last one is over
        self._aimed: list[tuple[float, Fault]] = []
        self._looked_s = 0.0
        for fault in plan:
            world.clock.at(fault.at_s, self._aim, fault)

    # ------------------------------------------------------------ aiming

    def _aim(self, fault: Fault) -> None:
        if not fault.phase:
            self._strike(fault)
            return
        wait_s = AIM_END_S if fault.phase == "closing" else AIM_S
        self._aimed.append((self.world.clock.now + wait_s, fault))
        self.world.after_event = self._look

    def _look(self) -> None:
        now = self.world.clock.now
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        for aimed in list(self._aimed):
            until, fault = aimed
            if now >= until or PHASES[fault.phase](self.world):
                self._aimed.remove(aimed)
                self.world.clock.after(fault.delay_s, self._strike, fault)
        if not self._aimed:
            self.world.after_event = None

    def _strike(self, fault: Fault) -> None:
        world = self.world
        if world.done:
            return
        phases = phases_now(world)
        world.say(f"FAULT {fault.kind} ({', '.join(phases)})")
        if not getattr(self, fault.kind)(fault):
            world.say("  it finds nothing to strike")
            return
        self.struck += 1
        self.kinds[fault.kind] = self.kinds.get(fault.kind, 0) + 1
        self.last_s = max(self.last_s, world.clock.now + fault.length_s)
        world.longest_still_s = max(world.longest_still_s, fault.length_s)
        for phase in phases:
            self.cells[fault.kind, phase] = self.cells.get((fault.kind, phase), 0) + 1

    # ------------------------------------------------------------ groups

    def kill_rank(self, fault: Fault) -> bool:
        """A rank is killed; its manager sees it."""
        group = _one(living(self.world), fault)
        if group is not None:
            self._say(group)
            group.ranks[fault.pick // 7 % len(group.ranks)].die(-9)
        return group is not None

    def kill_group(self, fault: Fault) -> bool:
        """A host dies: manager and ranks at once."""
        return self._kill(_one(living(self.world), fault))

    def kill_several(self, fault: Fault) -> bool:
        """All members but one die within a moment."""
        here = members(self.world)
        staying = _one(here, fault)
        for group in here:
            if group is not staying:
                self.world.clock.after(fault.delay_s * (1 + len(group.group)), group.kill_tree)
        return len(here) > 1

    def kill_donor(self, fault: Fault) -> bool:
        """A member dies from whom a joiner heals."""
        return bool(joiners(self.world)) and self._kill(_one(members(self.world), fault))

    def kill_joiner(self, fault: Fault) -> bool:
        """A group dies that is no member yet."""
        return self._kill(_one(joiners(self.world), fault))

    def raise_error(self, fault: Fault) -> bool:
        """The user's code raises in one rank."""
        running = [
            r for g in living(self.world) for r in g.ranks if r.alive and r.phase in ("before", "compute", "reduce")
        ]
        rank = _one(running, fault)
        if rank is not None and not rank.frozen:
            self.world.say(f"  in {rank.name}")
            rank.raise_error()
            return True
        return False

    def freeze_manager(self, fault: Fault) -> bool:
        """A manager stands still; its ranks go on."""
        return self._freeze(_one(living(self.world), fault), fault, ranks=False)

    def freeze_group(self, fault: Fault) -> bool:
        """A host stands still."""
        return self._freeze(_one(living(self.world), fault), fault, ranks=True)

    def suspend_group(self, fault: Fault) -> bool:
        """A host stands still, and its clock with it: it sees no gap."""
        return self._freeze(_one(living(self.world), fault), fault, ranks=True, unseen=True)

    def freeze_rank(self, fault: Fault) -> bool:
        """A rank is stopped by a signal."""
        rank = self._rank_for_a_while(fault)
        if rank is not None:
            rank.freeze(fault.length_s)
        return rank is not None

    def slow_rank(self, fault: Fault) -> bool:
        """A rank computes for long in its next step."""
        group = _one(members(self.world), fault)
        if group is not None:
            self._say(group)
            group.ranks[fault.pick // 7 % len(group.ranks)].slow_s = fault.length_s
        return group is not None

    def jump_manager(self, fault: Fault) -> bool:
        """A manager's clock jumps ahead, as after a suspend."""
        group = _one(living(self.world), fault)
        if group is not None:
            self._say(group)
            group.offset_s += fault.length_s
        return group is not None

    def leave(self, fault: Fault) -> bool:
        """A group is asked to leave; it comes back after a while."""
        asked = [g for g in living(self.world) if not g.machine.leaving and g.machine.stopped is None]
        group = _one(asked, fault)
        if group is None or len(asked) <= 1:
            return False
        self._say(group)
        group.leave("asked to")
        return True

    # ------------------------------------------------------------ lighthouses

    def restart_lighthouse(self, fault: Fault) -> bool:
        """A lighthouse dies and comes back with its log."""
        return self._restart(_one(self._up(), fault), fault.length_s, keep=True)

    def bounce_lighthouse(self, fault: Fault) -> bool:
        """A lighthouse dies and is back with its log in a moment."""
        return self._restart(_one(self._up(), fault), 0.02 + fault.delay_s, keep=True)

    def lose_log(self, fault: Fault) -> bool:
        """A lighthouse dies, and another comes to its address with an empty disk."""
        return self._restart(_one(self._up(), fault), fault.length_s / 2, keep=False)

    def freeze_lighthouse(self, fault: Fault) -> bool:
        """A lighthouse stands still."""
        return self._still(_one(self._up(), fault), fault, unseen=False)

    def suspend_lighthouse(self, fault: Fault) -> bool:
        """A lighthouse stands still, and its clock with it."""
        return self._still(_one(self._up(), fault), fault, unseen=True)

    def jump_lighthouse(self, fault: Fault) -> bool:
        """A lighthouse's clock jumps ahead."""
        lighthouse = _one(self._up(), fault)
        if lighthouse is not None:
            lighthouse.jump(fault.length_s)
        return lighthouse is not None

    def operator_speaks(self, fault: Fault) -> bool:
        """A person says whose processes are gone, and is right."""
        return self.world.operator_speaks()

    # ------------------------------------------------------------ network

    def break_stream(self, fault: Fault) -> bool:
        """A stream breaks with what is under way; the manager connects again."""
        group = _one(self._connected(), fault)
        if group is not None and group.stream is not None:
            self._say(group)
            group.stream.break_it()
        return group is not None

    def reconnect(self, fault: Fault) -> bool:
        """A manager opens another stream, and the lighthouse holds the old one as well; its messages come late."""
        group = _one([g for g in self._connected() if not g.frozen], fault)
        if group is not None:
            self._say(group)
            group.reconnect()
        return group is not None

    def cut_control(self, fault: Fault) -> bool:
        """A group and one lighthouse, both ways."""
        return self._cut(fault, up=True, down=True)

    def cut_up(self, fault: Fault) -> bool:
        """Nothing comes from a group to a lighthouse."""
        return self._cut(fault, up=True, down=False)

    def cut_down(self, fault: Fault) -> bool:
        """Nothing comes from a lighthouse to a group."""
        return self._cut(fault, up=False, down=True)

    def isolate_lighthouse(self, fault: Fault) -> bool:
        """No group reaches one of the lighthouses."""
        lighthouse = _one(self._up(), fault)
        for name in self.world.names if lighthouse is not None else ():
            assert lighthouse is not None
            self._cut_both(name, lighthouse.address, fault.length_s)
        return lighthouse is not None

    def split(self, fault: Fault) -> bool:
        """The world falls apart: lighthouses and groups on either side, and nothing between them."""
        names = (*self.world.names, *(lighthouse.address for lighthouse in self.world.lighthouses))
        side = [name for i, name in enumerate(names) if fault.pick >> i & 1]
        other = [name for name in names if name not in side]
        self.world.say(f"  {', '.join(side)} from {', '.join(other)} for {fault.length_s:.1f} s")
        for a in side:
            for b in other:
                self._cut_both(a, b, fault.length_s)
        return bool(side) and bool(other)

    def cut_data(self, fault: Fault) -> bool:
        """Two groups' ranks do not reach each other: reduces between them stand."""
        names = self.world.names
        if len(names) < 2:
            return False
        first = fault.pick % len(names)
        second = (first + 1 + fault.pick // 7 % (len(names) - 1)) % len(names)
        self.world.say(f"  {names[first]} from {names[second]} for {fault.length_s:.1f} s")
        self._cut_both(names[first], names[second], fault.length_s)
        return True

    def say_again(self, fault: Fault) -> bool:
        """What a lighthouse once said to a manager comes again, late: on this stream, or by one that is gone."""
        group = _one([g for g in self._connected() if g.named], fault)
        if group is None or group.stream is None:
            return False
        message = group.named[fault.pick // 7 % len(group.named)]
        self.world.say(f"  to {group.incarnation}: {message}")
        group.take(group.stream, message)
        return True

    def delay(self, fault: Fault) -> bool:
        """Messages from and to a group are slow."""
        name = self.world.names[fault.pick % len(self.world.names)]
        self.world.network.slow_s[name] = 1.5
        self.world.clock.after(fault.length_s, self._fast_again, name)
        return True

    def _fast_again(self, name: str) -> None:
        self.world.network.slow_s.pop(name, None)

    # ------------------------------------------------------------ collectives and transfers

    def fail_reduces(self, fault: Fault) -> bool:
        """For a moment reduces may fail, on some members and not on others."""
        return self._for_a_while("failing", 0.3, 0.1 + fault.delay_s)

    def fail_forming(self, fault: Fault) -> bool:
        """For a while process groups may not form: an error, or nothing until the time-out."""
        self.world.clock.after(0.0, self._break_something, fault)
        return self._for_a_while("form_failing", 0.6, fault.length_s / 4)

    def fail_copies(self, fault: Fault) -> bool:
        """For a while transfers of a state break off half-way."""
        return self._for_a_while("copy_failing", 0.7, fault.length_s)

    def stall_rank(self, fault: Fault) -> bool:
        """A rank lives and does nothing: asleep, or in a C call that keeps the interpreter lock."""
        rank = self._rank_for_a_while(fault)
        if rank is not None:
            rank.stall(fault.length_s)
        return rank is not None

    # ------------------------------------------------------------ how

    def _rank_for_a_while(self, fault: Fault) -> Follower | None:
        group = _one(living(self.world), fault)
        if group is None:
            return None
        rank = group.ranks[fault.pick // 7 % len(group.ranks)]
        self.world.say(f"  {rank.name} for {fault.length_s:.1f} s")
        return rank

    def _say(self, group: GroupProcess) -> None:
        self.world.say(f"  of {group.incarnation}")

    def _up(self) -> list[Lighthouse]:
        return [lighthouse for lighthouse in self.world.lighthouses if lighthouse.up]

    def _connected(self) -> list[GroupProcess]:
        return [group for group in living(self.world) if group.stream is not None]

    def _kill(self, group: GroupProcess | None) -> bool:
        if group is not None:
            self._say(group)
            group.kill_tree()
        return group is not None

    def _freeze(self, group: GroupProcess | None, fault: Fault, ranks: bool, unseen: bool = False) -> bool:
        if group is None:
            return False
        self.world.say(f"  {group.incarnation} for {fault.length_s:.1f} s")
        group.freeze(fault.length_s, unseen)
        for rank in group.ranks if ranks else ():
            rank.freeze(fault.length_s)
        return True

    def _restart(self, lighthouse: Lighthouse | None, seconds: float, keep: bool) -> bool:
        if lighthouse is None:
            return False
        lighthouse.stop()
        self.world.clock.after(seconds, lighthouse.start, keep)
        return True

    def _still(self, lighthouse: Lighthouse | None, fault: Fault, unseen: bool) -> bool:
        if lighthouse is None:
            return False
        self.world.say(f"  {lighthouse.address} for {fault.length_s:.1f} s")
        lighthouse.stand_still(fault.length_s, unseen)
        return True

    def _cut(self, fault: Fault, up: bool, down: bool) -> bool:
        group = _one(living(self.world), fault)
        lighthouse = self.world.lighthouses[fault.pick // 7 % len(self.world.lighthouses)]
        if group is None:
            return False
        self.world.say(f"  {group.group} and {lighthouse.address} for {fault.length_s:.1f} s")
        if up:
            self.world.network.cut(group.group, lighthouse.address, fault.length_s)
        if down:
            self.world.network.cut(lighthouse.address, group.group, fault.length_s)
        return True

    def _cut_both(self, a: str, b: str, seconds: float) -> None:
        self.world.network.cut(a, b, seconds)
        self.world.network.cut(b, a, seconds)

    def _for_a_while(self, what: str, probability: float, seconds: float) -> bool:
        setattr(self.world, what, probability)
        self.world.clock.after(seconds, setattr, self.world, what, 0.0)
        return True

    def _break_something(self, fault: Fault) -> None:
        """A group is formed only after something else went wrong."""
        group = _one(members(self.world), fault)
        if group is not None and group.ranks[0].alive:
            for net in group.ranks[0].nets.values():
                net.break_by(group.group, hears=True)


DRAWN_APART = ("stall_rank",)  # by `draw_stalls`, where that is asked for
KINDS: tuple[str, ...] = tuple(
    name
    for name, method in vars(Faults).items()
    if not name.startswith("_") and name not in DRAWN_APART and isinstance(method, Callable)  # type: ignore[arg-type]
)


def draw_stalls(random: random.Random, window_s: float) -> list[Fault]:
    """In every third history a rank or two make no progress for a while.

    Args:
        random: of its own.
        window_s: they strike until then.
    """
    stalls = []
    for _ in range(random.choice((0, 0, 1, 1, 2)) if random.random() < 0.5 else 0):
        phase = random.choice(list(PHASES)) if random.random() < AIMED else ""
        at_s, length_s = (
            random.uniform(0.0, window_s),
            random.choice((random.uniform(1.0, 5.0), random.uniform(5.0, 30.0))),
        )
        stalls.append(Fault("stall_rank", round(at_s, 3), phase, random.randrange(1 << 16), round(length_s, 3)))
    return stalls


def draw_plan(
    random: random.Random, window_s: float, count: int, word: bool = False, favoured: Sequence[str] = ()
) -> list[Fault]:
    """A plan of so many faults within the window; most are aimed at a phase of the protocol.

    Args:
        random: of the history's seed.
        window_s: they strike until then.
        count: how many.
        word: whether the groups carry the word of whoever creates the job. Then no log is lost: who creates a job at a
            lighthouse that knows nothing of it vouches that it does not run.
        favoured: kinds that make up most of the faults.
    """
    plan = []
    kinds = [kind for kind in KINDS if not (word and kind == "lose_log")]
    for _ in range(count):
        kind = random.choice(favoured if favoured and random.random() < FAVOUR else kinds)
        at_s = random.uniform(0.0, window_s)
        phase = random.choice(list(PHASES)) if random.random() < AIMED else ""
        if phase == "start":
            at_s = random.uniform(0.0, STARTS_S)
        length_s = random.choice((random.uniform(0.1, 2.0), random.uniform(1.0, 4.0), random.uniform(2.0, 12.0)))
        delay_s = random.choice((0.0, 0.0, random.uniform(0.0, 0.01), random.uniform(0.0, 0.2)))
        plan.append(
            Fault(kind, round(at_s, 3), phase, random.randrange(1 << 16), round(length_s, 3), round(delay_s, 4))
        )
    return sorted(plan, key=lambda fault: fault.at_s)


def _one(among: Sequence[T], fault: Fault) -> T | None:
    return among[fault.pick % len(among)] if among else None
