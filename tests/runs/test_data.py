"""Loaders in real jobs: over the committed steps every sample is consumed exactly once, whoever died or came in."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import dataloops
import loops
import pytest
from facts import Facts
from harness import OUTAGE_BUDGET_S, Job, names
from healed import PATIENT

from lightkeeper.data import ShareLoader
from lightkeeper.events import schema
from lightkeeper.events.reader import seconds_between


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse(*PATIENT)


def consumed(facts: Facts, steps: int, rank: int = 0) -> dict[tuple[int, int], list[Any]]:
    """What went into each microbatch of the committed steps: (step, k) to what its one consumer's rank traced."""
    found: dict[tuple[int, int], list[Any]] = {}
    for name, pid in facts.pids.items():
        if int(name.partition(".")[2] or 0) != rank:
            continue
        read = {(step, k): told for step, k, *told in facts.traces[name].all("ids")}
        for commit in facts.all(schema.Committed, pid=pid):
            for k in commit.microbatches:
                assert (commit.step, k) not in found, f"microbatch {k} of step {commit.step} went in twice"
                found[commit.step, k] = read[commit.step, k]
    assert {step for step, _ in found} == set(range(steps))
    return found


def check_samples(facts: Facts, steps: int, **options: Any) -> list[int]:
    """Every microbatch held its own samples, augmented alike whoever read them; all samples in order."""
    o = {**loops.DEFAULTS, **dataloops.DEFAULTS, **options}
    sampler = dataloops.sampler_of(o)
    found, row = consumed(facts, steps), []
    with ShareLoader(dataloops.Numbers(), sampler, workers=0, seed=o["seed"]) as plain:
        for step in range(steps):
            for k in range(sampler.schedule.of(step)):
                ids, x = plain.batch(step, k)
                assert found.pop((step, k)) == [ids.tolist(), x.double().sum().item()], (step, k)
                row += ids.tolist()
    assert not found
    return row


