"""The supervisor's service over a cluster that starts nothing: what it orders, and what follows when one fails."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import psutil
import pytest
from supervised_job import WITHIN_S, Job, Nodes

from lightkeeper.errors import ToldError, UsageError
from lightkeeper.events import read_run
from lightkeeper.events.of_supervisor import RunEnded
from lightkeeper.events.schema import JobStopped
from lightkeeper.events.writer import EventLog
from lightkeeper.lighthouse.messages import QUORUM_LOST
from lightkeeper.supervisor.clusters.interface import Exited, NodeCame, NodeLeaving
from lightkeeper.supervisor.places import AT_WORK
from lightkeeper.supervisor.requeue import requeue


def test_a_group_whose_node_is_lost_goes_to_another_and_the_lighthouse_too(tmp_path: Path) -> None:
    async def meanwhile(job: Job) -> None:
        await job.until_started(("n2", "lighthouse"), ("n0", "g0"), ("n1", "g1"))
        job.nodes.loses("n2")
        await job.until_started(("n1", "lighthouse"))
        job.nodes.heard(NodeCame("n2"))
        job.nodes.loses("n0")
        await job.until_started(("n2", "g0"))
        job.finish()

    job = Job(tmp_path)
    assert job.run(meanwhile) == 0 and job.nodes.closed is True
    assert job.judged()[0] == ("g0", "node", "node lost") and ("quarantine", "n0: n0: gone") in job.told
    assert job.aside.excluded(["n0", "n1", "n2"]).keys() == {"n0"}


def test_a_quarantine_that_cannot_be_written_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def meanwhile(job: Job) -> None:
        await job.until_started(("n0", "g0"), ("n1", "g1"))
        (tmp_path / "quarantine.json").mkdir()
        job.nodes.loses("n0")
        await job.until_started(("n2", "g0"))
        (tmp_path / "quarantine.json").rmdir()
        job.finish()

    assert Job(tmp_path).run(meanwhile) == 0
    assert "n0 gets no work in this run, but " in capfd.readouterr().err


def test_what_cannot_be_started_is_tried_again_and_blames_no_node(tmp_path: Path) -> None:
    async def meanwhile(job: Job) -> None:
        full = {"n0", "n1", "n2"}
        job.nodes.refuses = lambda node, name: "No space left on device" if node in full and name == "g1" else ""
        await job.until(lambda: len(job.judged()) >= 3)
        full.clear()
        await job.until(lambda: any(name == "g1" for _, name in job.nodes.starts))
        job.finish()

    job = Job(tmp_path, budget={"pause_s": 0.1, "without_progress": 99})
    assert job.run(meanwhile) == 0
    assert set(job.judged()) - {("g0", "nobody", "finished"), ("g1", "nobody", "finished")} == {
        ("g1", "nobody", "not started")
    }
    assert not job.aside.excluded(["n0", "n1", "n2"]) and not job.told[:-1]


def test_what_has_ended_while_nobody_was_there_is_judged(tmp_path: Path) -> None:
    async def first(job: Job) -> None:
        await job.until_started(("n0", "g0"), ("n1", "g1"))
        await asyncio.sleep(0.1)
        raise KeyError("a bug")

    async def second(job: Job) -> None:
        await job.until_started(("n2", "g1"))
        job.finish()

    job = Job(tmp_path)
    with pytest.raises(KeyError):
        job.run(first)
    ended = Exited("n1", "g1", 137)
    later = Job(tmp_path, Nodes([("n0", "g0"), ("n2", "lighthouse"), ("n1", "stranger")], [ended]))
    assert later.run(second) == 0
    assert later.judged()[0] == ("g1", "maybe", "killed")
    assert ("n0", "g0") not in later.nodes.starts and ("n2", "lighthouse") not in later.nodes.starts
    assert ("n1", "stranger") not in later.nodes.running


def test_a_bug_in_the_supervisor_leaves_the_job_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def meanwhile(job: Job) -> None:
        await job.until_started(("n0", "g0"), ("n1", "g1"))
        monkeypatch.setattr(job.service.machine, "tick", lambda now: 1 / 0)
        await asyncio.sleep(WITHIN_S)

    job = Job(tmp_path)
    with pytest.raises(ZeroDivisionError):
        job.run(meanwhile)
    assert job.nodes.closed is False and ("n0", "g0") in job.nodes.running


def test_a_lighthouse_that_never_comes_up_ends_it_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightkeeper.supervisor.lighthouse.PAUSE_S", 0.01)

    async def meanwhile(job: Job) -> None:
        await asyncio.sleep(WITHIN_S)

    nodes = Nodes()
    nodes.refuses = lambda node, name: "no" if name == "lighthouse" else ""
    with pytest.raises(ToldError, match="the lighthouse does not come up"):
        Job(tmp_path, nodes).run(meanwhile)
    assert nodes.closed is True


def test_a_second_word_of_an_operator_ends_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightkeeper.supervisor.service.ONE_WORD_S", 1.0)

    async def meanwhile(job: Job) -> None:
        await job.until_started(("n0", "g0"), ("n1", "g1"))
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # at once, to its process group: the same word
        await job.until(lambda: len(job.nodes.signals) == 2)
        await asyncio.sleep(1.1)
        signal.raise_signal(signal.SIGTERM)

    job = Job(tmp_path)
    assert job.run(meanwhile) == 128 + signal.SIGTERM
    assert {name for _, name, number in job.nodes.signals if number == signal.SIGUSR1} == {"g0", "g1"}


def test_a_requeue_that_fails_is_told_and_is_the_exit_code(tmp_path: Path) -> None:
    async def meanwhile(job: Job) -> None:
        await job.until_started(("n0", "g0"), ("n1", "g1"))
        signal.raise_signal(signal.SIGUSR1)
        await job.until(lambda: len(job.nodes.signals) == 2)
        for node, name in (("n0", "g0"), ("n1", "g1")):
            job.nodes.ends(node, name, 0)

    job = Job(tmp_path, requeue=["sh", "-c", "exit 3"])
    assert job.run(meanwhile) == 1
    (told,) = job.told
    assert told[0] == "failed" and "the run does not go on by itself: sh -c 'exit 3': ended with 3" in told[1]
    assert sorted(job.judged()) == [("g0", "nobody", "left"), ("g1", "nobody", "left")]
    assert [e.code for e in read_run(tmp_path).events if isinstance(e, RunEnded)] == [1]


def test_who_holds_the_quarantine_wrong_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "quarantine.json").write_text("{")
    with pytest.raises(UsageError, match=r"quarantine\.json"):
        Job(tmp_path).run(lambda job: asyncio.sleep(0))


def test_a_lighthouse_that_does_not_answer_is_ended_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightkeeper.supervisor.lighthouse.PROBE_S", 0.01)
    answers = iter([False, False, True, False, False, False])  # one that was only slow is left alone
    silent = lambda self, address: "" if next(answers, True) else "DEADLINE_EXCEEDED"  # noqa: E731
    monkeypatch.setattr("lightkeeper.supervisor.lighthouse.LighthouseProcess._silent", silent)

    async def meanwhile(job: Job) -> None:
        await job.until(lambda: job.nodes.starts.count(("n2", "lighthouse")) == 2)
        await job.until_started(("n0", "g0"), ("n1", "g1"))
        assert next(answers, None) is None, "it was not ended before"
        job.finish()

    assert Job(tmp_path).run(meanwhile) == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"shape": {}, "logs": [], "machine": 3}'])
def test_a_state_that_is_damaged_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "supervisor.json").write_text(text)
    with pytest.raises(ToldError, match=r"supervisor\.json is damaged .*remove it"):
        Job(tmp_path).run(lambda job: asyncio.sleep(WITHIN_S))


def test_a_requeue_that_hangs_is_killed_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightkeeper.supervisor.requeue.REQUEUE_S_MAX", 8.0)
    pids = tmp_path / "pids"
    told = asyncio.run(requeue(["sh", "-c", f"sleep 60 & echo $! > {pids}; sleep 60"], tmp_path / "requeue.log"))
    assert "did not end within 8 s" in told and told.startswith("the run does not go on by itself: ")
    until = time.monotonic() + WITHIN_S
    while not is_gone(int(pids.read_text())):  # a kill takes a moment
        assert time.monotonic() < until, "what it started was killed with it"
        time.sleep(0.01)


def test_a_group_that_waits_for_the_lighthouse_leaves_a_node_that_is_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher is not there yet to be asked: it is not started there at all."""
    monkeypatch.setattr("lightkeeper.supervisor.lighthouse.PAUSE_S", 0.01)

    async def meanwhile(job: Job) -> None:
        await without_lighthouse(job)
        node = job.service.machine.groups["g1"].nodes[0]
        job.nodes.heard(NodeLeaving(node, "maintenance"))
        await job.until(lambda: ("g1", "nobody", "left") in job.judged())
        assert job.reasons("g1")[-1] == "it was called off before it was started"
        job.nodes.refuses = lambda node, name: ""
        await job.until(lambda: [name for _, name in job.nodes.starts].count("g1") == 2)
        assert job.nodes.starts[-1][0] != node
        job.finish()

    assert Job(tmp_path).run(meanwhile) == 0


