"""Another lighthouse takes over, at another place or with an empty disk; or there are two: a job never splits.

Scenarios 1, 3 and 8 of the list.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from facts import Facts, Gold
from harness import Job, names
from outages import ALL, STEPS, check_undisturbed, committed, start_three
from proxy import Proxy

from lightkeeper.events import schema

pytestmark = pytest.mark.usefixtures("dealt_evenly")


def check_rises(facts: Facts) -> None:
    """Epochs only rise, for every manager and over all lighthouses."""
    for group in ALL:
        seen = [e.epoch for e in facts.all(schema.Activated, process=f"manager {group}")]
        assert seen == sorted(set(seen)), (group, seen)
    steps: dict[int, int] = {}
    for commit in facts.all(schema.Committed):
        assert steps.setdefault(commit.step, commit.epoch) == commit.epoch, f"step {commit.step} in two epochs"


def start_slowly(job: Job, fault: str, groups: int = 3, steps: int = STEPS, delay: float = 0.5) -> None:
    """Returns once step 3 is committed; until the loops are hurried what the fault waits for is many seconds away."""
    job.start_healing(groups, fault, steps=steps, delay=delay, warm_up=0)
    job.wait_for(schema.Committed, 60, group="g0", step=3)


# ---------------------------------------------------------------- at another place


def places(job: Job, how: str, first: str, second: str) -> str:
    """The `lighthouse` setting of groups that are to find the second address after the first."""
    file = job.folder / "lighthouse-at"
    if how == "list":
        return f"{first},{second}"
    file.write_text(first if how == "file" else f"127.0.0.1:1,{first}")
    return f"file:{file}"


def publish(job: Job, how: str, second: str) -> None:
    """A file is replaced in one go, as its writer should."""
    if how != "list":
        fresh = job.folder / "lighthouse-at.new"
        fresh.write_text((second if how == "file" else f"127.0.0.1:1\n{second}") + "\n")
        fresh.rename(job.folder / "lighthouse-at")


@pytest.mark.parametrize(
    "how", ["file", pytest.param("list", marks=pytest.mark.long), pytest.param("list in file", marks=pytest.mark.long)]
)
def test_8_a_fresh_one_at_another_address(job: Job, gold, how: str) -> None:
    """The first is killed and its log deleted; another with an empty disk takes over, and recovers a later death."""
    first = job.start_lighthouse()
    spare = job.start_lighthouse(log="b") if how == "list" else ""
    job.settings["lighthouse"] = places(job, how, first, spare)
    start_slowly(job, "kill:g2:reduce:22")
    job.kill_lighthouse(0)
    for path in (job.folder / "log").iterdir():
        path.unlink()
    publish(job, how, spare or job.start_lighthouse(log="b"))
    took = job.wait_for(schema.TookOver)
    job.hurry()
    facts = job.finish()
    facts.check(STEPS, {"g0", "g1"}, {"g2": -9})
    fault = facts.fault("kill", "reduce", "g2", 22)
    assert took.mono_ns < fault.mono_ns, "it was to take over while nothing was wrong"
    assert {e.epoch for e in facts.all(schema.Committed) if e.mono_ns < fault.mono_ns} == {1}
    assert facts.epochs[-1].epoch > 1 and facts.lost["g2"].detected_by == "manager"
    assert facts.members[-1] == ("g0", "g1")
    check_rises(facts)
    facts.near(gold(steps=STEPS), "g0")


def test_a_standby_is_not_obeyed_by_members_of_a_lighthouse_that_lives(
    job: Job, proxies: Callable[[str], Proxy], calm: Callable[..., dict[int, str]]
) -> None:
    """g1 alone loses the first lighthouse: the standby sends it on until it is back, so the job is never spread."""
    first = job.start_lighthouse()
    spare = job.start_lighthouse(log="b")
    proxy = proxies(first)
    for group in names(3):
        path = proxy.address if group == "g1" else first
        job.settings["groups"] = 3
        slow = {"loop": "healing", "delay": 0.4, "hurry": str(job.folder / "hurry")}
        job.start(group, settings={"lighthouse": f"{path},{spare}"}, steps=STEPS, **slow)
    job.wait_for(schema.Committed, 60, group="g0", step=3)
    proxy.cut()
    job.until(lambda: "standby: takes over once it has heard g0, g2" in job.said("g1"), "g1 is sent on")
    at = committed(job, "g1")
    job.until(lambda: committed(job, "g1") >= at + 8, "it trains on meanwhile")
    proxy.mend()
    job.until(lambda: f"the lighthouse at {proxy.address} is back" in job.said("g1"), "g1 is back at the first")
    job.hurry()
    facts = job.finish()
    check_undisturbed(facts, calm())
    assert not facts.all(schema.TookOver)


# ---------------------------------------------------------------- a death while it is away


def check_recovered_by_the_standby(facts: Facts, took: schema.TookOver, gold: Callable[..., Gold]) -> None:
    """g2's death in step 12, told by its own manager to the lighthouse that took over."""
    facts.check(STEPS, {"g0", "g1"}, {"g2": -9})
    assert facts.lost["g2"].detected_by == "manager" and took.members == ("g0", "g1", "g2")
    assert facts.epochs[-1].first_step == 12
    check_rises(facts)
    facts.near(gold(steps=STEPS), "g0")


