"""The supervisor's machine: told what happened and when, it says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from lightkeeper.supervisor import actions as a
from lightkeeper.supervisor.attribution import End
from lightkeeper.supervisor.jobfile import JobFile
from lightkeeper.supervisor.machine import Supervisor
from lightkeeper.supervisor.tables import read_table

KILLED = End(code=137, kind="killed", cause="rank 0 was killed by SIGKILL", step=7, confidence=0.9)
RAISED = End(code=1, kind="exception", cause="ValueError: x", step=7, confidence=0.9)
FINISHED = End(code=0, finished=True)


class World:
    """A machine with its clock; actions are remembered by kind."""

    def __init__(self, nodes: int = 4, quarantined: dict[str, str] | None = None, **job: Any) -> None:
        table = {
            "name": "j", "command": ["t.py"], "groups": 3, "minimum": 2, "cluster": {"nodes": nodes},
            "preflight": {"enabled": False}, **job,
        }  # fmt: skip
        self.job = read_table(JobFile, table, "job.toml")
        self.now, self.done = 0.0, list[a.Action]()
        self.machine = Supervisor(self.job, self.job.nodes, quarantined or {}, 0.0)
        self.take(self.machine.start(0.0))

    def take(self, actions: list[a.Action]) -> list[a.Action]:
        self.done += actions
        return actions

    def all(self, kind: type[Any]) -> list[Any]:
        return [action for action in self.done if isinstance(action, kind)]

    def launches(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(one.group, one.nodes) for one in self.all(a.Launch)]

    def ended(self, group: str, end: End, after_s: float = 1.0) -> list[a.Action]:
        self.now += after_s
        self.done.clear()
        return self.take(self.machine.ended(group, end, self.now))

    def passes(self, seconds: float) -> list[a.Action]:
        self.now += seconds
        self.done.clear()
        return self.take(self.machine.tick(self.now))


def test_every_group_gets_a_node_and_the_spare_node_waits() -> None:
    world = World()
    assert isinstance(world.done[0], a.StartLighthouse)
    assert world.launches() == [("g0", ("n0",)), ("g1", ("n1",)), ("g2", ("n2",))]


def test_groups_that_die_together_die_once() -> None:
    world = World(nodes=9)
    for group in ("g0", "g1", "g2"):
        world.ended(group, KILLED, after_s=0.1)
    assert not world.machine.over and not world.machine.stopping and world.machine.attempts.count == 3


def test_a_killed_group_starts_again_on_a_node_that_was_never_suspected() -> None:
    world = World()
    world.ended("g1", KILLED)
    assert world.launches() == [("g1", ("n3",))] and not world.all(a.Exclude)
    world.ended("g1", KILLED)
    assert world.launches() == []  # the second in a row: a pause first
    world.passes(0.5)
    assert world.launches() == []
    world.passes(1.6)
    assert world.launches() == [("g1", ("n1",))]


def test_a_node_that_may_be_to_blame_twice_is_in_quarantine() -> None:
    world = World(nodes=3)
    world.ended("g1", KILLED)
    assert world.launches() == [("g1", ("n1",))]
    world.ended("g1", End(code=137, kind="killed", step=9, cause="again"))
    (excluded,) = world.all(a.Exclude)
    assert excluded.node == "n1" and "2 times" in excluded.reason
    assert [one.kind for one in world.all(a.Tell)] == ["quarantine"]
    (waits,) = world.passes(60)  # no node is left for g1, and two groups are enough
    assert isinstance(waits, a.Note) and waits.fields == {"group": "g1", "reason": "in quarantine: n1"}
    assert world.passes(60) == [], "it is said once"


@pytest.mark.parametrize("end", [
    End(code=1, classified="xid", cause="Xid 79", step=7), End(code=137, node_lost=True, cause="n1: its host ended"),
    End(code=-9, seen=False, kind="silent", cause="silent for 2 s", confidence=0.9),
])  # fmt: skip
def test_a_node_that_is_to_blame_is_in_quarantine_at_once(end: End) -> None:
    world = World()
    world.ended("g1", end)
    assert [one.node for one in world.all(a.Exclude)] == ["n1"] and world.launches() == [("g1", ("n3",))]


def test_quarantined_nodes_get_no_work() -> None:
    assert World(quarantined={"n0": "bad memory"}).launches() == [("g0", ("n1",)), ("g1", ("n2",)), ("g2", ("n3",))]


def test_the_same_failure_at_the_same_step_on_different_nodes_is_the_jobs() -> None:
    world = World()
    world.machine.committed(6)
    world.ended("g1", RAISED)
    world.passes(10)
    world.ended("g1", RAISED)
    world.passes(10)
    world.ended("g1", RAISED)
    (told,) = world.all(a.Tell)
    assert told.kind == "crash_loop" and "step 7" in told.text and "ValueError" in told.text
    assert {one.group for one in world.all(a.Ask)} == {"g0", "g2"} and not world.launches()
    world.ended("g0", End(code=0, asked=True))
    world.ended("g2", End(code=0, asked=True))
    (over,) = world.all(a.Over)
    assert over.code == 1 and "exception" in over.reason


def test_wrong_input_is_not_tried_twice() -> None:
    world = World()
    world.ended("g0", End(code=2, cause="no script"))
    assert world.all(a.Tell) and not world.launches()


def test_attempts_without_progress_end_the_run() -> None:
    world = World(budget={"without_progress": 3, "attempts": 50}, nodes=12)
    world.machine.committed(5)
    for step in range(3):
        world.ended("g1", End(code=1, kind="exception", step=step, cause="x"))
        world.passes(400)
    assert not world.all(a.Over) and world.machine.groups["g1"].state == "at work"
    world.ended("g1", End(code=1, kind="exception", step=9, cause="x"))
    (told,) = world.all(a.Tell)
    assert told.kind == "budget" and "no step beyond 5" in told.text


def test_progress_gives_the_attempts_back() -> None:
    world = World(budget={"without_progress": 2}, nodes=12)
    for step in range(8):
        world.machine.committed(step)
        world.ended("g1", End(code=1, kind="exception", step=step, cause="x"))
        assert not world.all(a.Tell)
        world.passes(400)


def test_a_lost_quorum_starts_the_whole_job_again() -> None:
    world = World()
    world.machine.committed(40)
    world.ended("g0", End(code=105, quorum=True, cause="quorum lost"))
    assert {one.group for one in world.all(a.Finish)} == {"g1", "g2"} and not world.launches()
    world.ended("g1", End(code=137))
    world.ended("g2", End(code=137))
    assert world.launches() == [("g0", ("n0",)), ("g1", ("n1",)), ("g2", ("n2",))]
    assert world.machine.attempts.job_restarts == 1 and not world.all(a.Exclude)


def test_one_group_that_finishes_ends_the_run_also_for_those_in_a_pause() -> None:
    world = World()
    world.ended("g2", KILLED)
    world.ended("g2", KILLED)
    world.ended("g0", FINISHED)
    assert not world.all(a.Over)
    world.ended("g1", FINISHED)
    (over,) = world.all(a.Over)
    assert over.code == 0 and [one.kind for one in world.all(a.Tell)] == ["finished"]


def test_who_was_taken_in_and_could_not_follow_is_started_again_and_no_node_is_blamed() -> None:
    world = World(nodes=3)
    for _ in range(3):
        world.ended("g1", End(code=104, kind="behind", cause="it lost the entries", confidence=0.9))
        world.passes(60)
        assert world.machine.groups["g1"].nodes == ("n1",)
        assert not world.all(a.Exclude) and not world.all(a.Tell)
    assert world.machine.pool.nodes["n1"].strikes == 0


def test_who_left_as_asked_comes_back_and_nobody_is_blamed() -> None:
    world = World(nodes=3)
    world.ended("g1", End(code=0, asked=True, cause="drained by ann"))
    assert world.launches() == [("g1", ("n1",))] and world.machine.attempts.count == 0


def test_an_operator_ends_the_run_with_0_and_nothing_is_started_any_more() -> None:
    world = World()
    world.done.clear()
    world.take(world.machine.stop("SIGTERM", 5.0))
    assert {one.group for one in world.all(a.Ask)} == {"g0", "g1", "g2"}
    for group in ("g0", "g1", "g2"):
        world.ended(group, End(code=0, asked=True))
    (over,) = world.all(a.Over)
    assert over.code == 0 and "SIGTERM" in over.reason and not world.all(a.Tell)


def test_a_rejected_node_costs_no_attempt() -> None:
    world = World(preflight={"enabled": True})
    assert [(one.node, one.group) for one in world.all(a.Check)] == [("n0", "g0"), ("n1", "g1"), ("n2", "g2")]
    world.take(world.machine.checked("n0", "g0", "", "", 1.0))
    world.done.clear()
    world.take(world.machine.checked("n1", "g1", "disk: 1 GiB free", "e", 1.0))
    assert [one.node for one in world.all(a.Exclude)] == ["n1"]
    assert [(one.node, one.group) for one in world.all(a.Check)] == [("n3", "g1")] and not world.launches()
    world.take(world.machine.checked("n3", "g1", "", "", 2.0))
    assert world.launches() == [("g1", ("n3",))] and world.machine.attempts.count == 0


def test_a_node_that_is_lost_in_preflight_is_replaced() -> None:
    world = World(preflight={"enabled": True})
    world.done.clear()
    world.take(world.machine.node_lost("n0", "its host ended", 1.0))
    assert [(one.node, one.group) for one in world.all(a.Check)] == [("n3", "g0")]
    world.take(world.machine.checked("n0", "g0", "", "", 2.0))
    assert not world.launches()


def test_no_node_left_ends_the_run_and_somebody_is_told() -> None:
    world = World(nodes=3, burn_in={"enabled": False})
    xid = End(code=1, classified="xid", cause="Xid 79")
    world.ended("g0", xid)
    world.ended("g1", xid)
    world.ended("g2", xid)
    assert "quorum_lost" in [one.kind for one in world.all(a.Tell)]
    (over,) = world.all(a.Over)
    assert over.code == 1 and "no node is left" in over.reason


def test_the_time_limit_asks_all_to_leave() -> None:
    world = World(budget={"time_limit_s": 100})
    world.passes(99)
    assert not world.all(a.Ask)
    world.passes(1)
    assert len(world.all(a.Ask)) == 3


def test_a_lighthouse_that_ended_is_started_again() -> None:
    world = World()
    assert [type(one) for one in world.machine.lighthouse_ended(3.0)] == [a.StartLighthouse]


def test_who_does_not_end_in_good_order_is_ended_in_time() -> None:
    world = World(outage_budget_s=10.0)
    world.take(world.machine.stop("SIGTERM", 5.0))
    world.ended("g0", End(code=0, asked=True))
    world.passes(59)
    assert not world.all(a.Finish)
    world.passes(6)
    assert {one.group for one in world.all(a.Finish)} == {"g1", "g2"}
    world.ended("g1", End(code=137))
    world.ended("g2", End(code=137))
    (over,) = world.all(a.Over)
    assert over.code == 0 and not world.all(a.Exclude)


def test_what_no_node_can_pass_puts_none_into_quarantine() -> None:
    """A typing error in what preflight is asked would cost all nodes."""
    world = World(preflight={"enabled": True})
    for node, group in (("n0", "g0"), ("n1", "g1"), ("n2", "g2"), ("n3", "g0")):
        world.take(world.machine.checked(node, group, "disk: /nowhere: No such file or directory", "", 1.0))
    assert not world.all(a.Exclude)
    (told,) = world.all(a.Tell)
    assert told.kind == "quorum_lost" and "/nowhere" in told.text and world.all(a.Over)[0].code == 1


def test_who_failed_before_one_passed_is_in_quarantine_then() -> None:
    world = World(preflight={"enabled": True})
    world.take(world.machine.checked("n1", "g1", "matmul: wrong product", "e", 1.0))
    assert not world.all(a.Exclude)
    world.take(world.machine.checked("n0", "g0", "", "", 2.0))
    assert [one.node for one in world.all(a.Exclude)] == ["n1"]


XID = End(code=1, classified="xid", cause="Xid 79", confidence=0.9)


def test_a_node_in_quarantine_is_burned_in_and_gets_work_again() -> None:
    world = World(nodes=3)
    world.ended("g1", XID)
    assert [one.node for one in world.all(a.BurnIn)] == ["n1"] and not world.launches() and not world.machine.over
    world.passes(1)
    assert not world.all(a.BurnIn), "it is being tried"
    world.take(world.machine.burned_in("n1", True, "passed", world.now))
    assert world.launches() == [("g1", ("n1",))]


def test_a_burn_in_that_fails_leaves_no_node_and_the_run_ends() -> None:
    world = World(nodes=1, groups=1, minimum=1)
    world.ended("g0", XID)
    assert not world.all(a.Over), "the burn-in may bring it back"
    world.take(world.machine.burned_in("n0", False, "round 1: ecc", world.now))
    (over,) = world.all(a.Over)
    assert over.code == 1 and "no node is left: n0 (Xid 79)" in over.reason


def test_a_lost_node_is_burned_in_once_it_is_there_again() -> None:
    world = World()
    world.take(world.machine.node_lost("n1", "its host ended", 1.0))
    world.ended("g1", End(code=-9, node_lost=True, cause="n1: its host ended"))
    assert not world.all(a.BurnIn) and world.launches() == [("g1", ("n3",))]
    world.take(world.machine.node_came("n1", 2.0))
    assert [one.node for one in world.all(a.BurnIn)] == ["n1"]


def test_what_an_earlier_run_put_aside_is_burned_in_at_the_start() -> None:
    assert [one.node for one in World(quarantined={"n0": "Xid 79"}).all(a.BurnIn)] == ["n0"]
    assert not World(quarantined={"n0": "Xid 79"}, burn_in={"enabled": False}).all(a.BurnIn)


def test_what_no_node_can_pass_is_not_burned_in_either() -> None:
    world = World(nodes=3, preflight={"enabled": True})
    world.take(world.machine.checked("n0", "g0", "disk", "", 1.0))
    assert not world.all(a.BurnIn)
    world.take(world.machine.checked("n1", "g1", "", "", 1.0))
    assert [one.node for one in world.all(a.BurnIn)] == ["n0"], "it is the node, since another one passed"


def test_a_drained_node_is_left_in_good_order_and_its_group_goes_elsewhere() -> None:
    world = World()
    world.take(world.machine.node_leaving("n1", "drained", 1.0))
    assert [(one.group, one.why) for one in world.all(a.Ask)] == [("g1", "n1 is to be left: drained")]
    assert not world.take(world.machine.node_leaving("n1", "drained", 1.5)), "it was asked"
    world.ended("g1", End(code=0, asked=True))
    assert world.launches() == [("g1", ("n3",))] and world.machine.attempts.count == 0 and not world.all(a.Exclude)
    world.ended("g2", KILLED)
    world.passes(1)
    assert world.launches() == [] or ("g2", ("n1",)) not in world.launches(), "no work while it is drained"
    world.take(world.machine.node_came("n1", world.now))
    assert world.machine.pool.nodes["n1"].leaving == ""


def test_a_node_that_is_drained_in_preflight_is_replaced() -> None:
    world = World(preflight={"enabled": True})
    world.done.clear()
    world.take(world.machine.node_leaving("n0", "drained", 1.0))
    assert [(one.node, one.group) for one in world.all(a.Check)] == [("n3", "g0")] and not world.all(a.Ask)


def test_a_person_may_put_nodes_aside_and_release_them_while_it_runs() -> None:
    world = World(nodes=4)
    world.take(world.machine.quarantine_is({"n3": "cable", "n0": "fan"}, 1.0))
    assert not world.all(a.Finish) and not world.all(a.Ask), "who is at work stays"
    world.ended("g1", End(code=-9, node_lost=True, cause="gone"))
    assert not world.launches(), "n3 gets no work"
    world.take(world.machine.quarantine_is({"n0": "fan", "n1": "gone"}, 2.0))
    assert world.launches() == [("g1", ("n3",))]


@pytest.mark.parametrize("again", [False, True])
def test_only_a_run_whose_time_is_over_is_put_back(again: bool) -> None:
    world = World()
    world.take(world.machine.stop("notice (SIGUSR1)" if again else "SIGTERM", 1.0, again=again))
    for group in ("g0", "g1", "g2"):
        world.ended(group, End(code=0, asked=True))
    assert len(world.all(a.Requeue)) == int(again)
    (over,) = world.all(a.Over)
    assert over.code == 0


def test_a_finished_run_is_not_put_back() -> None:
    world = World()
    world.take(world.machine.stop("notice (SIGUSR1)", 1.0, again=True))
    for group in ("g0", "g1", "g2"):
        world.ended(group, FINISHED)
    assert not world.all(a.Requeue)


def test_who_was_left_out_and_does_not_end_is_ended() -> None:
    world = World(outage_budget_s=60)
    world.machine.left_out("g1", 1.0)
    world.now = 1.0
    assert not [one for one in world.passes(14.9) if isinstance(one, a.Finish)], "it keeps what is known of its end"
    assert [one.group for one in world.passes(0.2) if isinstance(one, a.Finish)] == ["g1"]
    assert not world.all(a.Launch), "its end comes by itself"
    world.ended("g1", KILLED)
    assert world.launches() == [("g1", ("n3",))]
    assert not [one for one in world.passes(60) if isinstance(one, a.Finish)], "that was its start before"


def test_who_was_started_again_in_place_is_not_ended() -> None:
    world = World(budget={"in_place": 3})
    world.machine.left_out("g1", 1.0)
    world.machine.came_back("g1")
    world.passes(100)
    assert not world.all(a.Finish)


def test_a_node_that_tells_how_its_group_ended_is_not_gone() -> None:
    world = World()
    world.ended("g1", End(code=-9, kind="silent", cause="its manager's stream broke", confidence=0.9))
    assert not world.all(a.Exclude) and world.machine.pool.nodes["n1"].strikes == 1


def test_a_group_in_preflight_leaves_a_node_that_is_put_aside_meanwhile() -> None:
    world = World(preflight={"enabled": True})
    world.take(world.machine.quarantine_is({"n0": "bad fan"}, 1.0))
    assert world.machine.groups["g0"].nodes == ("n3",) and world.all(a.Check)[-1].node == "n3"
    world.take(world.machine.checked("n0", "g0", "", "", 2.0))
    assert not world.launches()


def test_a_group_whose_node_is_no_more_in_the_job_file_is_started_elsewhere() -> None:
    before, after = World(nodes=4), World(nodes=3)
    before.ended("g1", KILLED)
    assert before.launches() == [("g1", ("n3",))]
    machine = Supervisor(after.job, after.job.nodes, {}, 0.0)
    machine.take_up(before.machine.state(), 0.0)
    started = [one for one in machine.start(0.0) if isinstance(one, a.Launch)]
    assert [(one.group, one.nodes) for one in started] == [("g1", ("n1",))] and "n3" not in machine.pool.nodes
