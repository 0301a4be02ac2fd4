"""A run that is stopped in good order and begun again, by other numbers of groups, from the fastest place there is."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter

import pytest
from facts import Facts
from harness import names
from lives import Lives, loaded, poll

from lightkeeper.checkpoint.folder import Folder
from lightkeeper.events import schema
from lightkeeper.events.pretty import summary_lines

pytestmark = pytest.mark.long

RAMP = [6, 4, 6, 8]
OPTIONS = {"warm_up": 12, "microbatches": RAMP, "delay": 0.01, "dropout": 0.5, "steps": 400}
PLAIN = {key: value for key, value in OPTIONS.items() if key != "delay"}


def stop(lives: Lives, at: int, groups: int) -> Facts:
    """Asks the newest job to stop at about this step; checks that all groups ended after the same one, which is saved.

    Returns:
        The facts of it.
    """
    lives.job.wait_for(schema.Committed, step=at)
    (lives.checkpoints / "STOP").touch()
    reached = max(e.step for e in lives.job.events() if isinstance(e, schema.Committed))
    facts = lives.job.finish()
    lines, holds = summary_lines(facts.events)
    assert holds, lines
    assert facts.codes == dict.fromkeys(names(groups), 0) and not facts.lost and not facts.all(schema.CheckpointFailed)
    ends = {e.step for e in facts.all(schema.Finished)}
    assert len(ends) == 1 and ends == {e.step for e in facts.all(schema.StopRequested)}
    assert {e.group for e in facts.all(schema.Finished)} == set(names(groups))
    (end,) = ends
    assert at < end <= reached + 10, "soon, and not in the step at hand"
    assert facts.all(schema.CheckpointSaved)[-1].step == lives.committed()[0].step == end
    assert not (lives.checkpoints / "STOP").exists() and "as asked by the file STOP" in "".join(facts.said.values())
    return facts


def test_52_one_group_then_two_then_three_then_one_lose_and_repeat_no_sample(lives: Lives, gold) -> None:
    """Stopped by the file STOP each time; nothing is saved but the last state of each life."""
    lives.options = OPTIONS
    computed: Counter[tuple[int, int]] = Counter()
    end = 0
    for groups, at in ((1, 5), (2, 20), (3, 35), (1, 50)):
        job = lives.begin(groups, checkpoints={"every": 10_000})
        facts = stop(lives, at, groups)
        assert loaded(job) == dict.fromkeys(names(groups), end)
        assert {e.restarts for e in facts.all(schema.CheckpointLoaded)} == ({len(lives.jobs) - 1} if end else set())
        for e in facts.all(schema.Committed):
            computed.update((e.step, k) for k in e.microbatches)
        end = facts.one_lineage_end() + 1
        manifest = lives.committed()[0].manifest
        assert manifest is not None and manifest.microbatches == sum(RAMP[step % 4] for step in range(end))
        assert manifest.samples == 4 * manifest.microbatches and manifest.restarts == len(lives.jobs) - 1
    assert computed == {(step, k): 1 for step in range(end) for k in range(RAMP[step % 4])}
    lives.check_states(gold(**PLAIN))


def test_other_numbers_of_groups_beside_a_lighthouse_that_goes_on(lives: Lives, gold) -> None:
    """All are killed at once each time, so the lighthouse knows those of before; one that never comes is fenced."""
    lives.options = OPTIONS
    job = lives.begin(1, checkpoints={"every": 20})
    lives.wait_saved()
    lives.kill(lives.pids(lighthouse=False), lighthouse=False)
    job = lives.begin(3, job, checkpoints={"every": 20})
    lives.wait_saved()
    lives.kill(lives.pids(lighthouse=False), lighthouse=False)
    newest = lives.committed()[0].step
    job = lives.begin(2, job, checkpoints={"every": 20})
    job.until(lambda: "waiting for g2 (they may be training" in job.said("g0") + job.said("g1"), "it is waited for")
    assert job.command("fence", "--group", "g2", "--lighthouse", job.lighthouse).returncode == 0
    stop(lives, newest + 3, 2)
    assert loaded(job) == {"g0": newest, "g1": newest}
    lives.check_states(gold(**PLAIN))


def test_a_save_is_made_when_it_is_asked_for(lives: Lives, gold) -> None:
    lives.options = OPTIONS
    job = lives.begin(3, checkpoints={"every_s": 1e6})
    job.wait_for(schema.Committed, step=3)
    (lives.checkpoints / "SAVE").touch()
    reached = max(e.step for e in job.events() if isinstance(e, schema.Committed))
    saved = lives.wait_saved()[0]
    job.until(lambda: not (lives.checkpoints / "SAVE").exists(), "the file is gone")
    job.wait_for(schema.Committed, step=saved.step + 20)
    assert 3 < saved.step < reached + 10 and len(lives.wait_saved()) == 1, "once"
    stop(lives, saved.step + 21, 3)
    lives.check_states(gold(**PLAIN))


def test_the_run_goes_on_from_the_nodes_own_disks_and_after_their_loss_from_the_shared_one(lives: Lives, gold) -> None:
    lives.options = OPTIONS
    local = lives.folder / "local"
    options = {"every": 20, "local": str(local), "local_every": 5}

    def newest(group: str) -> int:
        return Folder(local / group).newest()

    def die_between() -> None:
        """A while after a save on the shared storage, when the local ones are ahead."""
        before, shared = Folder(lives.checkpoints).newest(), Folder(lives.checkpoints).newest
        lives.job.until(
            lambda: before < shared() <= min(newest("g0"), newest("g1")) - 5, "local ones are ahead of a new one", 60
        )
        lives.kill(lives.pids())

    lives.begin(2, checkpoints=options)
    die_between()
    ahead = {group: newest(group) for group in ("g0", "g1")}
    assert all(2 <= len(list((local / group).glob("step-*"))) <= 4 for group in ahead)

    job = lives.begin(2, checkpoints=options)
    die_between()
    assert loaded(job) == ahead
    tiers = {e.group: (e.tier, e.step) for e in job.events() if isinstance(e, schema.CheckpointLoaded)}
    assert tiers == {group: ("local", step) for group, step in ahead.items()}
    saved = [e for e in job.events() if isinstance(e, schema.CheckpointSaved)]
    assert {e.group for e in saved if e.tier == "local"} == {"g0", "g1"}
    assert len({e.group for e in saved if e.tier == "shared"}) <= 1

    shutil.rmtree(local / "g0")  # its node is lost: the other's disk has the newest, which begins the job
    mine, other = lives.committed()[0].step, newest("g1")
    job = lives.begin(2, checkpoints=options)
    job.wait_for(schema.Healed, group="g0")
    die_between()
    assert loaded(job) == {"g0": mine, "g1": other} and mine < other
    first = next(e for e in job.events() if isinstance(e, schema.Activated) and e.process == "lighthouse")
    assert first.members == ("g1",) and first.first_step == other

    shutil.rmtree(local)
    shared = lives.committed()[0].step
    job = lives.begin(2, checkpoints=options)
    stop(lives, shared + 3, 2)
    assert loaded(job) == {"g0": shared, "g1": shared}
    lives.check_states(gold(**PLAIN))


def test_a_last_state_that_cannot_be_saved_ends_the_group_that_leads_with_one_line(lives: Lives, gold) -> None:
    """The others end with 0: the run is finished."""
    place = lives.folder / "place"
    folder = place / "checkpoints"
    lives.options = {**OPTIONS, "steps": 60}
    lives.settings = {"first_step_s": 16}
    job = lives.begin(3, checkpoints={"every": 20, "folder": str(folder)})
    saved = lives.wait_saved()[0]
    place.rename(lives.folder / "elsewhere")
    place.touch()
    facts = lives.finish()
    assert facts.codes == {**dict.fromkeys(names(3), 0), saved.group: 1} and not facts.lost
    said = facts.said[saved.group]
    assert "the run has ended, and its last state, of step 60, is not saved: the newest checkpoint is of step" in said
    assert said.count("is not saved") == 1 and "Traceback" not in said
    assert facts.all(schema.CheckpointFailed)[-1].step == 60 and facts.one_lineage_end() == 59
    place.unlink()
    (lives.folder / "elsewhere").rename(place)
    job = lives.begin(1, checkpoints={"every": 20, "folder": str(folder)})
    facts = lives.finish()
    assert facts.codes == {"g0": 0} and 0 < loaded(job)["g0"] < 60, "started again it does the rest, and saves it"
    assert Folder(folder).newest() == 60
    lives.check_states(gold(**PLAIN | {"steps": 60}))


def test_all_die_while_the_last_state_is_saved(lives: Lives, gold) -> None:
    """Nobody has exited 0 by then, so whoever starts the run again gets its end once more."""
    lives.options = {**OPTIONS, "steps": 60, "slow_save": 0.1}
    job = lives.begin(2, checkpoints={"every": 20})
    job.wait_for(schema.Committed)
    job.hurry()
    pids = lives.pids()
    last = f".saving-{60:08d}.*/*"
    poll(lambda: any(lives.checkpoints.glob(last)), 60)
    lives.kill(pids)
    assert any(lives.checkpoints.glob(last)) and Folder(lives.checkpoints).newest() < 60
    job = lives.begin(2)
    facts = lives.finish()
    assert facts.codes == {"g0": 0, "g1": 0} and loaded(job) == dict.fromkeys(names(2), loaded(job)["g0"])
    assert lives.committed()[0].step == 60 and facts.one_lineage_end() == 59
    lives.check_states(gold(**PLAIN | {"steps": 60}))


def test_a_group_whose_job_ends_before_it_was_healed_does_not_begin_another_at_step_0(lives: Lives, gold) -> None:
    """It loaded nothing, for the job trained; then the last member dies, and with a minimum of 1 it might begin."""
    lives.options = OPTIONS
    lives.settings = {"start_window_s": 1}
    job = lives.begin(2, checkpoints={"every": 10})
    lives.wait_saved(2)
    gate = job.folder / "gate"
    os.kill(job.trainers["g0"].pid or 0, signal.SIGKILL)
    job.wait_for(schema.GroupLost, group="g0")
    lives.start(job, "g0", begin=str(gate))
    job.until(lambda: "g0-again" in loaded(job), "it has asked")
    os.kill(job.trainers["g1"].pid or 0, signal.SIGKILL)
    job.wait_for(schema.GroupLost, group="g1")
    gate.touch()
    assert job.wait("g0-again") == {"g0-again": 107}
    said = job.said("g0-again")
    assert loaded(job)["g0-again"] == 0 and said.count("was over before it had its state") == 1
    newest = lives.committed()[0].step
    lives.start(job, "g0")
    job.wait_for(schema.Committed, pid=job.trainers["g0-again-again"].pid, step=newest + 1)
    assert loaded(job)["g0-again-again"] == newest > 0
    (lives.checkpoints / "STOP").touch()
    assert job.wait("g0-again-again") == {"g0-again-again": 0}
    lives.check_states(gold(**PLAIN))


def test_another_seed_is_refused_unless_it_is_accepted(lives: Lives) -> None:
    lives.options = {**OPTIONS, "steps": 30}
    lives.begin(1)
    assert lives.finish().codes == {"g0": 0}
    lives.begin(1, seed=2, steps=40)
    facts = lives.finish()
    assert facts.codes == {"g0": 2} and not facts.all(schema.Committed)
    assert "is of a run with seed 1, and this one has 2: its data order would be another" in facts.said["g0"]
    lives.begin(1, seed=2, steps=40, checkpoints={"accept": ("seed",)})
    facts = lives.finish()
    assert facts.codes == {"g0": 0} and min(e.step for e in facts.all(schema.Committed)) == 30
    assert "seed was 1 and is 2" in facts.said["g0"]