def test_a_death_while_all_are_away_is_told_to_the_standby_by_the_dead_groups_own_manager(job: Job, gold) -> None:
    first, spare = job.start_lighthouse(), job.start_lighthouse(log="b")
    job.settings.update(lighthouse=f"{first},{spare}", outage_budget_s=60)
    os.kill(job.lighthouses[1].pid, signal.SIGSTOP)  # the standby accepts connections and answers nothing
    start_slowly(job, "kill:g2:reduce:12")
    job.kill_lighthouse(0)
    job.hurry()
    job.wait_for(schema.ReduceFailed, 60, group="g0")
    job.until(lambda: "stays for up to 60 s" in job.said("g2"), "g2's manager stays")
    for group in ("g0", "g1"):
        job.until(lambda g=group: "the connection to" in job.said(g) and "is away" in job.said(g), f"{group} says why")
    assert committed(job, "g0") == 11
    os.kill(job.lighthouses[1].pid, signal.SIGCONT)
    took = job.wait_for(schema.TookOver)
    facts = job.finish()
    check_recovered_by_the_standby(facts, took, gold)


def test_a_frozen_lighthouse_is_left_for_the_standby(job: Job, gold) -> None:
    """The one that reigns hangs with its sockets open: a death is recovered by the other, which nobody froze."""
    first, spare = job.start_lighthouse(), job.start_lighthouse(log="b")
    job.settings.update(lighthouse=f"{first},{spare}", outage_budget_s=60)
    start_slowly(job, "kill:g2:reduce:12")
    os.kill(job.lighthouses[0].pid, signal.SIGSTOP)
    job.hurry()
    job.wait_for(schema.ReduceFailed, 60, group="g0")
    took = job.wait_for(schema.TookOver, 60)
    job.wait("g0")
    os.kill(job.lighthouses[0].pid, signal.SIGCONT)
    facts = job.finish()
    check_recovered_by_the_standby(facts, took, gold)


def test_without_a_death_a_frozen_lighthouse_costs_nothing(job: Job, calm: Callable[..., dict[int, str]]) -> None:
    """A freeze of a second breaks no stream; in a longer one all move to the standby while they train on."""
    first, spare = job.start_lighthouse(), job.start_lighthouse(log="b")
    job.settings["lighthouse"] = f"{first},{spare}"
    start_slowly(job, "", steps=120, delay=0.15)
    os.kill(job.lighthouses[0].pid, signal.SIGSTOP)
    time.sleep(1.0)  # the fault: a short one
    os.kill(job.lighthouses[0].pid, signal.SIGCONT)
    at = committed(job, "g0")
    job.until(lambda: committed(job, "g0") >= at + 10, "it trains on")
    assert not any("is not reachable" in job.said(group) for group in names(3))
    os.kill(job.lighthouses[0].pid, signal.SIGSTOP)
    job.wait_for(schema.TookOver)
    os.kill(job.lighthouses[0].pid, signal.SIGCONT)
    job.hurry()
    check_undisturbed(job.finish(60), calm(120), 120)


