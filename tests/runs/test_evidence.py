"""What is kept of real incidents: taken before the kill, complete or with its reasons, and in nobody's way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Job

from lightkeeper.events import schema
from lightkeeper.events.reader import seconds_between

PAIR = """
import ctypes, json, linecache, os, signal, sys, threading, time
import torch
import torch.distributed as dist
import lightkeeper

folder, mode = sys.argv[1:]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
pair = dist.new_group([0, 1], group_desc="pair")
model = torch.nn.Linear(2, 1)
manager = lightkeeper.Manager(model, torch.optim.SGD(model.parameters(), lr=0.1))
x = torch.ones(4)
if rank < 2:
    dist.all_reduce(x, group=pair)
dist.barrier()
print(f"rank {rank} is about to {mode}", flush=True)

def there():
    with open(os.path.join(folder, f"there-{rank}.new"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, file.name[:-4])

def there_once_in(name):
    def where():
        frame = sys._current_frames()[threading.main_thread().ident]
        return frame.f_code.co_name, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()

    def look():  # from a thread, while the main one stands in this function; it is recorded by then
        while where() != (name, "work.wait()"):
            time.sleep(0.01)
        there()
    threading.Thread(target=look, daemon=True).start()

def is_stopped(other):
    with open(os.path.join(folder, f"there-{other}")) as file, open(f"/proc/{file.read()}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"

def never_arrives():
    there()
    time.sleep(600)

if rank == 0:
    there_once_in("all_reduce")
    dist.all_reduce(x, group=pair)
elif rank == 1 and mode == "mismatch":
    there_once_in("all_gather")
    dist.all_gather([torch.ones(4), torch.ones(4)], x, group=pair)
elif rank == 1 and mode == "hold":
    there()
    while True:
        ctypes.PyDLL(None).sleep(600)
elif rank == 1 and mode == "stop":
    there()
    os.kill(os.getpid(), signal.SIGSTOP)
elif rank == 1:
    never_arrives()
else:
    while not all(os.path.exists(os.path.join(folder, f"there-{other}")) for other in (0, 1)):
        time.sleep(0.01)
    while mode == "stop" and not is_stopped(1):
        time.sleep(0.01)
    time.sleep(0.5)  # for rank 1 to be in it, whose last sign of life from Python was before
    os.kill(os.getpid(), signal.SIGKILL)
"""
WITH_SPY = f"{os.path.dirname(sys.executable)}:/usr/bin:/bin"
WITHOUT_SPY = "/usr/bin:/bin"
EVIDENCE_S = 8.0  # it is taken in a fraction of a second, unless the machine is busy


def killed_beside_a_pair(job: Job, mode: str, env: dict[str, str] | None = None) -> tuple[schema.Evidence, Path]:
    """A group of three ranks: the first stands in a collective, the second does what `mode` says, the third dies."""
    job.start_lighthouse()
    script = job.folder / "pair.py"
    script.write_text(PAIR)
    settings = {"ranks": 3, "evidence_s": EVIDENCE_S}
    job.start_command("g0", [str(script), str(job.folder), mode], settings=settings, env=env)
    assert job.wait("g0")["g0"] == 137, job.said("g0")
    event = job.wait_for(schema.Evidence)
    job.until(lambda: not job.left_over(), "nothing is left")
    assert event.reason == "rank 2 was killed by SIGKILL" and event.folder.endswith("-g0-step0-killed")
    return event, job.folder / event.folder


def test_a_rank_is_killed_while_another_never_arrives(job: Job) -> None:
    """Stacks of both that live, what all three printed last, how the third ended, and who is missing where."""
    event, folder = killed_beside_a_pair(job, "never-arrive", {"PATH": WITHOUT_SPY})
    assert event.recorder == "all_reduce #2 of pair: rank 1 of g0 never arrived; rank 0 of g0 waits"
    assert "Not all ranks joining collective" in (folder / "recorder.txt").read_text()
    assert "in all_reduce" in (folder / "stacks-rank0.txt").read_text()
    assert "in never_arrives" in (folder / "stacks-rank1.txt").read_text()
    for rank in range(3):
        assert f"rank {rank} is about to never-arrive" in (folder / f"log-rank{rank}.txt").read_text()
    assert "was killed by SIGKILL" in (folder / "ranks.txt").read_text().splitlines()[2]
    gone = {"stacks-rank2": "it was killed by SIGKILL", "recorder-rank2": "it was killed by SIGKILL"}
    assert {what: why for what, why in event.missing.items() if what != "kernel"} == gone
    assert {what: (folder / what).with_suffix(".txt").stat().st_size for what in ("ranks", "log-rank1")}.items() <= (
        event.taken.items()
    )
    said = job.said("g0")
    assert said.count("rank 1 is about to") == 1 and f"kept of it: {event.folder}" in said
    (log,) = (job.folder / "logs").glob("g0-rank1-*.log")
    assert "rank 1 is about to" in log.read_text()


@pytest.mark.long
def test_a_rank_that_holds_the_interpreter_lock_is_looked_into_too(job: Job) -> None:
    event, folder = killed_beside_a_pair(job, "hold", {"PATH": WITHOUT_SPY})
    assert "pair.py" in (folder / "stacks-rank1.txt").read_text()
    assert event.recorder == "all_reduce #2 of pair: rank 1 of g0 never arrived; rank 0 of g0 waits"


@pytest.mark.long
@pytest.mark.parametrize("spy", [False, True])
def test_of_a_stopped_rank_the_kernel_tells_where_it_stands(job: Job, spy: bool) -> None:
    event, folder = killed_beside_a_pair(job, "stop", {"PATH": WITH_SPY if spy else WITHOUT_SPY})
    assert event.missing["recorder-rank1"] == "it is stopped"
    assert "rank 1" in (folder / "ranks.txt").read_text() and "is stopped" in (folder / "ranks.txt").read_text()
    assert event.recorder == "all_reduce #2 of pair: no dump of rank 1 of g0; rank 0 of g0 waits"
    if spy and os.path.exists(f"{os.path.dirname(sys.executable)}/py-spy") and os.geteuid() == 0:
        assert "pair.py" in (folder / "stacks-rank1.txt").read_text()
    else:
        assert "stopped" in event.missing["stacks-rank1"]
        assert "State:\tT (stopped)" in (folder / "kernel-view-rank1.txt").read_text()


@pytest.mark.long
def test_ranks_in_two_collectives_are_told_apart(job: Job) -> None:
    event, _ = killed_beside_a_pair(job, "mismatch")
    assert "all_reduce #2 of pair" in event.recorder and "all_gather [[4]] by 1 of g0" in event.recorder
    assert "COLLECTIVE_TYPE_MISMATCH" in event.recorder


@pytest.mark.long
def test_across_groups_the_one_that_never_arrived_is_named(job: Job) -> None:
    """A rank of g1 is killed before it reduces: the survivors' dumps, taken before they abort, and its neighbour's."""
    job.settings.update(groups=2, ranks=2, evidence_s=EVIDENCE_S)
    job.start_lighthouse("--lease-s", "5")  # g0 is not to be lost because the machine is busy
    for group in ("g0", "g1"):
        job.launch(group, "freeze:g1/1:compute:4", loop="sharded", layout="tp", steps=8)
    assert job.wait("g0")["g0"] == 0 and job.wait("g1")["g1"] == 104
    assert [e.group for e in job.events() if isinstance(e, schema.GroupLost)] == ["g1"]
    assert job.wait_for(schema.FaultInjected).fault == "freeze"
    mine = job.wait_for(schema.Evidence, group="g1")
    assert mine.folder.endswith("-left-out") and "is stopped" in (job.folder / mine.folder / "ranks.txt").read_text()
    joint = job.wait_for(schema.Evidence, group="g0")
    assert "recovery-e" in joint.folder and {"recorder-g0-rank0", "recorder-g0-rank1"} <= joint.taken.keys()
    assert "of g1" in joint.recorder and "of g0" in joint.recorder and "all_reduce" in joint.recorder, joint.recorder


@pytest.mark.long
def test_one_killed_rank_costs_a_group_of_one_next_to_nothing(job: Job) -> None:
    """There is nobody left to look into: its log, its exit and the kernel's words."""
    job.settings.update(groups=1, evidence_s=EVIDENCE_S)
    job.start_lighthouse()
    job.launch("g0", "kill:g0:compute:3", steps=8)
    assert job.wait("g0")["g0"] == 137
    event = job.wait_for(schema.Evidence)
    assert {"ranks", "log-rank0"} <= event.taken.keys() and "stacks-rank0" in event.missing
    assert event.seconds < EVIDENCE_S and not event.recorder
    ended = job.wait_for(schema.ProcessEnded, process="manager g0")
    assert seconds_between(job.wait_for(schema.FaultInjected), ended) < EVIDENCE_S, "nothing was waited for"


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root")
def test_on_a_full_disk_the_rank_goes_on_and_what_is_not_kept_is_said(job: Job, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)], check=True)
    try:
        job.settings.update(groups=1, run_folder=str(small))
        job.start_lighthouse()
        script = job.folder / "loud.py"
        script.write_text("import os, sys\nfor n in range(20000):\n    print(n, 'x' * 80)\nsys.exit(3)\n")
        job.start_command("g0", [str(script)])
        assert job.wait("g0")["g0"] == 3, job.said("g0")[-2000:]
        said = job.said("g0")
        assert "19999 x" in said, "all of it was shown"
        assert "kept of it: incidents/" in said or re.search("kept of it: nothing.*: No space left on device", said)
        assert sum(path.stat().st_size for path in (small / "logs").iterdir()) <= 256 << 10
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)
