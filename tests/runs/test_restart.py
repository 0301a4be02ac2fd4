"""A launcher starts its group again when the group was lost, and only then."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
from facts import Facts
from harness import Job
from healed import PATIENT

from lightkeeper.events import schema
from lightkeeper.manager.ranks import RankProcesses, open_rendezvous
from lightkeeper.manager.warm import WarmRanks

pytestmark = pytest.mark.timeout(400)  # two starts one after the other, each of which imports torch

STEPS, AT = 600, 5  # slow ones until the group is back: a machine may take half a minute to import torch
DIES = (
    "import os, signal, sys\nprint('start', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
    "os.kill(os.getpid(), getattr(signal, sys.argv[1]))\n"
)


def restarts(count: int) -> dict[str, str]:
    return {"LIGHTKEEPER_RESTARTS": str(count)}


def of_the_second_start(facts: Facts, group: str, pid: int) -> Facts:
    """The facts, where the group's trace and process are those of its second start."""
    facts.traces[group] = facts.traces.pop(f"{group}-again")
    facts.pids[group] = pid
    return facts


@pytest.mark.parametrize(("kind", "code"), [("kill", 137), ("freeze", 104)])
def test_a_lost_group_comes_back_by_itself(job: Job, gold, kind: str, code: int) -> None:
    job.settings["groups"] = 3
    job.start_lighthouse(*PATIENT)
    job.start_healing(2, steps=STEPS)
    job.launch("g2", f"{kind}:g2:reduce:{AT}", env=restarts(2), **job.heal_options)
    back = job.wait_for(schema.Rejoined, 240, group="g2")
    job.hurry()
    facts = of_the_second_start(job.finish(), "g2", back.pid)
    facts.fault(kind, "reduce", "g2", AT)
    facts.check_healed(STEPS, {"g0": 0, "g1": 0, "g2": 0}, {"g2"}, ("g0", "g1", "g2"))
    facts.near_from(gold(steps=STEPS, warm_up=12), "g2")
    ends = [e for e in facts.all(schema.ProcessEnded) if e.process == "manager g2"]
    assert [e.exit_code for e in ends] == [code, 0]
    assert len({e.incarnation for e in ends}) == 2 and len({e.pid for e in ends}) == 1, "one launcher"
    said = [line for line in facts.said["g2"].splitlines() if "is started again" in line]
    assert len(said) == 1 and said[0].endswith("1 of 2 restarts left"), said
    assert ("was killed by SIGKILL" if kind == "kill" else "left out of the job") in said[0]


WAITS = re.compile(r"torch is imported and waits \(pid (\d+)\)")


@pytest.mark.long
@pytest.mark.timeout(420)
def test_a_lost_group_computes_again_in_a_process_that_waited(job: Job) -> None:
    job.settings["groups"] = 2
    job.start_lighthouse(*PATIENT)
    job.start_healing(1, steps=STEPS)
    launcher = job.launch("g1", env=restarts(2), **job.heal_options)
    first = job.wait_for(schema.Committed, 120, group="g1")
    job.until(
        lambda: WAITS.search(job.said("g1")) is not None, "a process waits", 300
    )  # it imports when nobody else does anything
    warm = int(WAITS.findall(job.said("g1"))[0])
    process = psutil.Process(warm)
    assert process.ppid() == launcher.pid and process.terminal() is None and os.getsid(warm) == warm
    assert not process.net_connections() and not [file.path for file in process.open_files() if file.fd > 2]
    os.kill(first.pid, signal.SIGKILL)
    back = job.wait_for(schema.Rejoined, 240, group="g1")
    assert back.pid == warm
    job.hurry()
    facts = of_the_second_start(job.finish(), "g1", warm)
    facts.check_healed(STEPS, {"g0": 0, "g1": 0}, {"g1"}, ("g0", "g1"))
    assert {e.pid for e in facts.all(schema.Committed, group="g1")} == {first.pid, warm}


def test_no_process_waits_where_none_is_wanted(job: Job) -> None:
    job.start_lighthouse(*PATIENT)
    launcher = job.launch("g0", steps=STEPS, delay=0.02, env={**restarts(2), "LIGHTKEEPER_WARM": "0"})
    job.wait_for(schema.Committed, 120, group="g0", step=300)  # longer than it takes to start one
    below = psutil.Process(launcher.pid).children(recursive=True)
    assert len(below) <= 3, "the rank, what stays behind, and what copies its output"
    launcher.send_signal(signal.SIGTERM)
    assert job.wait("g0") == {"g0": 0}


@pytest.mark.long
@pytest.mark.timeout(420)
def test_ranks_that_waited_find_each_other(tmp_path: Path) -> None:
    """The store's socket reaches rank 0 though it was started long before the socket was there."""
    path = tmp_path / "script.py"
    path.write_text(
        "import sys\nassert 'torch' in sys.modules\nimport torch\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nx = torch.ones(1)\ndist.all_reduce(x)\nassert x.item() == 2\n"
        "dist.destroy_process_group()\n"
    )

    async def run() -> dict[int, int]:
        warm = WarmRanks(2, (str(path),), print, ("torch",))
        ranks = RankProcesses((str(path),), range(2), 2, dict(os.environ), "i", open_rendezvous(2))
        environment, codes = ranks.environment_of(0), dict[int, int]()
        try:
            async with asyncio.timeout(300):
                while not warm.waiting or not all(waits.ready for waits in warm.waiting):
                    await warm.look(environment)
                    await asyncio.sleep(0.1)
            ranks.start(await warm.take(environment))
            ranks.watch(codes.__setitem__)
            async with asyncio.timeout(60):
                while len(codes) < 2:
                    await asyncio.sleep(0.01)
            return codes
        finally:
            warm.close()
            await ranks.close()

    assert asyncio.run(run()) == {0: 0, 1: 0}


