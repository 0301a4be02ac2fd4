"""Storage that takes nothing, hangs, is slow or has lost something: training goes on, a start finds what is whole."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from lives import Lives, loaded

from lightkeeper.checkpoint.names import MANIFEST, MARKER
from lightkeeper.events import schema

pytestmark = pytest.mark.long

EVERY, KEEP = 20, 2
OPTIONS = {"warm_up": 12, "microbatches": 3, "delay": 0.01, "dropout": 0.5, "batch_norm": True, "steps": 3000}
PLAIN = {key: value for key, value in OPTIONS.items() if key != "delay"}

# ------------------------------------------------------------ while it trains


@dataclass
class Trouble:
    """How the storage is broken and mended, and what is said of it."""

    breaks: Callable[[], None]
    mends: Callable[[], None]
    says: str
    keeps_files: bool = True


@pytest.fixture
def troubles(lives: Lives) -> Iterator[Callable[[str], Trouble]]:
    """Each by its name; what was mounted is unmounted."""
    mounted: list[Path] = []
    place = lives.checkpoints.parent / "place"
    lives.options = {**OPTIONS, "stuck": str(lives.folder / "stuck"), "broken": str(lives.folder / "broken")}

    def of(name: str) -> Trouble:
        if name in ("stuck", "broken"):
            path = lives.folder / name
            says = {"stuck": "the save before it is under way", "broken": "LookupError: nobody foresaw this"}[name]
            return Trouble(path.touch, path.unlink, says)
        if name == "full":
            place.mkdir()
            if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], check=False).returncode:
                pytest.skip("a small file system cannot be mounted here")
            mounted.append(place)
            return Trouble(lambda: fill(place / "filler"), (place / "filler").unlink, "No space left on device")

        def taken_away() -> None:
            place.rename(lives.folder / "elsewhere")
            place.touch()

        def brought_back() -> None:
            place.unlink()
            (lives.folder / "elsewhere").rename(place)

        return Trouble(taken_away, brought_back, "cannot be written: Not a directory", keeps_files=False)

    yield of
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: Path) -> None:
    """Takes all the space that there is."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def failures(lives: Lives) -> list[schema.CheckpointFailed]:
    """Those since the newest save; before it one may have been missed because the machine was busy."""
    events = lives.job.events()
    newest = max((i for i, e in enumerate(events) if isinstance(e, schema.CheckpointSaved)), default=-1)
    return [e for e in events[newest + 1 :] if isinstance(e, schema.CheckpointFailed)]


@pytest.mark.parametrize("name", ["taken-away", "full", "stuck", "broken"])
def test_61_training_goes_on_without_saves_and_the_next_one_succeeds_after_repair(
    lives: Lives, gold, troubles: Callable[[str], Trouble], name: str
) -> None:
    """S60 and S61. There is no process that saves, and no port: none can be killed or taken. A thread saves,
    and "broken" is what could end it.
    """
    trouble = troubles(name)
    folder = lives.checkpoints.parent / "place" / "checkpoints"
    options = {"every": EVERY, "keep": KEEP, "folder": str(folder)}
    job = lives.begin(1, checkpoints=options)
    lives.wait_saved(3)
    trouble.breaks()
    job.until(lambda: bool(failures(lives)), "a failure")
    there = sorted(path.name for path in folder.glob("step-*")) if trouble.keeps_files else []
    job.until(lambda: failures(lives)[-1].alarm, "the alarm")
    reached = max(e.step for e in job.events() if isinstance(e, schema.Committed))
    job.wait_for(schema.Committed, step=reached + 10)
    if trouble.keeps_files:
        assert sorted(path.name for path in folder.glob("step-*")) == there, "nothing makes room"
        assert len(there) in (KEEP, KEEP + 1)
    failed = failures(lives)
    first = failed[0]
    trouble.mends()
    count = len(lives.wait_saved())
    lives.wait_saved(count + 3)
    (folder / "STOP").touch()
    facts = job.finish()
    assert facts.codes == {"g0": 0} and not facts.lost
    assert all(trouble.says in e.reason for e in failed), {e.reason for e in failed}
    assert [(e.failures, e.alarm) for e in failed[:3]] == [(1, False), (2, False), (3, True)]
    assert first.pending == (name == "stuck")
    told = [e for e in facts.events if isinstance(e, schema.Committed | schema.CheckpointFailed)]
    done = next(e for e in reversed(told[: told.index(first)]) if isinstance(e, schema.Committed)).step
    assert done <= first.step + 3, "told within a step or two of the save that failed"
    assert "ALARM: 3 saves in a row came to nothing" in facts.said["g0"]
    assert "that failed" in facts.said["g0"], "it says that saves go on"
    saved = [e.step for e in facts.all(schema.CheckpointSaved)]
    assert saved == sorted(set(saved)) and saved[-1] == facts.one_lineage_end() + 1
    kept = [path for path in folder.glob("step-*") if (path / MARKER).exists()]
    assert len(kept) == KEEP and not list(folder.glob(".saving-*")), "what broke off is gone"
    lives.check_states(gold(**PLAIN))


