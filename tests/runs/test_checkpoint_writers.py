"""Who writes: one group at a time, whoever leads; what one has begun that is killed, or left out, never counts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from facts import Facts
from lives import Lives, files_being_saved, loaded, poll

from lightkeeper.checkpoint.folder import Folder
from lightkeeper.checkpoint.manifest import read_marker
from lightkeeper.checkpoint.names import MARKER, Found
from lightkeeper.events import schema

STEPS, EVERY = 60, 20
OPTIONS = {"warm_up": 12, "microbatches": 6, "delay": 0.01, "slow_save": 0.05, "dropout": 0.5, "steps": STEPS}
PLAIN = {key: value for key, value in OPTIONS.items() if key not in ("slow_save", "delay")}


def half_written(lives: Lives) -> list[Found]:
    """What is being written, or was."""
    return [one for one in Folder(lives.checkpoints).entries() if one.kind == "saving"]


def writer_of(found: Found) -> str:
    """The group that writes it."""
    return found.by.partition("-")[0]


def check_one_writer(lives: Lives, facts: Facts) -> None:
    """No step has two writers, and every marker is that of the group that says so."""
    saved = facts.all(schema.CheckpointSaved)
    assert len({e.step for e in saved}) == len(saved), "one writer of each step"
    by = {e.step: e.group for e in saved}
    for one in lives.committed():
        marker = read_marker(one.path)
        assert one.manifest is not None and marker.by.partition("-")[0] == one.manifest.group
        assert by.get(one.step, one.manifest.group) == one.manifest.group


def test_38_the_writer_is_killed_while_it_saves_and_the_next_one_takes_over_at_once(lives: Lives, gold) -> None:
    """Killed in its save of the step in the middle, which hangs; the next group does not wait for the last one."""
    every, hangs = STEPS // 2, lives.folder / "stuck"
    lives.options = {**OPTIONS, "delay": 0.15, "stuck": str(hangs)}
    job = lives.begin(3, checkpoints={"every": every})
    job.wait_for(schema.Committed)
    hangs.touch()
    poll(lambda: files_being_saved(lives.checkpoints) >= 1)
    (begun,) = half_written(lives)
    lost = writer_of(begun)
    os.kill(job.trainers[lost].pid or 0, signal.SIGKILL)
    assert begun.step == every and not (lives.checkpoints / begun.name / MARKER).exists()
    hangs.unlink()
    first = lives.wait_saved()[0]
    facts = lives.finish()
    others = {"g0", "g1", "g2"} - {lost}
    assert facts.codes == {lost: -9, **dict.fromkeys(others, 0)}
    assert facts.lost.keys() == {lost} and facts.lost[lost].detected_by == "manager"
    assert "SIGKILL" in facts.lost[lost].cause
    assert first.group in others and first.step <= facts.epochs[-1].first_step + 6 < STEPS
    assert {e.group for e in facts.all(schema.CheckpointSaved)} == {first.group}
    assert lives.committed()[0].step == STEPS
    assert not half_written(lives), "what was begun is swept away"
    check_one_writer(lives, facts)
    lives.check_states(gold(**PLAIN))


@pytest.mark.long
def test_57_files_of_a_writer_that_was_left_out_while_it_stood_still_get_no_marker(lives: Lives, gold) -> None:
    """All processes of the group that leads stand still in a save until the others have saved; then they go on."""
    hangs = lives.folder / "stuck"
    lives.options = {**OPTIONS, "slow_save": 0.2, "steps": 400, "delay": 0.05, "stuck": str(hangs)}
    job = lives.begin(3, checkpoints={"every": EVERY})
    job.wait_for(schema.Committed)
    hangs.touch()
    poll(lambda: files_being_saved(lives.checkpoints) >= 1)
    (begun,) = half_written(lives)
    old = writer_of(begun)
    pids = [job.trainers[old].pid or 0, job.manager_pid(old)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    hangs.unlink()
    assert not (lives.checkpoints / begun.name / MARKER).exists()
    lost = job.wait_for(schema.GroupLost, group=old)
    saved = job.wait_for(schema.CheckpointSaved)
    assert saved.group != old
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    job.until(lambda: job.trainers[old].exitcode is not None, "the old writer is ended")
    assert lost.detected_by in ("lease", "manager") and job.trainers[old].exitcode != 0
    facts = lives.finish(within_s=120)
    assert {name: facts.codes[name] for name in facts.codes if name != old} == dict.fromkeys(
        {"g0", "g1", "g2"} - {old}, 0
    )
    assert not facts.all(schema.CheckpointSaved, group=old)
    for one in lives.committed():
        assert one.manifest is not None and one.manifest.group != old
    check_one_writer(lives, facts)
    lives.check_states(gold(**PLAIN | {"steps": 400}))


@pytest.mark.long
def test_a_group_that_comes_back_to_a_running_job_loads_nothing_and_heals(lives: Lives, gold) -> None:
    lives.options = {**OPTIONS, "slow_save": 0.0, "steps": 1000}
    job = lives.begin(3, checkpoints={"every": EVERY})
    lives.wait_saved(2)
    os.kill(job.trainers["g1"].pid or 0, signal.SIGKILL)
    job.wait("g1")
    job.wait_for(schema.GroupLost, group="g1")
    lives.start(job, "g1", checkpoints={"every": EVERY})
    back = job.wait_for(schema.Rejoined, group="g1")
    facts = lives.finish(within_s=120)
    assert facts.codes == {"g0": 0, "g1": -9, "g2": 0, "g1-again": 0}
    assert loaded(job) == {"g0": 0, "g1": 0, "g2": 0, "g1-again": 0}
    said = facts.said["g1-again"]
    assert said.count("the job trains already") == 1 and "its state comes from there, not from a checkpoint" in said
    assert not facts.all(schema.CheckpointLoaded) and facts.all(schema.Healed, group="g1", pid=back.pid)
    check_one_writer(lives, facts)
    lives.check_states(gold(**PLAIN | {"steps": 1000}))


@pytest.mark.long
def test_without_a_folder_of_checkpoints_a_group_heals_as_ever(job) -> None:
    """S38: saving is off, and has no part in healing."""
    job.start_healing(3, steps=150)
    job.wait_for(schema.Committed, step=10)
    os.kill(job.trainers["g2"].pid or 0, signal.SIGKILL)
    job.return_of("g2")
    job.await_rejoin("g2")
    facts = job.finish()
    facts.check_healed(150, {"g0": 0, "g1": 0, "g2": -9, "g2-again": 0}, {"g2"}, ("g0", "g1", "g2"))
    assert not Path(job.folder / "checkpoints").exists() and not facts.all(schema.CheckpointSaved)


@pytest.mark.long
def test_the_group_that_leads_is_killed_while_it_saves_the_last_state(lives: Lives, gold) -> None:
    hangs = lives.folder / "stuck"
    lives.options = {**OPTIONS, "stuck": str(hangs)}
    job = lives.begin(3, checkpoints={"every": 10_000})
    job.wait_for(schema.Committed)
    hangs.touch()
    job.hurry()
    poll(lambda: files_being_saved(lives.checkpoints) >= 1)
    (begun,) = half_written(lives)
    lost = writer_of(begun)
    os.kill(job.trainers[lost].pid or 0, signal.SIGKILL)
    assert begun.step == STEPS and not (lives.checkpoints / begun.name / MARKER).exists()
    hangs.unlink()
    facts = lives.finish()
    others = {"g0", "g1", "g2"} - {lost}
    assert facts.codes == {lost: -9, **dict.fromkeys(others, 0)} and facts.lost.keys() == {lost}
    saved = facts.one(schema.CheckpointSaved)
    assert saved.step == STEPS and saved.group in others and lives.committed()[0].step == STEPS
    lives.check_states(gold(**PLAIN))