def script(job: Job, text: str = DIES) -> str:
    path = job.folder / "script.py"
    path.write_text(text)
    return str(path)


def starts(job: Job) -> list[str]:
    return [line for line in job.said("g0").splitlines() if line.startswith("start ")]


def test_restarts_are_used_up(job: Job) -> None:
    job.start_command("g0", [script(job), "SIGKILL"], env=restarts(2))
    assert job.wait("g0")["g0"] == 137
    assert starts(job) == ["start 0", "start 1", "start 2"]
    assert "is not started again: its 2 restarts are used up" in job.said("g0").splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (DIES, 130),
        (
            "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\n" + DIES.replace("sys.argv[1]", "'SIGTERM'"),
            143,
        ),
        ("print('start', 0, flush=True)\n1 / 0\n", 1),
        ("import sys\nprint('start 0')\nsys.exit(137)\n", 137),
    ],
)
def test_an_end_that_was_asked_for_or_is_the_scripts_own_is_an_end(job: Job, text: str, code: int) -> None:
    job.start_command("g0", [script(job, text), "SIGINT"], env=restarts(3))
    assert job.wait("g0")["g0"] == code
    assert starts(job) == ["start 0"] and "started again" not in job.said("g0")


def test_sigterm_between_two_starts_ends_the_launcher(job: Job) -> None:
    launcher = job.start_command("g0", [script(job), "SIGKILL"], env=restarts(9))
    job.until(lambda: "started again in 8 s" in job.said("g0"), "a pause long enough to be met")
    launcher.send_signal(signal.SIGTERM)
    assert job.wait("g0")["g0"] == 0, "nothing runs, and nobody waits for it"
    assert len(starts(job)) == 6, "the pause was not waited out"


def test_a_notice_between_two_starts_ends_the_launcher(job: Job) -> None:
    notice = job.folder / "notice"
    job.start_command("g0", [script(job), "SIGKILL"], settings={"notice_file": notice}, env=restarts(9))
    job.until(lambda: "started again in 8 s" in job.said("g0"), "a pause long enough to be met")
    notice.write_text("60")
    assert job.wait("g0")["g0"] == 0
    assert len(starts(job)) == 6 and f"is not started: asked to leave ({notice})" in job.said("g0")


def test_a_restart_waits_until_its_folder_can_be_made(job: Job) -> None:
    """As on a full disk: no folder can be made, for a while."""
    text = (
        "import os, shutil\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    shutil.rmtree(os.environ['TMPDIR'])\n"
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as parent:  # a socket's path is bounded
        folder = Path(parent) / "t"
        folder.mkdir()
        env = {**restarts(2), "TMPDIR": str(folder), "LIGHTKEEPER_OUTAGE_BUDGET_S": "60"}
        launcher = job.start_command("g0", [script(job, text + DIES), "SIGKILL"], env=env)
        job.until(lambda: "waits for room for its next start" in job.said("g0"), "its line")
        assert f"cannot make a folder for the group in {folder}: No such file or directory" in job.said("g0")
        assert launcher.poll() is None and starts(job) == ["start 0"]
        folder.mkdir()
        assert job.wait("g0")["g0"] == 137
    assert starts(job) == ["start 0", "start 1", "start 2"], "no restart is used up by the wait"
    assert "Traceback" not in job.said("g0")


def test_no_folder_for_as_long_as_the_outage_budget_is_the_end(job: Job) -> None:
    text = "import os, shutil\nshutil.rmtree(os.environ['TMPDIR'])\n"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as parent:
        folder = Path(parent) / "t"
        folder.mkdir()
        env = {**restarts(2), "TMPDIR": str(folder), "LIGHTKEEPER_OUTAGE_BUDGET_S": "2"}
        job.start_command("g0", [script(job, text + DIES), "SIGKILL"], env=env)
        assert job.wait("g0")["g0"] == 1
    assert job.said("g0").splitlines()[-1].startswith(f"lightkeeper: cannot make a folder for the group in {folder}")
    assert "Traceback" not in job.said("g0") and starts(job) == ["start 0"]


def test_nothing_is_left_of_a_second_start_whose_launcher_is_killed(job: Job, tmp_path: Path) -> None:
    text = (
        "import os, signal, time\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\nos.system('sleep 600 &')\n"
        "print('pid', os.getpid(), flush=True)\ntime.sleep(600)\n"
    )
    launcher = job.start_command("g0", [script(job, text)], env=restarts(1))
    printed = re.compile(r"^pid (\d+)$", re.MULTILINE)
    job.until(lambda: printed.search(job.said("g0")) is not None, "the second start runs")
    rank = int(printed.findall(job.said("g0"))[-1])
    assert psutil.Process(rank).ppid() == launcher.pid
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    job.until(lambda: not job.left_over(), "nothing is left")