def test_a_whole_job_restart_ends_a_group_that_waits_for_the_lighthouse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightkeeper.supervisor.lighthouse.PAUSE_S", 0.01)

    async def meanwhile(job: Job) -> None:
        await without_lighthouse(job)
        EventLog(tmp_path, "manager g0", job="j", group="g0", incarnation="i").write(
            JobStopped(ok=False, reason=QUORUM_LOST)
        )
        job.nodes.ends("n0", "g0", 105)
        await job.until(lambda: ("g1", "nobody", "quorum") in job.judged())
        job.nodes.refuses = lambda node, name: ""
        await job.until(lambda: [name for _, name in job.nodes.starts].count("g0") == 2)
        await job.until(lambda: [name for _, name in job.nodes.starts].count("g1") == 2)
        job.finish()

    assert Job(tmp_path).run(meanwhile) == 0


async def without_lighthouse(job: Job) -> None:
    """It ends and cannot be started, and g1, which has ended, waits for it."""
    await job.until_started(("n0", "g0"), ("n1", "g1"))
    job.nodes.refuses = lambda node, name: "no" if name == "lighthouse" else ""
    job.nodes.ends("n2", "lighthouse", -9)
    await job.until(lambda: not job.service._lighthouse.address)
    job.nodes.ends("n1", "g1", 1)
    await job.until(lambda: bool(job.judged()) and "g1" in pending(job))


