"""Jobs of torchtitan trainers that are forked from one process, and torchtitan alone beside them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from facts import Facts, Traced, read_trace
from harness import Job, port_below_ephemeral
from titan_forks import Forked, ForkServer

from lightkeeper.events import schema
from lightkeeper.events.summary import fingerprints_equal, one_lineage, samples_exactly_once, steps_lost

RUN_S, BUILD_S = 400.0, 200.0


class TitanJob(Job):
    """One job.

    Args:
        folder: the run's folder, to be made.
        server: forks its trainers.
    """

    def __init__(self, folder: Path, server: ForkServer) -> None:
        super().__init__(folder)
        self._server = server
        self.settings.update(outage_budget_s=60, bucket_mb=1)

    def _fork(self, name: str, options: dict[str, Any], environment: dict[str, str]) -> Forked:
        child = self._server.fork(name, options, environment, self.output(name))
        self.trainers[name] = child  # type: ignore[assignment]  # it has what is asked of a process
        assert child.pid is not None
        self.started.add(child.pid)
        return child

    def start_groups(self, count: int, ranks: int, fault: str = "", **options: Any) -> dict[str, Any]:
        """A lighthouse and groups alike; returns what `start_ranks` needs for one that comes back."""
        self.settings["groups"] = count
        self.start_lighthouse()
        given = {"variant": "base", "folder": str(self.folder), **options}
        for i in range(count):
            self.start_ranks(f"g{i}", ranks, fault, **given)
        return given

    def returns(self, group: str, ranks: int, given: dict[str, Any], fault: str = "") -> None:
        """The lost group is started again, and the loops hurry once it is a member."""
        self.until(lambda: self.launchers[group].poll() is not None, f"the end of {group}", RUN_S)
        self.start_ranks(group, ranks, fault, **given)
        for rank in range(ranks):
            self.wait_for(schema.Rejoined, BUILD_S, group=group, rank=rank)
        self.hurry()

    def plain(self, ranks: int, **options: Any) -> list[Traced]:
        """torchtitan alone, on so many ranks; what each of them tells."""
        meet = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_below_ephemeral())}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTKEEPER_")}
        children, run = [], f"plain-{ranks}"
        for rank in range(ranks):
            own = {**clean, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank), "RUN_OF_TEST": str(self.folder)}
            given = {"variant": "base", "folder": str(self.folder), "plain": True, **options}
            name = f"{run}.{rank}"
            given["trace"] = str(self.folder / name)
            children.append(self._server.fork(name, given, own, self.output(name)))
            self.started.add(children[-1].pid or 0)
        self.until(lambda: all(child.exitcode is not None for child in children), "torchtitan alone", RUN_S)
        assert [child.exitcode for child in children] == [0] * ranks, self.said(f"{run}.0")
        return [read_trace(self.folder / f"{run}.{rank}") for rank in range(ranks)]


def check_titan(facts: Facts, steps: int, ranks: int, members: set[str]) -> None:
    """Samples, bits and accounts of a finished run of torchtitan groups.

    Args:
        facts: the run.
        steps: number of its steps.
        ranks: of each group.
        members: starts of groups (``g0``, ``g1-again``) that reached the end.
    """
    for rule in (samples_exactly_once(facts.events, steps), one_lineage(facts.events), steps_lost(facts.events)):
        assert rule.holds, rule.why
    assert fingerprints_equal(facts.events).holds
    ended = {name for name, code in facts.codes.items() if code == 0}
    assert ended == members | {f"{name}.{rank}" for name in members for rank in range(ranks)}, facts.codes
    for step in range(steps):
        for rank in range(ranks):
            those = {n: t for n, t in facts.traces.items() if n.endswith(f".{rank}") and step in t.digests}
            digests = {name: trace.digests[step] for name, trace in those.items()}
            assert digests and len(set(digests.values())) == 1, f"step {step} rank {rank}: {digests}"
        there = {n: t for n, t in facts.traces.items() if step in t.digests}
        for kind in ("biases", "rates", "seen"):
            told = {n: str([v for s, *v in t.all(kind) if s == step]) for n, t in there.items()}
            assert len(set(told.values())) == 1, f"step {step}: {kind} differ: {told}"
        losses = {t.losses[step] for t in facts.traces.values() if step in t.losses}
        assert len(losses) == 1, f"step {step}: loss differs: {losses}"
    for name in members:
        traces = [facts.traces[f"{name}.{rank}"] for rank in range(ranks)]
        done = sorted(traces[0].digests)
        assert done == list(range(done[0], steps)), f"{name}: {done}"
        for rank, trace in enumerate(traces):
            assert trace.all("placed") == [[rank, list(range(ranks))]]
            assert "Logging error" not in facts.said[f"{name}.{rank}"]
            assert len(trace.all("done")) == 1 and sorted(trace.digests) == done
            assert trace.forward == traces[0].forward and len(set(trace.forward)) == len(trace.forward)
