"""Facts of training, in jobs whose groups die and come back: same bits in all groups, and what one process computes."""

from __future__ import annotations

import pytest
from facts import Facts
from harness import Job
from healed import PATIENT

from lightkeeper.events import schema

AT, STEPS = 5, 12
ALL = {"g0", "g1", "g2"}
EVERYTHING = "tokens scaler clip cosine bf16 averages"
TOKENS = {"loop": "training", "facts": "tokens", "steps": STEPS}
PLAIN = {"loop": "plain_training", "facts": "tokens", "steps": STEPS}


def tokens_of(facts: Facts, group: str) -> dict[int, int]:
    return {step: before["tokens"] for step, _, before, _ in facts.traces[group].all("tally")}


def counted(facts: Facts, group: str, step: int) -> list[int]:
    return [k for s, k in facts.traces[group].all("counted") if s == step]


def check_tokens(facts: Facts, survivors: set[str], steps: int = STEPS, microbatches: int = 6) -> None:
    """Every group divided by the same number in every step, and it is the right one."""
    for group in survivors:
        told = tokens_of(facts, group)
        assert told == {s: sum(3 + (7 * s + 5 * k) % 6 for k in range(microbatches)) for s in range(steps)}, group
    for step in range(steps):
        whose = {w for group in survivors for s, w, *_ in facts.traces[group].all("tally") if s == step}
        assert len(whose) == 1, f"step {step}: groups agreed on {whose}"


@pytest.fixture(autouse=True)
def patient(job: Job) -> None:
    """A lease that nobody overruns because the machine is busy: here nobody is to be found by silence."""
    job.start_lighthouse(*PATIENT)


def test_a_group_dies_inside_the_reduce_that_a_step_starts_with(job: Job, gold) -> None:
    """The others stand in it; nobody has the value, so the heirs count what they inherit and all add up anew."""
    job.start_all(3, fault=f"kill:g2:before:{AT}", **TOKENS)
    facts = job.finish()
    facts.check(STEPS, {"g0", "g1"}, {"g2": -9})
    facts.fault("kill", "before", "g2", AT)
    assert facts.lost["g2"].detected_by == "manager" and facts.epochs[1].first_step == AT
    check_tokens(facts, {"g0", "g1"})
    inherited = set(counted(facts, "g2", AT))
    assert inherited and inherited <= set(counted(facts, "g0", AT)) | set(counted(facts, "g1", AT))
    for group in ("g0", "g1"):
        assert sorted(counted(facts, group, AT)) == sorted(facts.commits(group)[AT].microbatches)
        facts.near(gold(**PLAIN), group)


def test_a_value_that_some_have_and_others_not_is_given_to_the_others(job: Job, gold) -> None:
    """It completed on g0 and g2, not on g1; g2 dies over its forward pass. g0 counts nothing of what it inherits."""
    only = {"g1": {"behave": f"fail-after-before:{AT} await:0", "facts": "tokens"}}
    job.start_all(3, fault=f"freeze:g2:reduce:{AT}", only=only, delay=0.05, **TOKENS)
    facts = job.finish()
    assert facts.traces["g1"].all("failed-after-before") == [[AT]]
    facts.check(STEPS, {"g0", "g1"}, {"g2": facts.codes["g2"] or 1})
    facts.fault("freeze", "reduce", "g2", AT)
    assert facts.lost.keys() == {"g2"}
    check_tokens(facts, {"g0", "g1"})
    assert len(counted(facts, "g0", AT)) == 2 and len(facts.commits("g0")[AT].microbatches) == 3
    assert facts.traces["g0"].forward.count((AT, facts.commits("g0")[AT].microbatches[0])) == 1
    facts.near(gold(**PLAIN), "g0")


def test_one_group_decides_that_the_run_ends_early(job: Job, gold) -> None:
    """As `docs/training.md` writes it: agreed on, `finish()`, and `break`."""
    job.start_all(3, only={"g0": {"behave": f"stop:{AT}"}}, **TOKENS)
    facts = job.finish()
    facts.check(AT + 1, ALL)
    assert not facts.lost and len(facts.epochs) == 1
    for group in ALL:
        facts.near(gold(**{**PLAIN, "steps": AT + 1}), group)


@pytest.mark.long
def test_an_exception_in_what_counts_is_the_groups_own(job: Job) -> None:
    job.start_all(3, only={"g2": {"behave": f"raise-counting:{AT}"}}, **TOKENS)
    facts = job.finish()
    facts.check(STEPS, {"g0", "g1"}, {"g2": 1})
    error = facts.one(schema.UserError)
    assert (error.group, error.step, error.type) == ("g2", AT, "ValueError") and "training.py" in error.traceback
    assert facts.lost.keys() == {"g2"} and "a bug in what counts" in facts.lost["g2"].cause
    check_tokens(facts, {"g0", "g1"})


