"""The lighthouse is away, and comes back, or one of its links is cut: training goes on without a missed step.

Scenarios 2 and 69 of the list, and the cuts of a single control link.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable

import pytest
from harness import Job
from outages import ALL, STEPS, check_undisturbed, committed, start_three
from proxy import Proxy

from lightkeeper.events import schema

pytestmark = pytest.mark.usefixtures("dealt_evenly")


# ---------------------------------------------------------------- away, and back at the same place


@pytest.mark.parametrize(
    "away_s", [0.0, pytest.param(5.0, marks=pytest.mark.long), pytest.param(30.0, marks=pytest.mark.long)]
)
def test_2_killed_and_restarted(job: Job, calm: Callable[..., dict[int, str]], away_s: float) -> None:
    """With its log, after so long: nobody ends, no step is lost or done twice, and the bits are the same."""
    steps = {0.0: STEPS, 5.0: 80, 30.0: 240}[away_s]
    job.start_healing(3, steps=steps, delay=0.15 if away_s else 0.3, warm_up=0)  # who has ended finds nobody again
    job.wait_for(schema.Committed, 60, group="g0", step=5)
    port = job.kill_lighthouse()
    before = committed(job, "g0")
    job.until(lambda: committed(job, "g0") >= before + away_s / 0.25, "the run goes on without it", 60)
    job.start_lighthouse(port=port)
    job.until(lambda: all("is back" in job.said(g) for g in ALL), "all have found it again")
    job.hurry()
    facts = job.finish(90)
    check_undisturbed(facts, calm(steps), steps)


def test_a_manager_that_slept_through_a_lease_goes_on_by_the_members_word(
    job: Job, calm: Callable[..., dict[int, str]]
) -> None:
    """No lighthouse can tell it whether its epoch still stands, but the others can."""
    job.start_healing(3, steps=60, delay=0.2, warm_up=0)
    job.wait_for(schema.Committed, 60, group="g0", step=5)
    port = job.kill_lighthouse()
    manager = job.manager_pid("g1")
    os.kill(manager, signal.SIGSTOP)
    time.sleep(2.5)  # the fault: longer than the lease
    stood = committed(job, "g0")
    os.kill(manager, signal.SIGCONT)
    job.until(lambda: committed(job, "g0") >= stood + 10, "the run goes on without a lighthouse")
    job.start_lighthouse(port=port)
    job.until(lambda: all("is back" in job.said(g) for g in ALL), "all have found it again")
    job.hurry()
    check_undisturbed(job.finish(60), calm(60), 60)


def test_who_stands_for_a_frozen_group_without_a_lighthouse_names_it_and_gives_up(job: Job) -> None:
    """No connection breaks, and nobody may leave g2 out: after the outage budget g0 and g1 end, and say for whom."""
    job.settings["outage_budget_s"] = 5
    job.start_healing(3, fault="freeze-tree:g2:reduce:12", steps=STEPS, delay=0.5)
    job.wait_for(schema.Committed, 60, group="g0", step=3)
    job.kill_lighthouse()
    job.hurry()  # before that the freeze is steps of a second away
    job.wait_for(schema.FaultInjected)
    who = "no answer from the manager of g2"
    for group in ("g0", "g1"):
        job.until(lambda g=group: who in job.said(g), f"{group} says for whom it stands", 60)
        job.wait(group)
        end = next(line for line in job.said(group).splitlines() if "exit code 105" in line)
        assert who in end and "longer than the outage budget" in end, "also if the other gave up first"
    assert committed(job, "g0") == 11
    os.kill(job.manager_pid("g2"), signal.SIGCONT)
    os.kill(job.trainers["g2"].pid or 0, signal.SIGCONT)
    facts = job.finish()
    facts.fault("freeze-tree", "reduce", "g2", 12)
    assert 0 not in facts.codes.values()


# ---------------------------------------------------------------- what the operator sees


def test_status_without_a_lighthouse(job: Job) -> None:
    job.start_healing(3, fault="kill-tree:g2:reduce:28", steps=STEPS, delay=0.5, settings={"outage_budget_s": 60})
    job.wait_for(schema.Committed, 60, group="g0", step=2)
    job.kill_lighthouse()
    at = committed(job, "g0")
    job.until(lambda: committed(job, "g0") > at, "it trains on")
    alone = job.command("status", "--lighthouse", job.lighthouse)
    assert alone.returncode == 1 and f"no lighthouse answers at {job.lighthouse}" in alone.stderr
    assert "--manager HOST:PORT or --run-folder DIR" in alone.stderr
    runs = job.command("status", "--lighthouse", job.lighthouse, "--run-folder", str(job.folder))
    assert runs.returncode == 0 and f"no lighthouse: {job.lighthouse}" in runs.stdout
    said = next(line for line in runs.stdout.splitlines() if "running on epoch" in line)
    assert "running on epoch 1 at step" in said and int(said.split(" at step ")[1].split(":")[0]) > at
    job.hurry()
    job.wait_for(schema.ReduceFailed, 60, group="g0")
    (listens,) = {e.listens for e in job.events() if isinstance(e, schema.ProcessStarted) and e.process == "manager g1"}

    def stands() -> bool:
        told = job.command("status", "--lighthouse", job.lighthouse, "--manager", listens).stdout
        return "stands at step 28 of epoch 1" in told and "the connection to g2 broke" in told and "from g2" in told

    job.until(stands, "status says that and why the job stands", 40)
    job.start_lighthouse(port=int(job.lighthouse.rpartition(":")[2]))
    facts = job.finish()
    facts.check(STEPS, {"g0", "g1"}, {"g2": -9})


# ---------------------------------------------------------------- cuts


@pytest.mark.parametrize("cut_s", [4.0, pytest.param(30.0, marks=pytest.mark.long)])
def test_a_lost_control_link_costs_nothing(
    job: Job, proxies: Callable[[str], Proxy], calm: Callable[..., dict[int, str]], cut_s: float
) -> None:
    """One of three groups loses the lighthouse for several leases while its data link works."""
    steps = STEPS if cut_s < 10 else 180
    first = job.start_lighthouse()
    proxy = proxies(first)
    slow = {"loop": "healing", "delay": 0.3 if cut_s < 10 else 0.15, "hurry": str(job.folder / "hurry")}
    start_three(job, {"g1": proxy.address}, steps=steps, **slow)
    job.wait_for(schema.Committed, 60, group="g1", step=3)
    proxy.cut()
    at, since = committed(job, "g1"), time.monotonic()
    job.until(lambda: time.monotonic() > since + cut_s, "the cut lasts", cut_s + 5)
    job.until(lambda: committed(job, "g1") >= at + 10, "it trains on")
    job.until(lambda: proxy.refused > 2, "it tries to connect again and again")
    proxy.mend()
    job.until(lambda: "is back" in job.said("g1"), "g1 has found it again")
    job.hurry()
    facts = job.finish(90)
    check_undisturbed(facts, calm(steps), steps)


def test_a_returning_group_begins_no_second_job_while_the_sole_survivor_is_cut_off(
    job: Job, proxies: Callable[[str], Proxy]
) -> None:
    """g0 trains alone and cannot reach the lighthouse, which g1 reaches: one lineage, and g1 joins it in the end."""
    proxy = proxies(job.start_lighthouse())
    job.settings["groups"] = 2
    options = {
        "loop": "healing", "warm_up": 12, "delay": 0.04, "steps": 200, "hurry": str(job.folder / "hurry"),
    }  # fmt: skip
    job.start("g0", settings={"lighthouse": proxy.address}, **options)
    job.heal_options = options
    job.start("g1", fault="kill:g1:reduce:5", **options)
    job.wait_for(schema.Activated, process="manager g0", members=("g0",))
    proxy.cut()
    job.return_of("g1")
    waiting = job.wait_for(schema.Waiting, whom="g0")
    assert "may be training without this lighthouse" in waiting.why
    job.until(lambda: "waiting for g0 (they may be training" in job.said("g1-again"), "g1 says for whom it waits")
    at = committed(job, "g0")
    job.until(lambda: committed(job, "g0") >= at + 10, "g0 trains on alone")
    again = job.trainers["g1-again"].pid
    assert not [e for e in job.events() if isinstance(e, schema.Committed) and e.pid == again]
    proxy.mend()
    job.await_rejoin("g1")
    facts = job.finish()
    facts.check_healed(200, {"g0": 0, "g1": -9, "g1-again": 0}, {"g1"}, ("g0", "g1"))
    changes = [facts.members[0], *(b for a, b in itertools.pairwise(facts.members) if a != b)]
    assert changes == [("g0", "g1"), ("g0",), ("g0", "g1")]


# ---------------------------------------------------------------- away for long


@pytest.mark.long
def test_69_survivors_go_on_and_the_newcomer_comes_a_minute_later_from_another_address(job: Job) -> None:
    job.start_healing(3, fault="kill:g1:reduce:5", delay=0.2, steps=400)
    job.wait("g1")
    since = time.monotonic()
    at = committed(job, "g0")
    job.until(lambda: time.monotonic() > since + 60, "a minute passes", 120)
    job.until(lambda: committed(job, "g0") > at + 60, "the survivors train on", 120)
    job.start("g1", settings={"host": "127.0.0.2"}, **job.heal_options)
    job.await_rejoin("g1", within_s=60)
    facts = job.finish(60)
    facts.check_healed(400, {"g0": 0, "g1": -9, "g1-again": 0, "g2": 0}, {"g1"}, ("g0", "g1", "g2"))
    assert not facts.all(schema.GroupLost, group="g0") and not facts.all(schema.GroupLost, group="g2")
