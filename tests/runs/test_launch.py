"""What `lightkeeper launch` starts: the ranks, their own process group, and their exit codes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from harness import OUTAGE_BUDGET_S, Job

GONE_S_MAX = 30.0  # far less than what is left sleeps

COLLECTIVE = """
import json, os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1) * (1 + dist.get_rank())
dist.all_reduce(total)
with open(os.path.join(sys.argv[1], f"reduced-{dist.get_rank()}.new"), "w") as file:
    told = {"sum": float(total), "size": dist.get_world_size(), "pid": os.getpid(), "port": os.environ["MASTER_PORT"]}
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    told["timeout_s"] = backend.options._timeout.total_seconds()
    del backend  # destroyed with the others: its threads would end the process if it outlived them
    json.dump({**told, "threads": torch.get_num_threads()}, file)
os.rename(file.name, file.name[:-4])
if "stay" in sys.argv:
    dist.barrier() if dist.get_rank() else time.sleep(600)
dist.destroy_process_group()
"""


def written(job: Job, text: str) -> str:
    path = job.folder / "script.py"
    path.write_text(text)
    return str(path)


def reduced(job: Job, *ranks: int) -> list[dict]:
    paths = [job.folder / f"reduced-{rank}" for rank in ranks]
    job.until(lambda: all(path.exists() for path in paths), "the ranks have reduced")
    return [json.loads(path.read_text()) for path in paths]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_ranks_of_a_group_find_each_other(job: Job, ranks: int) -> None:
    job.start_command("g0", [written(job, COLLECTIVE), str(job.folder)], settings={"ranks": ranks})
    assert job.wait("g0") == {"g0": 0}, job.said("g0")
    for told in reduced(job, *range(ranks)):
        assert told["sum"] == ranks * (ranks + 1) / 2 and told["size"] == ranks
        assert ranks == 1 or (told["threads"], told["timeout_s"]) == (1, 20 * OUTAGE_BUDGET_S)
    told = [line for line in job.said("g0").splitlines() if "without making a lightkeeper.Manager" in line]
    assert len(told) == 1 and "exit code" not in told[0], "it is no failure, and said once"
    job.until(lambda: not job.left_over(), "nothing is left", GONE_S_MAX)


@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "launcher"])
def test_the_ranks_of_a_group_die_together(job: Job, victim: str) -> None:
    """Rank 1 stands in a collective, rank 0, which serves their store, does not: neither outlives the other."""
    launcher = job.start_command("g0", [written(job, COLLECTIVE), str(job.folder), "stay"], settings={"ranks": 2})
    pids = [told["pid"] for told in reduced(job, 0, 1)]
    os.kill({"rank 0": pids[0], "rank 1": pids[1], "launcher": launcher.pid}[victim], signal.SIGKILL)
    job.until(lambda: all(map(gone, pids)), "both ranks have ended", GONE_S_MAX)
    job.until(lambda: not job.left_over(), "nothing is left", GONE_S_MAX)
    code = job.wait("g0")["g0"]
    if victim == "launcher":
        assert code == -signal.SIGKILL
    else:
        assert code == 137 and f"{victim} was killed by SIGKILL" in job.said("g0")


def test_a_script_that_never_makes_a_manager_hands_its_code_on(job: Job) -> None:
    for name, body, code in (("g0", "import sys\nsys.exit(7)", 7), ("g1", "1 / 0", 1), ("g2", "print('fine')", 0)):
        job.start_command(name, [written(job, body), "x"])
        assert job.wait(name)[name] == code
    assert 'script.py", line 1, in <module>' in job.said("g1") and "bootstrap" not in job.said("g1")
    assert "fine" in job.said("g2")
    told = "without making a lightkeeper.Manager"
    assert [told in job.said(name) for name in ("g0", "g1", "g2")] == [False, False, True]


def test_a_module_is_a_script(job: Job, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "run.py").write_text("import sys\nprint('ran', __name__, sys.argv[1:])\n")
    job.start_command("g0", ["-m", "pack.run", "--x", "-m"], cwd=tmp_path)
    assert job.wait("g0")["g0"] == 0
    assert "ran __main__ ['--x', '-m']" in job.said("g0")


@pytest.mark.parametrize("command", [["missing.py"], ["-m"], ["--nproc-per-node", "2", "x.py"]])
def test_no_script_is_told_in_one_line(job: Job, command: list[str]) -> None:
    job.start_command("g0", command)
    assert job.wait("g0")["g0"] == 2
    assert len(job.said("g0").splitlines()) == 1 and "SCRIPT ARGS" in job.said("g0")


def test_what_the_script_started_ends_with_its_launcher(job: Job) -> None:
    """The kernel ends the rank, but neither its worker nor what has lost its parent already."""
    text = (
        "import os, sys, time\nfrom multiprocessing import get_context\n"
        "if __name__ == '__main__':\n"
        "    get_context('fork').Process(target=time.sleep, args=(600,)).start()\n"
        "    os.system('sleep 600 &')\n"
        "    open(sys.argv[1], 'w').close()\n    time.sleep(600)\n"
    )
    mark = job.folder / "mark"
    launcher = job.start_command("g0", [written(job, text), str(mark)])
    job.until(mark.exists, "the script has forked")
    below = psutil.Process(launcher.pid)
    job.until(  # one look at all processes of a busy machine may miss one
        lambda: len(below.children(recursive=True)) == 4,
        "the rank, its worker, what stays behind, and what copies its output",
    )
    launcher.kill()
    launcher.wait()
    job.until(lambda: not job.left_over(), "nothing is left", GONE_S_MAX)
