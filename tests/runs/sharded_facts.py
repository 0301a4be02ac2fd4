"""What must hold in every run of groups with several ranks: rank r of all groups is one and the same."""

from __future__ import annotations

from collections import Counter

from facts import Facts, Gold

from lightkeeper.events import schema


def check(facts: Facts, steps: int, ranks: int, members: set[str]) -> None:
    """Bits, samples and accounts.

    Args:
        facts: a finished run.
        steps: number of its steps.
        ranks: of each group.
        members: starts of groups (``g0``, ``g1-again``) that reached the end.
    """
    facts._check_rules(steps)
    ended = {name for name, code in facts.codes.items() if code == 0}
    assert ended == members | {f"{name}.{rank}" for name in members for rank in range(ranks)}, facts.codes
    finished = Counter((e.group, e.process) for e in facts.all(schema.Finished) if e.fingerprint)
    assert len(finished) == len(members) * ranks and set(finished.values()) == {1}
    for step in range(steps):
        for rank in range(ranks):
            digests = {n: t.digests[step] for n, t in of_rank(facts, rank).items() if step in t.digests}
            assert digests and len(set(digests.values())) == 1, f"step {step} rank {rank}: {digests}"
        told = {n: str([v for s, *v in t.all("norm") if s == step]) for n, t in facts.traces.items() if t.digests}
        told = {n: text for n, text in told.items() if text != "[]"}
        assert len(set(told.values())) == 1, f"step {step}: norm or samples differ: {told}"
        losses = {t.losses[step] for t in facts.traces.values() if step in t.losses}
        assert len(losses) == 1, f"step {step}: loss differs: {losses}"
    for name in members:
        _check_ranks(facts, name, ranks, steps)


def _check_ranks(facts: Facts, name: str, ranks: int, steps: int) -> None:
    """The ranks of a start of a group went through the same steps, and computed what they say, each once."""
    traces = [facts.traces[f"{name}.{rank}"] for rank in range(ranks)]
    done = sorted(traces[0].digests)
    assert done == list(range(done[0], steps)), f"{name}: {done}"
    for rank, trace in enumerate(traces):
        assert len(trace.all("done")) == 1, f"{name}.{rank} did not reach the end of its script"
        assert sorted(trace.digests) == done and trace.forward == traces[0].forward, f"{name}.{rank}"
        commits = facts.all(schema.Committed, pid=facts.pids[f"{name}.{rank}"])
        assert [commit.step for commit in commits] == done
        for commit in commits:
            assert sorted(k for s, k in trace.forward if s == commit.step) == sorted(commit.microbatches)
            assert commit.rank == rank and commit.counted == commit.total
    assert not traces[0].forward or max(Counter(traces[0].forward).values()) == 1


def of_rank(facts: Facts, rank: int) -> dict:
    """The traces of a rank index, by group."""
    return {name: trace for name, trace in facts.traces.items() if name.endswith(f".{rank}")}


def near(facts: Facts, gold: Gold, name: str, samples: int, tolerance: float = 1e-4) -> None:
    """Losses, norms and final weights are those of one process that does everything, but for the order of sums."""
    trace = facts.traces[name]
    for step, loss in trace.losses.items():
        assert abs(loss - gold.losses[step]) <= tolerance * max(1.0, abs(loss)), (step, loss, gold.losses[step])
    plain = {step: norm for step, norm, _ in gold.norms}
    for step, norm, seen in trace.all("norm"):
        assert abs(norm - plain[step]) <= 10 * tolerance * norm, (step, norm, plain[step])
        assert seen == samples, (step, seen)
    mine = trace.all("done")[0][1]
    assert len(mine) == len(gold.weights)
    assert all(abs(a - b) <= 10 * tolerance for a, b in zip(mine, gold.weights, strict=True))


def replayed(facts: Facts, name: str, ranks: int) -> list[int]:
    """Steps that the start of a group applied without a share, by its ranks' own account."""
    steps = {str([s for s, live, _ in facts.traces[f"{name}.{r}"].all("begins") if not live]) for r in range(ranks)}
    assert len(steps) == 1, steps
    return [s for s, live, _ in facts.traces[f"{name}.0"].all("begins") if not live]
