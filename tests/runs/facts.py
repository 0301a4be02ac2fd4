"""What a run's event log and the trainers' own traces say, as typed facts with the checks that every run must pass."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lightkeeper.events import schema
from lightkeeper.events.lineage import lineage, pick
from lightkeeper.events.reader import Torn
from lightkeeper.events.summary import (
    fingerprints_equal,
    one_lineage,
    recomputed_by_survivors,
    samples_exactly_once,
    steps_lost,
)

T = TypeVar("T", bound=schema.Event)


@dataclass
class Traced:
    """A trainer's own account.

    Attributes:
        forward: (step, microbatch) of each forward pass, in order.
        digests: step to the digest of the state after it.
        losses: step to the loss of the whole step.
        applied_at: step to monotonic seconds.
        other: further lines: (kind, monotonic seconds, values).
    """

    forward: list[tuple[int, int]] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    applied_at: dict[int, float] = field(default_factory=dict)
    other: list[tuple[str, float, list[Any]]] = field(default_factory=list)

    def all(self, kind: str) -> list[list[Any]]:
        """The values of every further line of this kind."""
        return [values for name, _, values in self.other if name == kind]


def whole_lines(path: Path) -> list[list[Any]]:
    """The lines of a trace; the last one may not be whole yet, or never will be if a kill came into its `write`."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def read_trace(path: Path) -> Traced:
    """Reads a trace; empty if the process did not come so far."""
    traced = Traced()
    if not path.exists():
        return traced
    for kind, at, *values in whole_lines(path):
        if kind == "forward":
            traced.forward.append((values[0], values[1]))
        elif kind == "applied":
            step, digest, loss = values
            assert step not in traced.digests, f"step {step} was applied twice"
            traced.digests[step], traced.losses[step] = digest, loss
            traced.applied_at[step] = at
        else:
            traced.other.append((kind, at, values))
    return traced


class Gold:
    """The plain run: digest and loss per step, and some of the final weights."""

    def __init__(self, traced: Traced) -> None:
        self.digests, self.losses = traced.digests, traced.losses
        self.weights: list[float] = traced.all("done")[0][1]
        self.scalars = traced.all("scalars")
        self.norms = traced.all("norm")