def pending(job: Job) -> set[str]:
    """Groups that are at work for the machine and have no process."""
    at_work = {name for name, group in job.service.machine.groups.items() if group.state == AT_WORK}
    return at_work - {name for _, name in job.nodes.running}


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_token_that_is_gone_while_groups_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(ToldError, match=r"token is gone, and what runs knows it: put it back"):
        Job(tmp_path, Nodes([("n0", "g0")])).run(lambda job: asyncio.sleep(WITHIN_S))


@pytest.mark.parametrize("address", [None, ""])
def test_a_lighthouse_is_taken_up_by_what_its_log_says(tmp_path: Path, address: str | None) -> None:
    async def first(job: Job) -> None:
        await job.until_started(("n0", "g0"), ("n1", "g1"))
        raise KeyError("a bug")

    async def second(job: Job) -> None:
        await job.until(lambda: job.service._lighthouse.address == "127.0.0.1:1234")
        job.finish()

    with pytest.raises(KeyError):
        Job(tmp_path).run(first)
    file = tmp_path / "lighthouse.address"
    file.unlink() if address is None else file.write_text(address)
    later = Job(tmp_path, Nodes([("n0", "g0"), ("n1", "g1"), ("n2", "lighthouse")]))
    assert later.run(second) == 0 and ("n2", "lighthouse") not in later.nodes.starts


def test_a_run_that_is_stopped_before_its_lighthouse_is_there_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightkeeper.supervisor.lighthouse.FIRST_TRIES_MAX", 99)

    tried: list[str] = []

    async def meanwhile(job: Job) -> None:
        await job.until(lambda: bool(tried))
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(WITHIN_S)

    def refuses(node: str, name: str) -> str:
        tried.append(name)
        return "no" if name == "lighthouse" else ""

    nodes = Nodes()
    nodes.refuses = refuses
    assert Job(tmp_path, nodes).run(meanwhile) == 0


def test_a_preflight_that_cannot_say_why_blames_no_node(tmp_path: Path) -> None:
    async def meanwhile(job: Job) -> None:
        await job.until_started(("n0", "check-g0"), ("n1", "check-g1"))
        job.nodes.ends("n0", "check-g0", 1)  # its log is empty: the disk is full
        job.nodes.ends("n1", "check-g1", 0)
        await job.until_started(("n2", "check-g0"))
        job.nodes.ends("n2", "check-g0", 0)
        await job.until_started(("n2", "g0"), ("n1", "g1"))
        job.finish()

    job = Job(tmp_path, preflight={"enabled": True})
    assert job.run(meanwhile) == 0 and not job.aside.excluded(["n0", "n1", "n2"])


def test_another_jobs_folder_is_refused(tmp_path: Path) -> None:
    async def meanwhile(job: Job) -> None:
        await job.until_started(("n0", "g0"), ("n1", "g1"))
        job.finish()

    assert Job(tmp_path).run(meanwhile) == 0
    other = Job(tmp_path, name="other")
    with pytest.raises(UsageError, match="holds the run of job j, and this is other"):
        other.run(lambda job: asyncio.sleep(WITHIN_S))
    assert other.nodes.closed is True, "nothing ran: nothing is left"
