"""The runner against checks that hang, raise, lie, die and leave something behind; the choice; the command alone."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that the helpers beside it are found
from cli_said import one_line, only_the_token

from lightkeeper.cli import preflight
from lightkeeper.cli.app import run
from lightkeeper.errors import UsageError
from lightkeeper.manager.processes import has_ended, kill_tree
from lightkeeper.supervisor.preflight import floors, registry
from lightkeeper.supervisor.preflight.check import Check
from lightkeeper.supervisor.preflight.gathering import Gathering, Refused
from lightkeeper.supervisor.preflight.request import Request, request_from_json
from lightkeeper.supervisor.preflight.results import Result, failed, from_json, ok, skipped
from lightkeeper.supervisor.preflight.runner import Runner
from lightkeeper.supervisor.preflight.verdict import Report, summary, table

BAD = Check("bad", "misbehaves", 30.0, "preflight_bad")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def made(act: str, *checks: Check, whole_s: float = 60.0, jobs: int = 4) -> list[Result]:
    return Runner(Request(gpu_name=act), jobs, whole_s).run(checks or (BAD,))


def test_a_check_that_hangs_is_ended_with_its_children_and_the_others_are_made(tmp_path: Path) -> None:
    hangs = replace(BAD, name="hangs", limit_s=5.0)
    after = replace(BAD, name="after", module="lightkeeper.supervisor.preflight.checks.disk", after=("hangs",))
    builds_on = replace(after, name="builds on", requires=("hangs",))
    hung, well, lacking = made(f"hang@{tmp_path}", hangs, after, builds_on)
    assert hung.state == "failed" and hung.reason.startswith("hung for ") and hung.reason.endswith("s: do not join")
    assert hung.evidence["printed"] == "about to hang\n"
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2 and all(has_ended(int(pid)) for pid in pids)
    assert (well.state, well.reason) == ("skipped", "no --disk PATH:GIB is given")
    assert lacking.state == "skipped" and lacking.reason.startswith("it builds on the check hangs (failed: hung for")


def test_the_whole_has_a_limit_too(tmp_path: Path) -> None:
    late = replace(BAD, name="late", after=("bad",))
    hung, left = made(f"hang@{tmp_path}", BAD, late, whole_s=1.0)
    assert hung.state == "failed" and hung.reason.startswith("hung for 1 s")
    assert (left.state, left.reason) == ("failed", "no time was left for it within 1 s: do not join")


@pytest.mark.long
def test_a_check_that_sigkill_does_not_end_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it waited in the kernel: the kills have no effect here."""
    monkeypatch.setattr("lightkeeper.supervisor.preflight.runner.kill_tree", lambda pid: [])
    monkeypatch.setattr("lightkeeper.supervisor.preflight.runner.kill_sessions", lambda pids: [])
    monkeypatch.setattr("lightkeeper.supervisor.preflight.runner.KILL_S", 0.1)
    (found,) = made(f"hang@{tmp_path}", replace(BAD, limit_s=6.0))
    assert "(and SIGKILL did not end it: " in found.reason and found.reason.endswith("do not join")
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert not has_ended(pid)
        kill_tree(pid)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("raise", "the check itself failed: RuntimeError: it is not what it says"),
        ("lie", "the check itself failed: AttributeError: 'dict' object has no attribute 'to_json'"),
        ("exit", "the check itself failed: SystemExit: 0"),
        ("die", "the check was killed by SIGSEGV without an answer"),
    ],
)
def test_a_check_that_fails_itself_speaks_against_the_node(act: str, reason: str) -> None:
    (found,) = made(act)
    assert (found.state, found.name) == ("failed", "bad") and found.reason.startswith(reason), found


def test_what_a_check_leaves_behind_is_ended(tmp_path: Path) -> None:
    (found,) = made(f"leave@{tmp_path}")
    assert found.state == "ok"
    pid = int((tmp_path / "pids").read_text())
    assert has_ended(pid)