@dataclass
class Facts:
    """A finished run.

    Attributes:
        events: all events in order.
        torn: lines that could not be read.
        codes: trainer (or launcher) to exit code; negative for a signal.
        traces: trainer to its own account.
        said: trainer to what it and its manager printed.
        pids: trainer to its process.
    """

    events: list[schema.Event]
    torn: list[Torn]
    codes: dict[str, int | None]
    traces: dict[str, Traced]
    said: dict[str, str]
    pids: dict[str, int] = field(default_factory=dict)

    def all(self, kind: type[T], **fields: Any) -> list[T]:
        """Events of a kind with these fields."""
        return [e for e in pick(self.events, kind) if all(getattr(e, n) == v for n, v in fields.items())]

    def one(self, kind: type[T], **fields: Any) -> T:
        """The only event of a kind with these fields."""
        found = self.all(kind, **fields)
        assert len(found) == 1, f"{len(found)} {kind.__name__} {fields}"
        return found[0]

    @property
    def epochs(self) -> list[schema.Activated]:
        """What the lighthouse activated, in order."""
        return [e for e in pick(self.events, schema.Activated) if e.process == "lighthouse"]

    @property
    def members(self) -> list[tuple[str, ...]]:
        """Members of one epoch after the other."""
        return [epoch.members for epoch in self.epochs]

    @property
    def lost(self) -> dict[str, schema.GroupLost]:
        """Who was held to be gone, as the lighthouse blamed it."""
        return {e.group: e for e in pick(self.events, schema.GroupLost)}

    def commits(self, group: str) -> dict[int, schema.Committed]:
        """Step to the group's commit of it."""
        found = [e for e in pick(self.events, schema.Committed) if e.group == group]
        counts = Counter(e.step for e in found)
        assert not counts or max(counts.values()) == 1, f"{group} committed a step twice"
        return {e.step: e for e in found}

    def fault(self, kind: str, phase: str, group: str, step: int) -> schema.FaultInjected:
        """The only fault; fails unless it was this one."""
        fault = self.one(schema.FaultInjected)
        assert (fault.fault, fault.phase, fault.group, fault.step) == (kind, phase, group, step)
        return fault

    # ------------------------------------------------------------ checks

    def check(
        self, steps: int, survivors: set[str], exit_codes: dict[str, int] | None = None, left: Iterable[str] = ()
    ) -> None:
        """What must hold in every run that reached its end.

        Args:
            steps: number of steps of the run.
            survivors: groups that are there at the end; they exit 0.
            exit_codes: of all others.
            left: groups that left in good order before the end.
        """
        wanted = {**dict.fromkeys(sorted(survivors), 0), **(exit_codes or {})}
        assert self.codes == wanted, f"exit codes {self.codes}, not {wanted}"
        self.check_whole(steps, survivors)
        for group in survivors:
            assert len(self.traces[group].all("done")) == 1, f"{group} did not reach the end of its script"
        finished = {e.group for e in pick(self.events, schema.Finished) if e.fingerprint} - set(left)
        assert finished == survivors, f"finished: {sorted(finished)}"

    def check_whole(self, steps: int, survivors: set[str]) -> None:
        """Every sample once, one entry per step, same bits, nothing computed twice, no descriptor lost."""
        self._check_rules(steps)
        self.check_traces(steps, survivors)
        for group in sorted(survivors):
            before, still = self.traces[group].all("descriptors")[0]
            assert still <= before, f"{group}: {still} descriptors are open at the end, {before} after the first steps"

    def _check_rules(self, steps: int) -> None:
        assert not self.torn
        rules = {
            "samples": samples_exactly_once(self.events, steps),
            "lineage": one_lineage(self.events),
            "lost": steps_lost(self.events),
            "recomputed": recomputed_by_survivors(self.events),
            "fingerprints": fingerprints_equal(self.events),
        }
        broken = {name: rule.why for name, rule in rules.items() if not rule.holds}
        assert not broken, broken
        assert lineage(self.events).last_step == steps - 1

    def check_traces(self, steps: int, survivors: set[str]) -> None:
        """Holds the event log against what the survivors' processes really did."""
        for group in sorted(survivors):
            trace, commits = self.traces[group], self.commits(group)
            assert sorted(commits) == sorted(trace.digests) == list(range(steps)), group
            ran = Counter(trace.forward)
            assert all(times == 1 for times in ran.values()), (
                f"{group} computed twice: {[x for x in ran if ran[x] > 1]}"
            )
            for step, commit in commits.items():
                mine = sorted(k for s, k in ran if s == step)
                assert mine == sorted(commit.microbatches), (
                    f"{group} step {step}: ran {mine}, committed {commit.microbatches}"
                )
                assert commit.computed == len(mine)
                assert commit.counted == commit.total
        for step in range(steps):
            assert len({self.traces[group].digests[step] for group in survivors}) == 1, f"step {step}: state differs"
            assert len({self.traces[group].losses[step] for group in survivors}) == 1, f"step {step}: loss differs"

    def check_healed(self, steps: int, codes: dict[str, int], lost: set[str], members: tuple[str, ...]) -> None:
        """What must hold in every run in which groups came back.

        Args:
            steps: number of steps of the run.
            codes: exit code of every trainer.
            lost: groups that were reported lost at any time.
            members: groups of the last epoch, in any order.
        """
        assert self.codes == codes, f"exit codes {self.codes}, not {codes}"
        self._check_rules(steps)
        assert set(self.lost) == lost, f"lost: {self.lost}"
        assert {e.group for e in self.all(schema.Fenced)} <= lost and set(self.members[-1]) == set(members), (
            self.members
        )
        ended = {name for name, code in codes.items() if code == 0}
        assert {name.split("-")[0] for name in ended} >= set(members)
        for name in sorted(ended):
            self._check_one(name, steps)
        for step in range(steps):
            for kind in ("scalars", "tally"):
                told = {str(v) for n in ended for s, *v in self.traces[n].all(kind) if s == step}
                assert len(told) <= 1, f"step {step}: {kind} differ: {told}"
            digests = {n: d for n in self.traces if (d := self.traces[n].digests.get(step)) is not None}
            assert digests and len(set(digests.values())) == 1, f"step {step}: state differs: {digests}"
            losses = {self.traces[n].losses[step] for n in digests}
            assert len(losses) == 1, f"step {step}: loss differs: {losses}"

    def _check_one(self, name: str, steps: int) -> None:
        """One trainer that reached the end: contiguous steps, and the log says what its process did."""
        trace = self.traces[name]
        assert len(trace.all("done")) == 1, f"{name} did not reach the end of its script"
        assert not trace.all("read-at-a-bad-time"), trace.all("read-at-a-bad-time")
        done = sorted(trace.digests)
        assert done == list(range(done[0], steps)), f"{name}: {done}"
        commits = {e.step: e for e in self.all(schema.Committed, pid=self.pids[name])}
        assert sorted(commits) == done, name
        ran = Counter(trace.forward)
        assert not ran or max(ran.values()) == 1, f"{name} computed a microbatch twice"
        for step, commit in commits.items():
            mine = sorted(k for s, k in ran if s == step)
            assert mine == sorted(commit.microbatches), f"{name} step {step}: ran {mine}, {commit.microbatches}"
            assert commit.counted == commit.total and (commit.live or not mine)

    def one_lineage_end(self) -> int:
        """The last step of the run."""
        return lineage(self.events).last_step

    def near_from(self, gold: Gold, name: str, tolerance: float = 1e-4) -> None:
        """As `near`, for a trainer that came in later; its learning rates are the plain run's to the last bit."""
        trace = self.traces[name]
        for step, loss in trace.losses.items():
            assert abs(loss - gold.losses[step]) <= tolerance * max(1.0, abs(loss)), (step, loss, gold.losses[step])
        mine = trace.all("done")[0][1]
        assert all(abs(a - b) <= 10 * tolerance for a, b in zip(mine, gold.weights, strict=True))
        plain = dict(map(tuple, gold.scalars))
        assert trace.all("scalars") and all(plain[step] == text for step, text in trace.all("scalars"))

    def near(self, gold: Gold, group: str, tolerance: float = 1e-4) -> None:
        """Losses and final weights equal the plain run's within float tolerance.

        The gradient is a sum over microbatches in an order that depends on who computed which; float addition does not
        associate, so the last bits differ, and AdamW's early steps (a gradient divided by its own size) carry that on.
        """
        trace = self.traces[group]
        assert trace.losses.keys() == gold.losses.keys()
        for step, loss in gold.losses.items():
            assert abs(trace.losses[step] - loss) <= tolerance * max(1.0, abs(loss)), (
                f"step {step}: {trace.losses[step]} {loss}"
            )
        mine = trace.all("done")[0][1]
        assert all(abs(a - b) <= 10 * tolerance for a, b in zip(mine, gold.weights, strict=True))