def test_the_operator_fences_who_cannot_answer(job: Job, gold) -> None:
    """g2 dies with its manager: the standby waits, and says for whom, until the operator speaks."""
    first, spare = job.start_lighthouse(), job.start_lighthouse(log="b")
    at = f"{first},{spare}"
    job.settings.update(lighthouse=at, outage_budget_s=90)  # for as long as the operator takes
    start_slowly(job, "kill-tree:g2:reduce:12")
    job.kill_lighthouse(0)
    job.hurry()
    job.wait_for(schema.ReduceFailed, 60, group="g0")
    job.until(lambda: "standby: takes over once it has heard g2" in job.said("g0"), "g0 knows what is waited for")

    def told() -> bool:
        status = job.command("status", "--lighthouse", at)
        assert status.returncode == 0 and f"also asked {first}: no lighthouse answers" in status.stdout
        assert "does not reign" in status.stdout
        return "waiting for g2 (this lighthouse may not leave anybody out" in status.stdout

    job.until(told, "status says for whom it waits", 60)
    lives = job.command("fence", "--group", "g0", "--lighthouse", spare)
    assert lives.returncode == 2 and "it lives; end its processes first" in lives.stderr
    assert committed(job, "g0") == 11 and not [e for e in job.events() if isinstance(e, schema.TookOver)]
    job.until(lambda: job.command("fence", "--group", "g2", "--lighthouse", at).returncode == 0, "it is fenced", 60)
    facts = job.finish()
    facts.check(STEPS, {"g0", "g1"}, {"g2": -9})
    by = facts.one(schema.OperatorFenced, group="g2").by
    assert "@" in by and facts.lost["g2"].detected_by == "operator"
    assert facts.epochs[-1].first_step == 12
    assert facts.one(schema.Fenced, group="g2").reason == f"{by} says that its processes are gone"
    check_rises(facts)
    facts.near(gold(steps=STEPS), "g0")


def test_an_outdated_lighthouse_is_neither_shown_nor_obeyed_nor_told(job: Job, gold) -> None:
    """A comes back with the log of epoch 1 while B reigns over g0 and g2: a word against g2 goes nowhere."""
    first, spare = job.start_lighthouse(log="a"), job.start_lighthouse(log="b")
    at = f"{first},{spare}"
    job.settings["lighthouse"] = at
    start_slowly(job, "kill:g1:reduce:12", steps=100, delay=0.3)
    job.kill_lighthouse(0)
    job.wait_for(schema.TookOver)
    job.until(lambda: committed(job, "g0") > 13, "B has left g1 out, and the others go on")
    job.start_lighthouse(log="a", port=int(first.rpartition(":")[2]))
    job.settings["lighthouse"] = at
    shown = job.command("status", "--lighthouse", at)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert f"also asked {first}: knows an older epoch (1); nobody is in touch with it" in lines
    assert any(f" at {spare}, epoch " in line for line in lines)
    alone = job.command("status", "--lighthouse", first, "--run-folder", str(job.folder))
    assert f"the groups are in touch with the lighthouse at {spare}: ask that one" in alone.stdout
    lives = job.command("fence", "--group", "g2", "--lighthouse", at)
    assert lives.returncode == 2 and "it lives" in lives.stderr and "no lighthouse was told anything" in lives.stderr
    useless = job.command("fence", "--group", "g2", "--lighthouse", first)
    assert useless.returncode == 2 and "nobody of this job is in touch with this lighthouse" in useless.stderr
    assert not [e for e in job.events() if isinstance(e, schema.OperatorFenced)]
    job.kill_lighthouse(1)
    job.hurry()
    facts = job.finish()
    facts.check(100, {"g0", "g2"}, {"g1": -9})
    facts.near(gold(steps=100), "g0")


# ---------------------------------------------------------------- two at once