@pytest.mark.long
def test_a_group_that_fails_in_it_alone_costs_an_epoch_and_nobody(job: Job) -> None:
    only = {"g1": {"behave": f"fail-after-before:{AT} await:0"}}
    job.start_all(3, only=only, **TOKENS)
    facts = job.finish()
    facts.check(STEPS, ALL)
    assert facts.traces["g1"].all("failed-after-before") == [[AT]] and not facts.lost
    assert facts.all(schema.ReduceFailed)[0].group == "g1" and len(facts.epochs) == 2
    check_tokens(facts, ALL)
    for group in ALL:
        assert sorted(counted(facts, group, AT)) == sorted(facts.commits(group)[AT].microbatches)


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_group_without_a_share_follows_scaler_and_tokens(job: Job, gold, count: int) -> None:
    """One microbatch a step: g1 never computes anything, and has scale, skipped steps and weights all the same."""
    words = {"facts": "tokens scaler clip", "microbatches": 1, "steps": STEPS}
    job.start_all(count, loop="training", **words)
    facts = job.finish()
    groups = {f"g{i}" for i in range(count)}
    facts.check(STEPS, groups)
    check_tokens(facts, groups, microbatches=1)
    plain = gold(loop="plain_training", **words)
    for group in groups:
        assert facts.traces[group].digests == plain.digests, group
        assert [list(one) for one in plain.scalars] == facts.traces[group].all("scalars"), group
    assert len(counted(facts, "g0", 0)) == 1
    if count == 2:
        assert not facts.traces["g1"].forward and not facts.traces["g1"].all("counted")
    skipped = [s for s in range(1, STEPS) if plain.digests[s] == plain.digests[s - 1]]
    assert skipped == [2, 7], "the steps whose loss overflows are skipped, and the scale is halved"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "words",
    [
        EVERYTHING,
        pytest.param("tokens chunked checkpoint cosine", marks=pytest.mark.long),
        pytest.param("tokens reentrant amax clip", marks=pytest.mark.long),
        pytest.param("compile=aot_eager clip", marks=pytest.mark.long),
    ],
)
def test_a_group_comes_back_into_all_of_it(job: Job, gold, words: str) -> None:
    """A ramp of the batch goes on meanwhile, across the kill and across the return."""
    steps, ramp = 150, [4, 5, 6, 7, 8, 3]
    phase = "before" if "tokens" in words else "reduce"
    slow = {"delay": 0.12, "steps": steps, "microbatches": ramp}
    job.start_healing(3, fault=f"kill:g2:{phase}:{AT}", loop="training", facts=words, **slow)
    job.until(lambda: job.trainers["g2"].exitcode is not None, "the end of g2")
    job.return_of("g2")
    job.await_rejoin("g2")
    facts = job.finish()
    facts.check_healed(steps, {"g0": 0, "g1": 0, "g2": -9, "g2-again": 0}, {"g2"}, ("g0", "g1", "g2"))
    facts.fault("kill", phase, "g2", AT)
    again = facts.traces["g2-again"]
    healed, rejoined = facts.all(schema.Healed)[-1], facts.one(schema.Rejoined)
    assert rejoined.step >= healed.step
    if "tokens" in words:
        assert again.all("counted") and min(s for s, _ in again.all("counted")) > rejoined.step
    assert {s: before for s, _, before, _ in again.all("tally")}.items() <= {
        s: before for s, _, before, _ in facts.traces["g0"].all("tally")
    }.items()
    plain = gold(loop="plain_training", facts=words, steps=steps, microbatches=ramp)
    facts.near(plain, "g0", tolerance=1e-3)
    facts.near_from(plain, "g2-again", tolerance=1e-3)


def test_ranks_of_a_group_count_their_parts_and_agree_with_each_other(job: Job, gold) -> None:
    """Two groups of two ranks, and the reduce completes everywhere but at g1's second rank: all four do it anew."""
    job.settings["groups"] = 2
    words = {"facts": "tokens sharded clip", "steps": STEPS, "dropout": 0.0}
    for group, behave in (("g0", ""), ("g1", f"fail-after-before:{AT} await:0")):
        job.start_ranks(group, 2, loop="training", behave=behave, **words)
    facts = job.finish()
    ranks = [f"g{group}.{rank}" for group in range(2) for rank in range(2)]
    assert facts.codes == dict.fromkeys(("g0", "g1", *ranks), 0) and not facts.lost
    assert facts.traces["g1.1"].all("failed-after-before") == [[AT]] and len(facts.epochs) == 2
    check_tokens(facts, set(ranks))
    plain = gold(loop="plain_training", **words)
    for rank in (0, 1):
        assert facts.traces[f"g0.{rank}"].digests == facts.traces[f"g1.{rank}"].digests
        for group in ("g0", "g1"):
            assert counted(facts, f"{group}.{rank}", AT) == counted(facts, f"{group}.0", AT) != []
    for name in ranks:
        facts.near(plain, name)