def test_59_a_save_that_takes_forty_steps_holds_the_bits_of_its_own(lives: Lives, gold) -> None:
    lives.options = {**OPTIONS, "delay": 0.015, "slow_save": 0.6}
    job = lives.begin(1, checkpoints={"every": 40})
    saved = lives.wait_saved()[0]
    lives.kill(lives.pids())
    events = job.events()
    done = [e.step for e in events[: events.index(saved)] if isinstance(e, schema.Committed)]
    assert saved.step == 40 and saved.write_s > 3 and done[-1] >= 80, "many steps later"
    lives.options["slow_save"] = 0.0
    job = lives.begin(1, checkpoints={"every": 10_000})
    job.wait_for(schema.Committed, step=70)
    (lives.checkpoints / "STOP").touch()
    facts = lives.finish()
    assert facts.codes == {"g0": 0} and loaded(job) == {"g0": 40}
    assert facts.one(schema.CheckpointLoaded).compared
    lives.check_states(gold(**PLAIN))


# ------------------------------------------------------------ when it begins


def spoil(folder: Path) -> dict[int, str]:
    """Breaks the five newest checkpoints, each in another way, and puts aliens beside them; step to what is said."""
    paths = sorted((path for path in folder.glob("step-*")), reverse=True)
    steps = [int(path.name[5:]) for path in paths]
    data = [next(path.glob("__0_0.distcp")) for path in paths]
    data[0].write_bytes(data[0].read_bytes()[:-7])
    data[1].write_bytes(b"")
    data[2].write_bytes(bytes(data[2].stat().st_size))
    (paths[3] / MANIFEST).unlink()
    (paths[4] / MARKER).unlink()
    (folder / "step-00009999").write_text("not even a folder")
    (folder / "notes.txt").write_text("mine")
    (folder / "step-9").mkdir()
    shutil.copytree(paths[5], folder / "step-00008888")
    return {
        9999: "commit marker cannot be read", 8888: f"its manifest is that of step {steps[5]}",
        steps[0]: "bytes instead of", steps[1]: "has 0 bytes instead of", steps[2]: "has other bytes than were written",
        steps[3]: "it has no manifest", steps[4]: "it has no commit marker",
    }  # fmt: skip


def test_58_what_is_broken_is_skipped_with_a_line_each_and_with_none_whole_it_says_how_to_go_on(
    lives: Lives, gold
) -> None:
    lives.options = OPTIONS
    lives.begin(1, checkpoints={"every": EVERY, "keep": 9})
    lives.wait_saved(7)
    lives.kill(lives.pids())
    newest = lives.committed()
    reasons = spoil(lives.checkpoints)
    whole = newest[5].step

    job = lives.begin(1, checkpoints={"every": 10_000, "keep": 9})
    job.wait_for(schema.Committed, step=whole + 2)
    lives.kill(lives.pids())
    assert loaded(job) == {"g0": whole}
    skipped = {e.step: e for e in job.events() if isinstance(e, schema.CheckpointSkipped)}
    assert skipped.keys() == reasons.keys()
    for step, why in reasons.items():
        assert why in skipped[step].reason
        assert job.said("g0").count(f"not loaded: {skipped[step].path}: ") == 1
    assert (lives.checkpoints / "notes.txt").read_text() == "mine" and (lives.checkpoints / "step-9").is_dir()
    lives.check_states(gold(**PLAIN))

    for path in lives.checkpoints.glob("step-*/*.distcp"):
        path.write_bytes(b"")
    job = lives.begin(1)
    facts = lives.finish()
    assert facts.codes == {"g0": 2} and not facts.all(schema.Committed)
    last = [line for line in facts.said["g0"].splitlines() if line.startswith("lightkeeper: ")][-1]
    assert "none of them can be loaded" in last and "fresh=True" in last and "Traceback" not in facts.said["g0"]

    job = lives.begin(1, checkpoints={"every": EVERY, "fresh": True})
    assert lives.wait_saved()[0].step == EVERY
    (lives.checkpoints / "STOP").touch()
    facts = lives.finish()
    assert facts.codes == {"g0": 0} and loaded(job) == {"g0": 0}
    assert "put aside, as asked" in facts.said["g0"] and len(list(lives.checkpoints.glob("aside-*"))) >= 7
