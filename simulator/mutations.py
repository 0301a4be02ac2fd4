"""The rules that are undone one by one, each as a piece of source text and what stands there instead.

Most are a line of the machines; those under ``simulator/`` undo a rule of what the trainer's side does with tensors
(which entry is taken, what follows on what). Where two lines hold one rule, undoing either of them shows nothing, since
the other still holds it; such a mutant undoes it where the protocol rests on it.

`MUTANTS` are noticed. `UNNOTICED` have not been up to now: most broke nothing in the 80 to 600 histories that were run,
the first three and two of those on a standstill have hardly been tried. Either they need more histories, or another
rule holds the same. No claim rests on them; whoever finds the faults that show one moves it up. Left out altogether,
since no history can show them:

- that an epoch of an older term is not activated: its number is lower as well, since numbers rise across terms;
- that a lighthouse without its log takes nobody's word but the operator's: a job may wait for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """One mutation.

    Attributes:
        name: what is undone.
        module: under ``lightkeeper``, with a slash.
        old: the source text that is there exactly once.
        new: what stands there instead.
        favoured: kinds of faults under which the rule matters; its histories are full of them.
        shape: fields of the shape with which it matters.
        seed: the first of its histories that notices, as the machines are now.
    """

    name: str
    module: str
    old: str
    new: str
    favoured: tuple[str, ...] = ()
    shape: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "no fence",
        "lighthouse/takeover",
        "return [note, *self._send(group, m.Fence(reason))]",
        "return [note]",
        seed=7,
    ),
    Mutant(
        "no lease",
        "lighthouse/silence",
        "return since is not None and now - since > patience.lease_s * times",
        "return since is not None",
    ),
    Mutant(
        "silence taken for death when nobody is left",
        "lighthouse/job",
        "return [g for g in self._members() if g.gone is None or g.gone.detected_by not in KNOWN_BY]",
        "return [g for g in self._members() if g.in_touch]",
        favoured=("cut_control", "cut_up", "kill_rank", "kill_group", "break_stream"),
        shape={"lighthouses": 1, "start_window_s": 3.0, "minimum": 1, "groups": 3},
        seed=12,
    ),
    Mutant(
        "mere silence taken for death, though the others commit",
        "lighthouse/silence",
        "if not epoch_is_over and stands_s < bound_s:",
        "if False:",
        favoured=("cut_control", "cut_up"),
        seed=6,
    ),
    Mutant(
        "who is silent is left out before its lease has passed",
        "lighthouse/changes",
        "if any(group.gone is None and group.name not in recovery.asked for group in self._members()):",
        "if False:",
        favoured=("break_stream", "cut_up", "fail_reduces", "kill_rank"),
        seed=6,
    ),
    Mutant(
        "old epoch activated",
        "manager/machine",
        "epoch = membership.epoch\n        if epoch.number < self.promised or (",
        "epoch = membership.epoch\n        if False and (",
        favoured=("say_again", "reconnect", "fail_reduces", "kill_rank"),
    ),
    Mutant(
        "an old epoch promised",
        "manager/machine",
        "return self._prepare_planned(prepare.planned)\n        if epoch.number < self.promised or (",
        "return self._prepare_planned(prepare.planned)\n        if (",
        favoured=("say_again", "fail_reduces", "kill_rank"),
        seed=12,
    ),
    Mutant(
        "old term acknowledged",
        "manager/machine",
        "if self.acknowledged is not None and welcome.term < self.acknowledged:",
        "if False:",
        favoured=("say_again", "bounce_lighthouse", "isolate_lighthouse"),
        seed=3,
    ),
    Mutant(
        "promise not kept",
        "manager/votes",
        'if "failed" in outcomes or self.promised > epoch.number:',
        'if "failed" in outcomes:',
        seed=46,
    ),
    Mutant(
        "commit before all ranks have voted",
        "manager/votes",
        "or self.suspended or len(self.votes) < self.settings.ranks:",
        "or self.suspended or 0 not in self.votes:",
    ),
    Mutant(
        "an incomplete sum is committed",
        "manager/votes",
        'if outcomes == {"reduced"}:',
        'if "reduced" in outcomes or "again" in outcomes:',
    ),
    Mutant(
        "fresh deal in a recovery",
        "lighthouse/recovery",
        "{group: promises[group].held for group in ahead}",
        "{}",
        seed=1,
    ),
    Mutant(
        "fresh deal after an adopted entry",
        "manager/votes",
        "if first_here:",
        "if False:",
        seed=17,
    ),
    Mutant(
        "share dealt twice: to the joiner of a first step too",
        "manager/votes",
        "if name not in self.joiners]",
        "]",
    ),
    Mutant(
        "activation spoken of before it is logged",
        "lighthouse/changes",
        "actions: list[Action] = [Activated(membership), self._activated_note(), *promotions]",
        "actions: list[Action] = [self._activated_note(), *promotions]",
    ),
    Mutant(
        "promised numbers forgotten with the log",
        "lighthouse/machine",
        "self.highest = max(self.highest, hello.promised, *numbers, 0)",
        "pass",
        seed=136,
    ),
    Mutant(
        "a lighthouse without log leaves out whom it does not hear",
        "lighthouse/takeover",
        "self.newest, self.reigns, self.prepared, self.shown = newest, False, [], newest.epoch",
        "self.newest, self.reigns, self.prepared, self.shown = newest, True, [], newest.epoch",
        favoured=("lose_log", "split", "isolate_lighthouse", "cut_control", "fail_reduces", "kill_rank"),
        shape={"lighthouses": 2, "minimum": 1, "groups": 2, "start_window_s": 0.0},
        seed=13,
    ),
    Mutant(
        "majority instead of all for a lighthouse without log",
        "lighthouse/takeover",
        "if self.reigns or self.newest is None or self._unanswered():",
        "if self.reigns or self.newest is None or 2 * len(self._unanswered()) >= len(self.newest.members):",
        favoured=("lose_log", "split", "isolate_lighthouse", "cut_control", "fail_reduces"),
        shape={"minimum": 1, "groups": 3, "start_window_s": 0.0},
        seed=415,
    ),
    Mutant(
        "ready flag before the group is formed",
        "manager/votes",
        "built = bool(self.prepared) and len(self.built) == self.settings.ranks",
        "built = bool(self.prepared)",
        seed=6,
    ),
    Mutant(
        "who was left out elsewhere heals",
        "lighthouse/takeover",
        "left_out = was is not None and",
        "left_out = False and",
        seed=1363,
    ),
    Mutant(
        "half a state is gone on from",
        "manager/machine",
        "if self.torn:",
        "if False:",
        seed=7,
    ),
    Mutant(
        "a joiner that lost the entries is waited for",
        "lighthouse/machine",
        "group.lost_in = max((p.epoch.number for p in (*self.prepared, *elsewhere)), default=group.lost_in)",
        "group.lost_in = 0",
        seed=2,
    ),
    Mutant(
        "state taken by a rank of a joiner counts for all of them",
        "manager/joins",
        "if len({(v.step, v.entry) for v in self.votes.values()}) > 1:",
        "if False:",
        seed=1299,
    ),
    Mutant(
        "who waits to join is forgotten with the job",
        "lighthouse/endings",
        "self.config = self.config or group.hello",
        "pass",
        seed=15,
    ),
    Mutant(
        "a joiner is named as if it had stood still since its promise",
        "manager/machine",
        "if self.following:\n            followed",
        "if False:\n            followed",
        seed=16,
    ),
    Mutant(
        "ranks of a joiner that differ for a moment end it",
        "manager/joins",
        "return self._catch_up()",
        "raise AssertionError('ranks of a joiner differ')",
        seed=16,
    ),
    Mutant(
        "own buckets taken for the entry, whichever epoch reduced them",
        "simulator/ranks",
        "self.pending is None or self.pending.name != name:",
        "self.pending is None or self.pending.name.step != name.step:",
        favoured=("fail_reduces", "break_stream", "freeze_rank"),
        seed=132,
    ),
    Mutant(
        "entry committed under the epoch that adopts it",
        "manager/votes",
        "return self._commit(self.activation.entry)",
        "return self._commit(Entry(epoch, self.activation.entry.step))",
        favoured=("fail_reduces", "kill_rank"),
    ),
    Mutant(
        "store key without epoch",
        "simulator/world",
        "key = (plan.epoch, plan.term, plan.lighthouse, index)",
        'key = (0, 0, "", index)',
        seed=1,
    ),
    Mutant(
        "store key without term",
        "simulator/world",
        "key = (plan.epoch, plan.term, plan.lighthouse, index)",
        'key = (plan.epoch, 0, "", index)',
        seed=179,
    ),
    Mutant(
        "a flag that not all carry activates",
        "simulator/collectives",
        "flags.pop() if len(flags) == 1 else 0,",
        "max(flags),",
        seed=28,
    ),
    Mutant(
        "before extras that somebody has computed with are made anew",
        "simulator/collectives",
        "having[0] if having else self._world",
        "self._world",
        seed=3,
    ),
    Mutant(
        "finished before closing",
        "simulator/ranks",
        'self._reduce_bucket("closing", 0)\n            return',
        'self.vote("closed")\n            return',
    ),
    Mutant(
        "its own standstill counts as the others' silence",
        "lighthouse/machine",
        "if gap_s > self.bounds.lease_s / 2:",
        "if False:",
        seed=8,
    ),
    Mutant(
        "other speeds as soon as they seem better",
        "lighthouse/speeds",
        "step - self.since < STEADY_STEPS or step - self.changed < EVERY_STEPS",
        "step - self.since < 0",
        shape={
            "by_speed": True,
            "slow": (1.0, 4.0, 1.0),
            "rotate_s": 1.0,
            "groups": 3,
            "minimum": 1,
            "microbatches": 6,
            "microbatch_s": (0.01, 0.03),
        },
    ),
)

UNNOTICED: tuple[Mutant, ...] = (
    Mutant(
        "planned changes that a lost log held come into force unseen",
        "lighthouse/machine",
        "self.foreign = sorted({p.epoch: p for p in told}.values(), key=lambda planned: planned.epoch)",
        "self.foreign = []",
    ),
    Mutant(
        "who moved away is waited for before the first epoch",
        "lighthouse/changes",
        "if group.connection is not None and silent_s > self.patience.away_s:",
        "if False:",
    ),
    Mutant(
        "who comes from a job that broke off goes on with it",
        "lighthouse/takeover",
        "return hello.known.epoch <= self.broken_off",
        "return False",
    ),
    Mutant(
        "joiners of two histories begin one job",
        "lighthouse/changes",
        "candidates = of_one_history(candidates, promises, joined)",
        "pass",
        seed=136,
    ),
    Mutant(
        "a reign not given up to a higher term",
        "lighthouse/takeover",
        "        if not self.reigns:\n            return []\n        self.reigns = False",
        "        if self.newest is None:\n            return []\n        return []\n        self.reigns = False",
        favoured=("isolate_lighthouse", "split", "restart_lighthouse", "cut_control", "fail_reduces", "kill_rank"),
        shape={"lighthouses": 2, "groups": 2, "minimum": 1, "start_window_s": 0.0},
    ),
    Mutant(
        "a planned epoch that may be in force is not asked for",
        "lighthouse/changes",
        "if unheard(self.newest, promises) is not None or not self._may_leave_out():",
        "if not self._may_leave_out():",
        favoured=("leave", "cut_control", "fail_reduces", "kill_group", "freeze_group"),
        shape={"groups": 3, "minimum": 1},
    ),
    Mutant(
        "prepared epochs not named in the promise",
        "manager/machine",
        "m.Promise(epoch, self.known, tuple(self.prepared), ",
        "m.Promise(epoch, self.known, (), ",
        favoured=("leave", "lose_log", "fail_reduces", "cut_control", "kill_group"),
        shape={"groups": 3, "minimum": 1, "start_window_s": 0.0},
    ),
    Mutant(
        "who lags by two entries stays a member",
        "lighthouse/recovery",
        "if last[group] >= high - 1)",
        "if last[group] >= high - 2)",
        favoured=("kill_several", "kill_rank", "freeze_group", "delay", "leave"),
        shape={"groups": 3, "minimum": 2},
    ),
    Mutant(
        "first epoch with the minimum of groups",
        "lighthouse/job",
        "return len(joined) >= self.config.groups or (word and ",
        "return len(joined) >= self.config.groups or (True and ",
        favoured=("lose_log", "kill_group", "cut_control", "kill_rank"),
        shape={"lighthouses": 1, "groups": 3, "minimum": 1, "start_window_s": 0.0},
    ),
    Mutant(
        "a joiner goes on from another entry than it followed",
        "manager/machine",
        "if self.step == activate.first_step and self.last == activate.entry:",
        "if self.step >= activate.first_step:",
        favoured=("kill_donor", "kill_several", "kill_rank", "fail_reduces", "kill_group"),
        shape={"groups": 3, "minimum": 2, "ranks": 1},
    ),
    Mutant(
        "a new incarnation is taken for its leaver",
        "lighthouse/changes",
        "group.incarnation == member.incarnation and self._member(group.name) is None:",
        "self._member(group.name) is None:",
        favoured=("leave", "kill_group", "freeze_group", "cut_control", "reconnect"),
        shape={"groups": 3},
    ),
    Mutant(
        "boundary 0 means that nobody needs a copy",
        "lighthouse/messages",
        "RELEASE = 1 << 63",
        "RELEASE = 0",
        favoured=("kill_several", "kill_group", "cut_control"),
        shape={"groups": 3, "minimum": 2, "until": 40},
    ),
    Mutant(
        "a joiner that has not switched speaks for its epoch",
        "lighthouse/recovery",
        "return promise is not None and (promise.known is not None or membership.base is None)",
        "return promise is not None",
    ),
    Mutant(
        "a lighthouse without all members prepares a change",
        "lighthouse/changes",
        "if self.newest is None or not self.reigns or not all(self._here(member) for member in self.newest.members):",
        "if self.newest is None:",
    ),
    Mutant(
        "a leaver is a joiner when a promise shows the change",
        "lighthouse/changes",
        "learnt = self._planned_is_in_force(mine[0]) if mine else self._learn_newest(top)",
        "learnt = [] if mine else self._learn_newest(top)\n            self.newest = top",
    ),
    Mutant(
        "who leaves is taken for one left out",
        "lighthouse/takeover",
        "return left or any(planned.epoch == newest.epoch for planned in hello.prepared)",
        "return False",
    ),
    Mutant(
        "a hello taken for obedience",
        "lighthouse/job",
        "obeys = mine and group is not None and group.acknowledged == self.term",
        "obeys = mine and group is not None and group.in_touch",
    ),
    Mutant(
        "that another reigned is forgotten with a restart",
        "lighthouse/takeover",
        "return [] if self.newest is None else [Superseded()]",
        "return []",
    ),
    Mutant(
        "groups that wait for a first epoch at several lighthouses stay there",
        "lighthouse/takeover",
        "waited = now - max(here) > self.bounds.lease_s + CALLS_S",
        "waited = False",
    ),
    Mutant(
        "a rank that comes late from the epoch before sends the others back",
        "manager/answers",
        "if rank in self.votes:",
        "if False:",
    ),
    Mutant(
        "a try that is done anew is adopted as the entry",
        "simulator/ranks",
        "self.attempt += 1\n            self.pending = None",
        "self.attempt += 1",
    ),
    Mutant(
        "the word of one member is enough to go on after a standstill",
        "manager/outages",
        "doubtful = doubts(membership, tuple(self.prepared), self.settings.group, words)",
        "doubtful = doubts(membership, tuple(self.prepared), self.settings.group, words)[len(words) and 1 :]",
        favoured=("freeze_group", "freeze_manager", "split", "isolate_lighthouse", "kill_rank"),
    ),
    Mutant(
        "what the others have promised is not asked after a standstill",
        "manager/standing",
        "\n            and word.promised <= word.known.epoch.number",
        "",
        favoured=("freeze_group", "freeze_manager", "cut_control", "isolate_lighthouse", "kill_rank"),
    ),
    Mutant(
        "a standstill is not noticed",
        "manager/outages",
        "if gap_s <= self.lease_s or self.known is None or self.suspended:",
        "if True:",
        favoured=("freeze_group", "freeze_manager", "fail_reduces", "kill_rank"),
    ),
    Mutant(
        "entries without their predecessor's name",
        "simulator/holder",
        "entry = self._kept.get(name)",
        "entry = next((kept for kept in self._kept.values() if kept.name.step == name.step + 1), None)",
    ),
    Mutant(
        "who healed is known by the state that it joined with",
        "lighthouse/recovery",
        'state = {group: group if promises[group].healed else f"as {fingerprints[group]}" for group in begin}',
        'state = {group: f"as {fingerprints[group]}" for group in begin}',
        favoured=("fail_reduces", "kill_donor"),
        shape={"groups": 3, "lighthouses": 1, "minimum": 2, "unlike": 1, "copy_s": (0.1, 3.0), "until": 10},
    ),
    Mutant(
        "an old recovery undoes what was prepared since",
        "manager/machine",
        "if self.prepared and epoch.number <= self.prepared[-1].epoch.number:",
        "if False:",
        favoured=("say_again", "kill_rank", "isolate_lighthouse"),
        shape={"groups": 3, "minimum": 1, "lighthouses": 1},
    ),
)
