"""Groups of several ranks, sharded and split in the ways a group may be: killed, healed, replayed, bit-equal."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Job
from healed import PATIENT
from sharded_facts import check, near, replayed

from lightkeeper.events import schema

STEPS, AT = 60, 5
SAMPLES = 6 * 4  # of a step, whoever computes them
PARTS = {"fsdp": 2, "tp": 1, "hsdp": 4, "fsdp-tp": 2, "ddp": 2}
RANKS = {"fsdp": 2, "tp": 2, "hsdp": 4, "fsdp-tp": 4, "ddp": 2}


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse(*PATIENT)


def start(job: Job, count: int, layout: str, fault: str = "", **options: Any) -> dict[str, Any]:
    """Groups alike; slow steps until the test hurries them."""
    job.settings["groups"] = count
    given = {"layout": layout, "hurry": str(job.folder / "hurry"), "delay": 0.12, **options}
    for i in range(count):
        job.start_ranks(f"g{i}", RANKS[layout], fault, **given)
    return given


def killed_and_healed(job: Job, gold, layout: str, victim: int, **options: Any) -> None:
    """Rank `victim` of one of two groups dies inside a reduce; its group comes back."""
    ranks = RANKS[layout]
    fault = f"kill:g1/{victim}:reduce:{AT}"
    given = start(job, 2, layout, fault, **{"steps": STEPS, **options})
    job.until(lambda: job.launchers["g1"].poll() is not None, "the end of g1")
    job.start_ranks("g1", ranks, **given)
    for rank in range(ranks):
        job.wait_for(schema.Rejoined, group="g1", rank=rank)
    job.hurry()
    facts = job.finish()
    check(facts, given["steps"], ranks, {"g0", "g1-again"})
    assert facts.codes["g1"] == 137 and facts.codes[f"g1.{victim}"] == -9
    assert {facts.codes[f"g1.{rank}"] for rank in range(ranks)} <= {-9, 1}  # killed, or ended by what broke
    hit = facts.one(schema.FaultInjected)
    assert (hit.group, hit.phase, hit.step, hit.process) == ("g1", "reduce", AT, f"rank g1/{victim}")
    assert facts.lost.keys() == {"g1"} and f"rank {victim} was killed by SIGKILL" in facts.lost["g1"].cause
    assert not facts.all(schema.UserError) and not facts.all(schema.Diverged)
    assert {e.rank for e in facts.all(schema.Healed)} == set(range(ranks))
    followed = replayed(facts, "g1-again", ranks)
    first = facts.all(schema.Rejoined)[0].step
    joined = [c for c in facts.all(schema.Committed, group="g1", rank=0) if c.step >= first]
    assert followed and joined[0].live and not joined[0].microbatches  # its first step as a member has no share
    plain = gold(loop="sharded-gold", parts=PARTS[layout], **{k: v for k, v in given.items() if k in ("steps", "clip")})
    for name in ("g0.0", "g1-again.1"):
        near(facts, plain, name, SAMPLES)


@pytest.mark.parametrize(("layout", "victim"), [("fsdp", 1), ("tp", 0), pytest.param("ddp", 1, marks=pytest.mark.long)])
def test_two_groups_of_two(job: Job, gold, layout: str, victim: int) -> None:
    killed_and_healed(job, gold, layout, victim)


def test_ranks_recover_together_though_one_of_them_cannot_take_the_epoch_up(job: Job, gold) -> None:
    """Rank 0 could go on and would compute what it inherits, while rank 1 waits for the next epoch."""
    job.settings["groups"] = 2
    job.start_ranks("g0", steps=12, behave=f"fail-take:{AT}", rank=1)
    job.start_ranks("g1", fault=f"kill:g1/1:compute:{AT}", steps=12)
    facts = job.finish()
    check(facts, 12, 2, {"g0"})
    assert facts.codes["g1"] == 137 and facts.lost.keys() == {"g1"}
    assert len(facts.traces["g0.1"].all("failed-take")) == 1 and not facts.traces["g0.0"].all("failed-take")
    failed = [e for e in facts.all(schema.ReduceFailed, group="g0") if "made to fail" in e.error]
    assert len(failed) == 1 and len(facts.epochs) >= 3
    near(facts, gold(loop="sharded-gold", steps=12, parts=2), "g0.1", SAMPLES)


def test_a_group_spread_in_another_way_is_refused_by_name(job: Job) -> None:
    job.settings["groups"] = 2
    job.start_ranks("g0", steps=4)
    job.wait_for(schema.Joined, group="g0")
    job.start_ranks("g1", steps=4, layout="tp")
    job.until(lambda: job.launchers["g1"].poll() is not None, "the end of g1")
    assert job.launchers["g1"].poll() == 103
    said = job.said("g1")
    assert "place is 0 of 1 in g1 and 0 of 2 in g0" in said
    mine, theirs = (
        "placed Replicate() on a mesh of 2 (tp), here [8]",
        "placed Shard(dim=0) on a mesh of 2 (dp), here [4]",
    )
    assert f"blocks.0.norm.bias is float32[8] {mine} in g1 and float32[8] {theirs} in g0" in said


def one_rank_dies(job: Job, kind: str, phase: str, **options: Any):
    """One rank of g1 is struck; its other rank does not outlive it, and g0 goes on. Returns the facts."""
    steps = 10
    job.settings["groups"] = 2
    for group in ("g0", "g1"):
        job.start_ranks(group, fault=f"{kind}:g1/1:{phase}:{AT}", steps=steps, **options)
    facts = job.finish()
    check(facts, steps, 2, {"g0"})
    hit = facts.one(schema.FaultInjected)
    assert (hit.fault, hit.group, hit.phase, hit.step) == (kind, "g1", phase, AT)
    assert facts.lost.keys() == {"g1"} and facts.members[-1] == ("g0",)
    assert {len(facts.all(schema.Committed, group="g1", rank=rank)) for rank in (0, 1)} == {AT}
    first = facts.epochs[-1].first_step
    assert first == AT or phase == "vote"
    (further,) = {e.further for e in facts.all(schema.Recovered, step=first, group="g0")}
    assert {3, 4, 5} <= set(further), "both ranks of g0 compute what g1 had"
    return facts


@pytest.mark.parametrize("phase", ["compute", pytest.param("vote", marks=pytest.mark.long)])
def test_a_rank_that_dies_takes_its_group_along_at_once(job: Job, gold, phase: str) -> None:
    """S15. In compute its end breaks the collectives in which the other rank stands: that one is a victim.

    With gradients summed after the last microbatch alone, a share that grows adds to what was summed.
    """
    facts = one_rank_dies(job, "kill", phase, sync="last")
    lost = facts.lost["g1"]
    assert "rank 1 was killed by SIGKILL" in lost.cause and (lost.phase, lost.step) == (phase, AT)
    assert lost.detected_by == "manager", "no lease had to pass"
    assert facts.codes["g1"] == 137 and facts.codes["g1.1"] == -9 and facts.codes["g1.0"] in (-9, 1)
    assert "rank 1 was killed by SIGKILL" in facts.said["g1"]
    assert not facts.all(schema.UserError) and not facts.all(schema.JobStopped, ok=False)
    near(facts, gold(loop="sharded-gold", steps=10, parts=2), "g0.0", SAMPLES)


@pytest.mark.long
def test_a_rank_that_raises_is_the_cause_and_its_group_ends(job: Job) -> None:
    facts = one_rank_dies(job, "raise", "compute")
    (error,) = facts.all(schema.UserError)
    assert (error.group, error.rank, error.type) == ("g1", 1, "InjectedError")
    assert "rank 1 raised InjectedError" in facts.lost["g1"].cause and facts.codes["g1"] == 1


@pytest.mark.long
def test_a_rank_that_freezes_is_fenced_with_its_group(job: Job) -> None:
    facts = one_rank_dies(job, "freeze", "reduce")
    assert facts.codes["g1"] == 104 and {facts.codes["g1.0"], facts.codes["g1.1"]} == {-9}
    assert "stopped" in facts.lost["g1"].cause, facts.lost["g1"].cause


@pytest.mark.long
def test_averages_of_data_parallel_ranks_are_made_after_the_last_microbatch_alone(job: Job, gold) -> None:
    facts = one_rank_dies(job, "kill", "reduce", sync="last", layout="ddp")
    near(facts, gold(loop="sharded-gold", steps=10, parts=2), "g0.0", SAMPLES)


@pytest.mark.long
def test_a_joiners_ranks_take_a_fresh_copy_together_though_one_of_them_has_the_next_entry(job: Job, gold) -> None:
    given = start(job, 2, "fsdp", f"kill:g1/0:reduce:{AT}", steps=40)
    job.until(lambda: job.launchers["g1"].poll() is not None, "the end of g1")
    job.start_ranks("g1", **given, behave=f"lose-entry:{AT}", rank=1)  # the first that it needs
    for rank in (0, 1):
        job.wait_for(schema.Rejoined, group="g1", rank=rank)
    job.hurry()
    facts = job.finish()
    check(facts, 40, 2, {"g0", "g1-again"})
    assert len(facts.traces["g1-again.1"].all("lost")) == 1
    healed = {rank: [e.step for e in facts.all(schema.Healed, rank=rank)] for rank in (0, 1)}
    assert healed[0] == healed[1] and len(healed[0]) == 2, "both take the second copy, from one boundary"
    assert not facts.all(schema.JobStopped, ok=False) and len(facts.lost) == 1
    near(facts, gold(loop="sharded-gold", steps=40, parts=2), "g1-again.0", SAMPLES)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_a_spare_applies_what_it_never_computed_and_takes_over(job: Job, gold, layout: str) -> None:
    """Its optimizer is given gradients of a kind that no backward pass here has shown yet."""
    job.settings.update(groups=3, spares=1)
    for group in ("g0", "g1", "g2"):
        job.start_ranks(group, fault=f"kill:g0/1:reduce:{AT}", steps=12, layout=layout, clip=0)
    facts = job.finish()
    check(facts, 12, 2, {"g1", "g2"})
    assert facts.codes["g0"] == 137 and facts.one(schema.Promoted).group == "g2"
    worked = {c.step: c.microbatches for c in facts.all(schema.Committed, group="g2", rank=1)}
    assert all(worked[step] == () for step in range(AT)) and all(worked[step] for step in range(AT, 12))
    assert not facts.all(schema.Healed) and not facts.all(schema.UserError)
    near(facts, gold(loop="sharded-gold", steps=12, parts=PARTS[layout], clip=0), "g2.0", SAMPLES)


@pytest.mark.long
@pytest.mark.parametrize("second", ["recover", "before", "reduce", "vote"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_dies_while_the_ranks_of_the_others_recover(job: Job, gold, second: str, rank: int) -> None:
    """Ranks of one group may be told of different epochs; they compute what they inherit in one of them, together."""
    job.settings["groups"] = 3
    for group in ("g0", "g1", "g2"):
        job.start_ranks(group, fault=f"kill:g1/1:reduce:{AT},kill:g2/{rank}:{second}:{AT}", steps=10)
    facts = job.finish()
    check(facts, 10, 2, {"g0"})
    assert facts.lost.keys() == {"g1", "g2"} and facts.members[-1] == ("g0",)
    assert {(e.group, e.phase) for e in facts.all(schema.FaultInjected)} >= {("g2", second)}
    assert not facts.all(schema.UserError) and facts.codes["g1"] == facts.codes["g2"] == 137
    near(facts, gold(loop="sharded-gold", steps=10, parts=2), "g0.1", SAMPLES)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "victim"), [("hsdp", 2), ("fsdp-tp", 1)])
def test_two_groups_of_four(job: Job, gold, layout: str, victim: int) -> None:
    killed_and_healed(job, gold, layout, victim)


@pytest.mark.long
def test_pending_sums_reach_the_optimizer_as_such(job: Job, gold) -> None:
    """Nothing clips, so the optimizer itself adds up the gradients of the norms, in a group that replays as well."""
    killed_and_healed(job, gold, "tp", 1, clip=0)
