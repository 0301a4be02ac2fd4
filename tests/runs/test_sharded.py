"""Groups of several ranks, sharded and split in the ways a group may be: killed, healed, replayed, bit-equal."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Job
from sharded_facts import check, near, replayed

from lightkeeper.events import schema

STEPS, AT = 40, 5
SAMPLES = 6 * 4  # of a step, whoever computes them
PARTS = {"fsdp": 2, "tp": 1, "hsdp": 4, "fsdp-tp": 2}
RANKS = {"fsdp": 2, "tp": 2, "hsdp": 4, "fsdp-tp": 4}


def start(job: Job, count: int, layout: str, fault: str = "", **options: Any) -> dict[str, Any]:
    """A lighthouse and groups alike; slow steps until the test hurries them."""
    job.settings["groups"] = count
    job.start_lighthouse()
    given = {"layout": layout, "hurry": str(job.folder / "hurry"), "delay": 0.03, **options}
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
    assert facts.codes["g1"] == 137 and all(facts.codes[f"g1.{rank}"] == -9 for rank in range(ranks))
    hit = facts.one(schema.FaultInjected)
    assert (hit.group, hit.phase, hit.step, hit.process) == ("g1", "reduce", AT, f"rank g1/{victim}")
    assert facts.lost.keys() == {"g1"} and f"rank {victim} was killed by SIGKILL" in facts.lost["g1"].cause
    assert not facts.all(schema.UserError) and not facts.all(schema.Diverged)
    assert {e.rank for e in facts.all(schema.Healed)} == set(range(ranks))
    followed = replayed(facts, "g1-again", ranks)
    first = facts.all(schema.Rejoined)[0].step
    joined = [c for c in facts.all(schema.Committed, group="g1", rank=0) if c.step >= first]
    assert followed and joined[0].live and not joined[0].microbatches  # its first step as a member has no share
    plain = gold(loop="sharded-gold", steps=given["steps"], parts=PARTS[layout])
    for name in ("g0.0", "g1-again.1"):
        near(facts, plain, name, SAMPLES)


@pytest.mark.parametrize(("layout", "victim"), [("fsdp", 1), ("tp", 0)])
def test_two_groups_of_two(job: Job, gold, layout: str, victim: int) -> None:
    killed_and_healed(job, gold, layout, victim)


def test_ranks_recover_together_though_one_of_them_cannot_take_the_epoch_up(job: Job, gold) -> None:
    """Rank 0 could go on and would compute what it inherits, while rank 1 waits for the next epoch."""
    job.settings["groups"] = 2
    job.start_lighthouse()
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
    job.start_lighthouse()
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


@pytest.mark.long
@pytest.mark.parametrize(("layout", "victim"), [("hsdp", 2), ("fsdp-tp", 1)])
def test_two_groups_of_four(job: Job, gold, layout: str, victim: int) -> None:
    killed_and_healed(job, gold, layout, victim)