def check_passes(row: list[int], n: int) -> None:
    """Each whole pass over the data holds each sample once, the last one none twice."""
    assert len(row) >= n
    for at in range(0, len(row) - n + 1, n):
        assert sorted(row[at : at + n]) == list(range(n))
    rest = Counter(row[len(row) // n * n :])
    assert not rest or max(rest.values()) == 1


def sockets_of(pid: int) -> set[str]:
    links = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.add(os.readlink(path))
    return {link for link in links if link.startswith("socket:")}


def test_53_four_groups_become_three_and_later_passes_are_whole(job: Job) -> None:
    """Lengths that neither 3 nor 4 divides; three passes and a bit. And: a worker has none of its trainer's sockets."""
    o: dict[str, Any] = {"samples": 50, "size": 3, "microbatches": 7, **job.lingering(0.5)}
    job.start_all(4, steps=8, loop="share", fault="kill:g3:reduce:3", **o)
    pid = job.wait_for(schema.Committed, group="g0", step=1).pid
    ((workers,),) = job.trace("g0").all("workers")
    of_worker = sockets_of(workers[0])  # torch hands tensors' memory over by a socket of the worker's own
    assert len(workers) == 1 and len(of_worker) <= 1 and sockets_of(pid) and not of_worker & sockets_of(pid)
    job.hurry()
    facts = job.finish()
    facts.check(8, set(names(3)), {"g3": -9})
    facts.fault("kill", "reduce", "g3", 3)
    assert facts.lost.keys() == {"g3"}
    check_passes(check_samples(facts, 8, **o), 50)


def test_47_a_group_that_dies_and_comes_back_consumes_to_the_end_of_the_data(job: Job) -> None:
    """20 batches, g1 is killed after backward at step 3 and started again; nobody waits for anybody at the end."""
    o: dict[str, Any] = {"samples": 20 * 6 * 3, "loop": "share", **job.lingering(0.5)}
    job.heal_options = {"steps": 20, **o}
    job.start_all(3, only={"g1": {"behave": "kill-after-backward:3"}}, **job.heal_options)
    job.return_of("g1", behave="")
    job.await_rejoin("g1")
    facts = job.finish()
    facts.check_healed(20, {"g0": 0, "g1": -9, "g2": 0, "g1-again": 0}, {"g1"}, tuple(names(3)))
    facts.fault("kill", "compute", "g1", 3)
    assert [k for s, k in facts.traces["g1"].forward if s == 3], "it had computed"
    assert facts.one(schema.Rejoined, pid=facts.pids["g1-again"]).step < 20
    row = check_samples(facts, 20, **o)
    assert sorted(row) == list(range(20 * 6 * 3)), "one pass, each sample once"
    ends = [e for e in facts.all(schema.Finished) if e.fingerprint]
    assert len(ends) == 3
    assert abs(seconds_between(ends[0], ends[-1])) < OUTAGE_BUDGET_S / 2, "no time-out was waited for"


def test_what_a_dead_group_had_to_compute_is_there_when_it_is_dealt_anew(job: Job) -> None:
    """g1 dies when step 4 begins; g0 has 3 of 6 microbatches to compute still, and reads the others meanwhile."""
    o: dict[str, Any] = {"loop": "share", "samples": 90, "prefetch": 8, "delay": 0.5}
    job.start_all(2, steps=7, fault="kill:g1:compute:4", trace_ready=True, **o)
    facts = job.finish()
    facts.check(7, {"g0"}, {"g1": -9})
    facts.fault("kill", "compute", "g1", 4)
    ready = {(step, k): there for step, k, there in facts.traces["g0"].all("ready")}
    assert [ready[4, k] for k in range(6)] == [True] * 6, ready
    assert facts.one(schema.Recovered, group="g0", step=4).further == (3, 4, 5)
    assert all(ready[step, k] for step in (5, 6) for k in (0, 1, 2, 3)), "the larger share of the next steps, too"
    check_samples(facts, 7, **o)


@pytest.mark.long
def test_49_the_share_of_an_absent_group_is_read_by_the_others(job: Job) -> None:
    """Four groups; g3 is away from step 10 on and comes back: a whole pass, nothing twice."""
    o: dict[str, Any] = {"samples": 40 * 8 * 2, "size": 2, "microbatches": 8, "delay": 0.3, "load_s": 0.01}
    o |= {"hurry": str(job.folder / "hurry"), "loop": "share", "workers": 2}
    job.heal_options = {"steps": 40, **o}
    job.start_all(4, fault="kill:g3:compute:10", **job.heal_options)
    job.return_of("g3")
    job.await_rejoin("g3")
    facts = job.finish()
    codes = {"g0": 0, "g1": 0, "g2": 0, "g3": -9, "g3-again": 0}
    facts.check_healed(40, codes, {"g3"}, tuple(names(4)))
    assert facts.one(schema.Rejoined).step > 11
    assert sorted(check_samples(facts, 40, **o)) == list(range(40 * 8 * 2))


def test_52_groups_come_in_and_leave_without_a_gap_or_a_repeat(job: Job) -> None:
    """One group, then two, then three, then one again: the data goes on where it was."""
    o: dict[str, Any] = {"samples": 97, "size": 2, "microbatches": 5, "loop": "share", **job.lingering(0.1)}
    steps = 200  # so many that all can come and go before the last one
    job.settings.update(groups=3, minimum=1, start_window_s=0.5, deal="even")
    job.start("g0", steps=steps, **o)
    job.wait_for(schema.Committed, group="g0", step=1)
    for group in ("g1", "g2"):
        job.start(group, steps=steps, leave=str(job.folder / f"leave-{group}"), **o)
        job.wait_for(schema.Rejoined, group=group)
    job.wait_for(schema.Committed, group="g2", step=job.wait_for(schema.Rejoined, group="g2").step + 2)
    for group in ("g2", "g1"):
        (job.folder / f"leave-{group}").touch()
        job.wait(group)
    job.hurry()
    facts = job.finish()
    assert facts.codes == dict.fromkeys(names(3), 0) and not facts.lost
    assert [len(members) for members in facts.members] == [1, 2, 3, 2, 1], facts.members
    check_passes(check_samples(facts, steps, **o), 97)


# ---------------------------------------------------------------- streams


def check_items(facts: Facts, steps: int, microbatches: int | list[int]) -> None:
    """Each slot's stream was read item by item, by whoever it was, and every end knows where it stands."""
    total_of = loops.per_step(microbatches)
    positions: Counter[int] = Counter()
    found = consumed(facts, steps)
    for step in range(steps):
        for k in range(total_of if isinstance(total_of, int) else total_of(step)):
            assert found.pop((step, k)) == [positions[k]], (step, k)
            positions[k] += 1
    assert not found
    whole = [name for name in facts.codes if steps - 1 in facts.traces[name].digests]
    ends = [end for name in whole for end in facts.traces[name].all("positions")]
    assert ends and all(end == [[positions[k] for k in sorted(positions)]] for end in ends)


def test_streams_go_on_over_a_death_a_failed_reduce_and_a_return(job: Job) -> None:
    """g2 dies with its share read but not reduced, g1's reduce fails now and then; g2 comes back to other slots."""
    o: dict[str, Any] = {"loop": "stream", "steps": 60, **job.lingering(0.3)}
    job.heal_options = o
    only = {"g2": {"behave": "kill-after-backward:5"}, "g1": {"behave": "transient-every:7"}}
    job.start_all(3, only=only, **o)
    job.return_of("g2")
    job.await_rejoin("g2")
    facts = job.finish()
    codes = {"g0": 0, "g1": 0, "g2": -9, "g2-again": 0}
    assert facts.codes == codes and set(facts.lost) == {"g2"}
    facts.fault("kill", "compute", "g2", 5)
    assert facts.traces["g1"].all("transient") and facts.all(schema.ReduceFailed, group="g1")
    assert [k for s, k in facts.traces["g2"].forward if s == 5] == [4, 5], "read, and thrown away with the group"
    check_items(facts, 60, 6)
    assert "took over the stream" in facts.said["g0"]
    assert re.search(r"[1-9]\d* items read again and thrown away, 0 states loaded", facts.said["g2-again"])


@pytest.mark.long
def test_streams_with_states_over_joins_leaves_and_a_ramp(job: Job) -> None:
    steps = 200  # so many that all can come and go before the last one
    o: dict[str, Any] = {"loop": "stream", "microbatches": [3, 6, 1, 5], "state_bytes": 64, "steps": steps}
    o |= job.lingering(0.1)
    job.settings.update(groups=3, minimum=1, start_window_s=0.5, deal="even")
    job.start("g0", **o)
    job.wait_for(schema.Committed, group="g0", step=1)
    for group in ("g1", "g2"):
        job.start(group, leave=str(job.folder / f"leave-{group}"), **o)
        job.wait_for(schema.Rejoined, group=group)
    job.wait_for(schema.Committed, group="g2", step=job.wait_for(schema.Rejoined, group="g2").step + 4)
    (job.folder / "leave-g1").touch()
    job.wait("g1")
    os.kill(job.trainers["g2"].pid or 0, signal.SIGKILL)
    job.wait("g2")
    job.hurry()
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g1": 0, "g2": -9} and set(facts.lost) == {"g2"}
    assert [len(members) for members in facts.members][:3] == [1, 2, 3]
    check_items(facts, steps, [3, 6, 1, 5])
    assert re.search(r"[1-9]\d* states? loaded", facts.said["g1"]) and "would spare" not in facts.said["g1"]


ENDS = 12


def test_data_that_ends_cancels_the_same_step_in_all_groups(job: Job) -> None:
    """One of six streams has no item for step 12, which g1 and g2 know when g0 fails in the reduce that says so."""
    only = {"g0": {"fail_after_before": [1]}}
    job.start_all(3, only=only, loop="stream", microbatches=6, steps=40, ends=ENDS)
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g1": 0, "g2": 0} and not facts.lost
    assert [trace.all("cancels") for trace in facts.traces.values()] == [[[ENDS, 1]]] * 3
    assert facts.traces["g0"].all("failed-after-before") == [[ENDS]]
    check_items(facts, ENDS, 6)
    assert {e.step for e in facts.all(schema.Finished)} == {ENDS}


@pytest.mark.long
@pytest.mark.parametrize("phase", ["before", "closing"])
def test_a_group_that_dies_where_the_data_ends_is_blamed_and_the_run_ends_well(job: Job, phase: str) -> None:
    job.start_all(3, f"kill:g2:{phase}:{ENDS}", loop="stream", microbatches=6, steps=40, ends=ENDS)
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g1": 0, "g2": -9} and facts.lost.keys() == {"g2"}
    facts.fault("kill", phase, "g2", ENDS)
    cancels = {name: trace.all("cancels") for name, trace in facts.traces.items()}
    assert cancels["g0"] == cancels["g1"] == [[ENDS, 1]] and cancels["g2"] == ([] if phase == "before" else [[ENDS, 1]])
    check_items(facts, ENDS, 6)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("loop", ["share", "stream"])
def test_kills_at_random_moments_lose_no_sample(job: Job, loop: str) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    o: dict[str, Any] = {"loop": loop, "samples": 211, "size": 2, "microbatches": [7, 4, 9], "delay": 0.04}
    o |= {"hurry": str(job.folder / "hurry")}
    job.heal_options = {"steps": 400, **o}
    job.start_all(3, **job.heal_options)
    newest = {group: job.trainers[group] for group in names(3)}
    step = 0
    for victim in chance.sample(["g1", "g2", "g1", "g2"], 3):  # who dies oftener is held back for longer
        job.wait_for(schema.Committed, group="g0", step=step + chance.randrange(2, 6))
        time.sleep(chance.random() * 0.1)  # any moment of a step will do
        os.kill(newest[victim].pid or 0, signal.SIGKILL)
        newest[victim] = job.return_of(victim)
        step = job.wait_for(schema.Rejoined, group=victim, pid=newest[victim].pid).step
    job.hurry()
    facts = job.finish()
    assert all(facts.codes[process.name] == 0 for process in newest.values()) and len(facts.all(schema.Rejoined)) == 3
    if loop == "stream":
        check_items(facts, 400, [7, 4, 9])
    else:
        check_passes(check_samples(facts, 400, **o), 211)


# ---------------------------------------------------------------- groups of several ranks


@pytest.mark.long
def test_the_ranks_of_a_group_split_every_microbatch_over_a_death_and_a_return(job: Job) -> None:
    o: dict[str, Any] = {"loop": "split", "samples": 77, "size": 4, "microbatches": 6, "steps": 40, "delay": 0.3}
    o |= {"layout": "fsdp", "hurry": str(job.folder / "hurry")}
    job.settings["groups"] = 2
    for group in ("g0", "g1"):
        job.start_ranks(group, 2, "kill:g1/1:reduce:5", **o)
    job.until(lambda: job.launchers["g1"].poll() is not None, "the end of g1")
    job.start_ranks("g1", 2, **o)
    for rank in range(2):
        job.wait_for(schema.Rejoined, group="g1", rank=rank)
    job.hurry()
    facts = job.finish()
    assert facts.one(schema.FaultInjected).step == 5 and facts.lost.keys() == {"g1"}
    assert {facts.codes[name] for name in ("g0.0", "g0.1", "g1-again.0", "g1-again.1")} == {0}
    sampler = dataloops.sampler_of({**loops.DEFAULTS, **o})
    halves = [consumed(facts, 40, rank) for rank in range(2)]
    for step in range(40):
        for k in range(6):
            (place, ids, n), (other_place, other_ids, other_n) = (half[step, k] for half in halves)
            assert (place, other_place) == (0, 1) and n == other_n == step
            assert ids + other_ids == sampler(step, k).tolist()
    assert [len(half) for half in halves] == [240, 240]