def test_1_two_lighthouses_form_one_membership(job: Job, proxies: Callable[[str], Proxy]) -> None:
    """g2 is led to a second one, and g1 dies: the first goes on by its log, the second waits and says so."""
    job.settings["outage_budget_s"] = 60.0  # for g2, to outlast the others' run
    first, second = job.start_lighthouse(), job.start_lighthouse(log="b")
    proxy = proxies(first)
    file = job.folder / "lighthouse-at"
    file.write_text(proxy.address)
    slow = {"loop": "healing", "delay": 0.4, "hurry": str(job.folder / "hurry")}
    start_three(job, {"g0": first, "g1": first, "g2": f"file:{file}"}, steps=STEPS, **slow)
    for group in names(3):
        job.wait_for(schema.Committed, 60, group=group, step=2)
    fresh = job.folder / "fresh"
    fresh.write_text(second)
    fresh.rename(file)
    proxy.cut()
    job.until(lambda: f"the lighthouse at {second} has taken this group in" in job.said("g2"), "g2 is at the second")
    os.kill(job.trainers["g1"].pid or 0, signal.SIGKILL)
    job.until(lambda: "waiting for g0, g1 (this lighthouse may not leave anybody out" in job.said("g2"), "g2 waits")
    job.hurry()
    job.wait("g0")
    os.kill(job.trainers["g2"].pid or 0, signal.SIGKILL)
    facts = job.finish()
    assert facts.codes == {"g0": 0, "g1": -9, "g2": -9}
    facts.check_whole(STEPS, {"g0"})
    assert max(facts.commits("g0")) == STEPS - 1
    activated = [e for e in facts.epochs if "g2" in e.members]
    assert len(activated) == 1 and not facts.all(schema.TookOver)
    check_rises(facts)


# ---------------------------------------------------------------- names are never reused


def test_3_nothing_under_an_old_name_is_read_after_a_restart_with_an_empty_disk(job: Job) -> None:
    """Four epochs, a lighthouse that knows nothing of them, and poisoned keys under every old name."""
    kills = ",".join(f"kill:g{i}:reduce:{step}" for i, step in ((5, 3), (4, 5), (3, 7)))
    start_slowly(job, kills, 6, steps=50, delay=0.4)
    job.wait_for(schema.Committed, 60, group="g0", step=8)  # all three are in the epoch of three, not g0 alone
    old = max(e.epoch for e in job.events() if isinstance(e, schema.Activated))
    assert old >= 4
    port = job.kill_lighthouse()
    for path in (job.folder / "log").iterdir():
        path.unlink()
    job.start_lighthouse(port=port)
    job.wait_for(schema.TookOver)
    listens = [e.listens for e in job.events() if isinstance(e, schema.ProcessStarted) and e.process == "manager g0"]
    refused = poison(listens[0], old)
    assert refused == old - 1, "a key of an epoch that is over is refused"
    os.kill(job.trainers["g2"].pid or 0, signal.SIGKILL)
    job.hurry()
    facts = job.finish()
    facts.check(50, {"g0", "g1"}, {"g2": -9, "g3": -9, "g4": -9, "g5": -9})
    newest = [e for e in facts.all(schema.Activated) if e.members == ("g0", "g1")]
    assert newest and all(e.epoch > old for e in newest)
    check_rises(facts)


def poison(manager: str, newest: int) -> int:
    """Sets the keys with which a group of every epoch up to the newest is formed; how many were refused."""
    import grpc
    from harness import TOKEN

    from lightkeeper.protos import manager_pb2, manager_pb2_grpc
    from lightkeeper.wire import metadata

    refused = 0
    with grpc.insecure_channel(manager) as channel:
        stub = manager_pb2_grpc.ManagerStub(channel)
        for number in range(1, newest + 1):
            for key in ("r0/0", "r0/1", "0"):
                request = manager_pb2.SetKeyRequest(key=key, value=b"poison")
                request.epoch.number = number
                try:
                    stub.SetKey(request, metadata=metadata(TOKEN, "job"), timeout=5)
                except grpc.RpcError as error:
                    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
                    refused += key == "0"
    return refused