def test_a_check_is_told_what_those_before_it_found_and_one_that_measures_is_alone() -> None:
    spans: list[str] = []
    checks = [replace(BAD, name="a"), replace(BAD, name="b"), replace(BAD, name="alone", alone=True, after=("a",))]
    runner = Runner(Request(), 4, 60.0, lambda result: spans.append(result.name))
    assert runner.run(checks)[2].reason == "after a"
    assert spans[-1] == "alone" and set(spans) == {"a", "b", "alone"}


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_more_checks_run_at_once_than_is_said(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = []
    start = Runner._start

    def counted(runner: Runner, check: Check) -> None:
        start(runner, check)
        at_once.append(len(runner._running))

    monkeypatch.setattr(Runner, "_start", counted)
    assert len(made("", *(replace(BAD, name=name) for name in "abc"), jobs=jobs)) == 3
    assert max(at_once) == jobs and len(at_once) == 3


def test_names_are_checked_and_what_is_built_on_is_made_too() -> None:
    assert [check.name for check in registry.choose(["facts"], [])] == ["peers", "facts"]
    assert "matmul" not in [check.name for check in registry.choose([], ["matmul"])]
    with pytest.raises(UsageError, match=r"--only: there is no check 'matmull': is matmul meant\?"):
        registry.choose(["matmull"], [])
    with pytest.raises(UsageError, match=r"--skip: there is no check 'xyzzy'; there are gpus, versions"):
        registry.choose([], ["xyzzy"])
    with pytest.raises(UsageError, match="leave no check"):
        registry.choose(["disk"], ["disk"])


def test_all_checks_are_there_and_end_in_time() -> None:
    names = [check.name for check in registry.CHECKS]
    assert len(set(names)) == len(names)
    for number, check in enumerate(registry.CHECKS):
        assert callable(check.look()) and 0 < check.limit_s < 120
        assert set(check.requires) <= set(check.after) <= set(names[:number]), "an order that every node has alike"


def test_values_survive_their_journey() -> None:
    request = Request(nnodes=2, rendezvous="h:1", data=("a",), ports=(1,), disks={"/": 2.0}, floors={"x_gbps": 1.5})
    assert request_from_json(request.to_json()) == request
    result = failed("why", {"a": [1]}, {"x_gbps": 1.5}).named("disk", 0.25)
    assert from_json(result.to_json()) == result
    assert from_json(ok(evidence={"much": "x" * 99_999}).to_json()).evidence == {"left_out": "more than 65536 bytes"}
    for line in ('{"state": "good"}', "{}", "[]", '{"state": "ok", "more": 1}', '{"state": "ok", "figures": 1}'):
        with pytest.raises(ValueError):
            from_json(line)


def test_floors_are_the_lowest_figures_less_a_margin(tmp_path: Path) -> None:
    node, pair = "allreduce_node_gbps", "allreduce_pair_gbps"
    found = floors.floors_from([{node: 10.0, pair: 5.0}, {node: 8.0}])
    assert found == {node: pytest.approx(6.4), pair: pytest.approx(4.0)}
    path = str(tmp_path / "floors.json")
    floors.write_floors(path, found)
    assert floors.read_floors(path) == found
    assert floors.below({node: 6.3, "c_gbps": 0.1}, found) == [f"{node} 6.3 is below its floor 6.4"]
    assert floors.said({"c_gbps": 0.1}, found) == "c_gbps 0.1 (no floor: not judged)"
    for content in ("{", "[]", '{"a": "1"}', '{"a": -1}', '{"a": true}', '{"allreduce_nod_gbps": 1}'):
        Path(path).write_text(content)
        with pytest.raises(UsageError, match="--floors"):
            floors.read_floors(path)


def test_who_was_missing_once_is_not_waited_for_again() -> None:
    table = Gathering(3)
    table.say(0, "a", "peers", 10, None, until=5.0)
    table.say(1, "b", "peers", 11, None, until=99.0)  # the first one's word counts
    assert table.look("peers", 4.9) is None
    assert table.look("peers", 5.0) == {0: 10, 1: 11} and table.missing("peers") == [2]
    table.say(2, "c", "peers", 12, None, until=99.0)
    assert table.look("peers", 6.0) == {0: 10, 1: 11}, "all are told the same"
    table.say(0, "a", "next", 1, None, until=9.0)
    table.say(1, "b", "next", 1, None, until=9.0)
    assert table.look("next", 6.1) == {0: 1, 1: 1} and table.absent == {2: "peers"}
    with pytest.raises(Refused, match="node 0 has come already, as a"):
        table.say(0, "again", "next", 1, None, until=9.0)
    with pytest.raises(Refused, match="there is no node 3 of 3"):
        table.say(3, "d", "next", 1, None, until=9.0)


def test_the_table_says_who_may_join() -> None:
    results = (ok("fine").named("disk", 0.1), failed("broken\x1b[31m").named("matmul", 2.0), skipped("none"))
    nodes = {0: summary("n0", results, {}), 1: summary("n1", results[:1], {}), 2: {"came": False}}
    report = Report(0, "n0", 3.25, results, nodes)
    lines = table(report)
    assert lines[1] == "matmul  failed     2.0 s  broken\\x1b[31m"
    assert lines[3:] == [
        "node 1 (n1) may join",
        "node 2 did not come, or has not ended: do not join it",
        "this node (node 0, n0) must not join: matmul (1 skipped, 1 ok, 1 failed of 3 checks, 3.2 s)",
    ]
    assert not report.may_join and report.fields()["reasons"] == ["matmul: broken\x1b[31m"]
    other = Report(1, "n1", 1.0, results[:1], nodes)
    assert other.may_join and "node 0 (n0) must not join: matmul: broken" in "\n".join(table(other))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    only_the_token(monkeypatch)
    disk = ("preflight", "--only", "disk,checkpoint", "--checkpoint", str(tmp_path))
    assert run([*disk, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["may_join"] and [one["name"] for one in report["results"]] == ["disk", "checkpoint"]
    assert [one["state"] for one in report["results"]] == ["ok", "ok"]
    assert run([*disk, "--disk", f"{tmp_path}:1e8"]) == 1
    said = capsys.readouterr()
    assert "disk        failed" in said.out and "must not join: disk" in said.out
    assert "lightkeeper: preflight: disk failed" in said.err
    facts = tmp_path / "facts.json"
    facts.write_text('{"python": "2.7.18"}')
    assert run(["preflight", "--only", "versions", "--expect", str(facts)]) == 1
    assert "expected 2.7.18" in capsys.readouterr().out
    path = tmp_path / "floors.json"
    assert run([*disk[:2], "storage", *disk[3:], "--storage-mib", "1", "--calibrate", str(path)]) == 0
    assert set(json.loads(path.read_text())) == {"storage_write_alone_gbps", "storage_read_alone_gbps"}
    path.write_text('{"storage_write_alone_gbps": 1e9}')
    capsys.readouterr()
    assert run([*disk[:2], "storage", *disk[3:], "--storage-mib", "1", "--floors", str(path)]) == 1
    assert "is below its floor 1e+09" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "piece"),
    [
        (("--only", "diks"), "is disk meant?"),
        (("--disk", "/tmp"), "give PATH:GIB"),
        (("--link", "eth0:fast"), "give NAME[:GBIT]"),
        (("--nnodes", "2"), "give --rendezvous HOST:PORT"),
        (("--rendezvous", "h:1"), "give --nnodes too"),
        (("--nnodes", "2", "--rendezvous", "h"), "not an address"),
        (("--nnodes", "2", "--rendezvous", "h:1", "--node-rank", "2"), "--node-rank must be within 0..1, got 2"),
        (("--sweep",), "give --nnodes"),
        (("--jobs", "0"), "--jobs must be within"),
        (("--whole-s", "500"), "--whole-s must be within 1..112"),
        (("--wait-s", "99"), "--wait-s must be within"),
        (("--gpus", "-1"), "--gpus must be within"),
        (("--port", "70000"), "--port must be within"),
        (("--expect", "/nonexistent"), "--expect /nonexistent: No such file"),
        (("--floors", "/nonexistent"), "--floors /nonexistent: No such file"),
        (("--calibrate", "/nonexistent/x"), "there is no folder"),
        (("--ranks", "many"), "Invalid value for '--ranks'"),
    ],
)
def test_wrong_words(
    words: tuple[str, ...], piece: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only_the_token(monkeypatch)
    assert run(["preflight", *words]) == 2
    assert piece in one_line(capsys)


def test_there_are_as_many_ranks_as_gpus_unless_it_is_said() -> None:
    asked = [preflight._request(None, None, None, False, given) for given in ({}, {"gpus": 8}, {"gpus": 8, "ranks": 4})]
    assert [request.ranks for request in asked] == [1, 8, 4]


def test_node_0_says_that_it_cannot_listen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    only_the_token(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        assert run(["preflight", "--nnodes", "2", "--rendezvous", where, "--only", "peers"]) == 2
    assert one_line(capsys) == f"--rendezvous {where}: node 0 cannot listen there"


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["preflight", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(registry.CHECKS)
