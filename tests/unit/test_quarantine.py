"""Quarantine: who gets no work, who comes back by what, and a file that is whole whatever happens to its writers."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightkeeper.cli.app import run
from lightkeeper.errors import ToldError, UsageError
from lightkeeper.supervisor import quarantine_file
from lightkeeper.supervisor.burn_in import one_round
from lightkeeper.supervisor.quarantine import KEPT_MAX, WEEK_S, Book, BurnIn, NotAllowed, concentration
from lightkeeper.supervisor.quarantine_file import QuarantineFile, book_of, own_serial, plain

DAY = 86400.0


def passed(wall: float) -> BurnIn:
    return BurnIn(wall, True, 3, 1.0)


def failed(wall: float) -> BurnIn:
    return BurnIn(wall, False, 1, 1.0)


# --- who comes back


def test_nobody_returns_without_a_burn_in() -> None:
    book = Book().add("n1", "xid 79", 0.0, evidence="inc/1", job="a")
    assert book.excluded("n1") == "n1 is in quarantine: xid 79" and book.excluded("n2") == ""
    with pytest.raises(NotAllowed, match="has passed no burn-in since it failed"):
        book.release("n1", "ann")
    with pytest.raises(NotAllowed, match="n2 is not in quarantine"):
        book.release("n2", "ann", force="x")
    back = book.burned_in("n1", passed(10.0), since=1)
    assert back.excluded("n1") == "" and back.nodes["n1"].released == "passed a burn-in of 3 rounds"
    assert book.release("n1", "ann", force="new cable").nodes["n1"].released == "by ann: new cable"


def test_two_failures_in_a_week_need_a_person() -> None:
    book = Book().add("n1", "xid 79", 0.0).burned_in("n1", passed(DAY), 1).add("n1", "xid 63", 2 * DAY)
    again = book.burned_in("n1", passed(3 * DAY), 2)
    assert again.excluded("n1"), "it passed, but failed twice in a week"
    assert again.release("n1", "ann").excluded("n1") == "", "it has passed: a person's word is enough"
    assert book.burned_in("n1", passed(1.0 + WEEK_S), 2).excluded("n1") == "", "the first is a week ago"


def test_a_failed_burn_in_is_a_failure() -> None:
    book = Book().add("n1", "slow", 0.0).burned_in("n1", failed(1.0), 1, "burn-in failed: x")
    assert book.nodes["n1"].reason == "burn-in failed: x" and book.nodes["n1"].count == 1
    assert book.burned_in("n1", passed(2.0), 1).excluded("n1")
    with pytest.raises(NotAllowed):
        book.burned_in("n1", passed(2.0), 1).burned_in("n1", failed(3.0), 1).release("n1", "ann")


def test_a_node_that_fails_during_its_burn_in_stays() -> None:
    book = Book().add("n1", "a", 0.0).add("n1", "b", WEEK_S + 1)
    assert book.burned_in("n1", passed(WEEK_S + 2), since=1).excluded("n1")
    assert not book.burned_in("n1", passed(WEEK_S + 2), since=2).excluded("n1")


def test_hardware_is_known_by_its_serial() -> None:
    book = Book().add("n1", "ecc", 0.0, serial="S1")
    assert "known as n1" in book.excluded("renamed", "S1")
    assert book.excluded("n1") and not book.excluded("n1", "S2"), "other hardware has that name now"
    assert book.add("renamed", "ecc", 1.0, serial="S1").nodes["n1"].count == 2
    other = book.add("n1", "slow", 1.0, serial="S2")
    assert other.find("n1", "S2") == other.nodes["n1"] and other.nodes["n1"].count == 1
    assert "known as n1~S1" in other.excluded("renamed", "S1"), "what is known of the first is not lost"


def test_what_is_kept_of_one_node_is_bounded() -> None:
    book = Book()
    for i in range(KEPT_MAX + 10):
        book = book.add("n1", "r" * 9999, float(i))
    node = book.nodes["n1"]
    assert len(node.failures) == KEPT_MAX and node.count == KEPT_MAX + 10 and len(node.reason) == 500


def test_concentration() -> None:
    book = Book()
    for name, times in (("n1", 6), ("n2", 3), ("n3", 1)):
        for i in range(times):
            book = book.add(name, "r", float(i))
    shares = concentration(book.burned_in("n3", failed(9.0), 1).nodes.values())
    assert [(one.name, one.count, round(one.together, 2)) for one in shares] == [
        ("n1", 6, 0.6),
        ("n2", 3, 0.9),
        ("n3", 1, 1.0),
    ]


# --- the file


def test_the_file_holds_all_and_can_be_read_by_a_person(tmp_path: Path) -> None:
    file = QuarantineFile(tmp_path / "q.json")
    assert file.read() == Book()
    with file.change() as held:
        held[0] = held[0].add("n1", "xid 79", 5.0, serial="S").burned_in("n1", passed(6.0), 1)
    text = file.path.read_text()
    assert '"reason": "xid 79"' in text and len(text.splitlines()) > 10
    assert file.read() == held[0] == book_of(plain(held[0]))
    assert not list(tmp_path.glob(".q.json.*"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting property name"),
        ("[]", "must be an object with version 1"),
        ('{"version": 2, "nodes": []}', "must be an object with version 1"),
        ('{"version": 1, "nodes": [{"name": "a"}, {"name": "a"}]}', "a stands there twice"),
        ('{"version": 1, "nodes": [{"nam": "a"}]}', "nodes[0] has no 'nam'"),
        ('{"version": 1, "nodes": [{}]}', "nodes[0]: missing 1 required positional argument: 'name'"),
        ('{"version": 1, "nodes": [{"name": "a", "out": 1}]}', "nodes[0].out must be of type bool"),
        ('{"version": 1, "nodes": [{"name": "a", "failures": [{"wall": "x"}]}]}', "failures[0].wall must be"),
    ],
)
def test_a_file_that_somebody_broke_is_told_and_not_replaced(tmp_path: Path, text: str, said: str) -> None:
    file = QuarantineFile(tmp_path / "q.json")
    file.path.write_text(text)
    with pytest.raises(UsageError) as told, file.change() as held:
        held[0] = held[0].add("n1", "r", 0.0)
    assert said in str(told.value)
    assert file.path.read_text() == text


def test_a_lock_that_is_held_for_long_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine_file, "LOCK_S_MAX", 0.05)
    file = QuarantineFile(tmp_path / "q.json")
    with file.change(), pytest.raises(ToldError, match="somebody has held it"), file.change():
        pass


ADDS = """
import sys, time
from lightkeeper.supervisor.quarantine_file import QuarantineFile
file, name = QuarantineFile(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
for i in range(int(sys.argv[3])):
    with file.change() as held:
        held[0] = held[0].add(name, "r" * 400, float(i))
    print(i, flush=True)
"""


def adding(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", ADDS, str(path), name, str(count)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    writers = [adding(path, name, 40) for name in ("n1", "n2")]
    for writer in writers:
        assert writer.communicate(timeout=60)[0] and writer.returncode == 0
    assert {name: node.count for name, node in QuarantineFile(path).read().nodes.items()} == {"n1": 40, "n2": 40}


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance, path, sure = random.Random(seed), tmp_path / "q.json", 0
    for _ in range(8):
        writer = adding(path, "n1", 100_000)
        assert writer.stdout is not None
        written = 0
        for _ in range(1 + chance.randrange(5)):
            written += writer.stdout.readline() != "ready\n"
        time.sleep(chance.random() * 0.005)  # no wait for anything: a moment within a write
        writer.send_signal(signal.SIGKILL)
        written += len(writer.stdout.read().splitlines())  # not `communicate`, which leaves out what is buffered here
        writer.wait(30)
        sure += written
        found = QuarantineFile(path).read().nodes
        count = found["n1"].count if found else 0
        assert count in (sure, sure + 1), "all that was said to be written, and at most one more"
        sure = count
    with QuarantineFile(path).change() as held:  # the lock went with its holder
        held[0] = held[0].add("n2", "r", 0.0)
    assert not list(tmp_path.glob(".q.json.*")), "what was half-written is swept"


def test_serials(tmp_path: Path) -> None:
    assert own_serial(tmp_path) == ("", f"{tmp_path} has none")
    (tmp_path / "product_serial").write_text("To Be Filled By O.E.M.\n")
    (tmp_path / "board_serial").write_text("0000-0000\n")
    assert own_serial(tmp_path)[0] == ""
    (tmp_path / "product_uuid").write_text("4c4c-0042\n")
    assert own_serial(tmp_path) == ("product_uuid:4c4c-0042", "")


# --- the command


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTKEEPER_QUARANTINE", str(tmp_path / "q.json"))
    return tmp_path / "q.json"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = run(["quarantine", *words])
    told = capsys.readouterr()
    return code, told.out + told.err


def test_commands(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "ls") == (0, f"nobody is in quarantine ({path})\n")
    assert said(capsys, "add", "n1", "--reason", "xid 79", "--evidence", "inc/1")[0] == 0
    code, text = said(capsys, "ls")
    assert "n1  1x" in text and "xid 79 [inc/1]; comes back by a burn-in" in text and "100.0%" in text
    assert "has passed no burn-in" in said(capsys, "release", "n1")[1]
    code, text = said(capsys, "burn-in", "n1", "--here", "--rounds", "2", "--", "sh", "-c", "echo bad fan; exit 3")
    assert code == 1 and "n1 stays in quarantine: round 1: exited 3: bad fan" in text
    code, text = said(capsys, "burn-in", "n1", "--via", "env A=1", "--", "sh", "-c", 'test "$A" = 1')
    assert (
        code == 0 and "round 3 went well" in text and "failed twice in a week: lightkeeper quarantine release" in text
    )
    assert said(capsys, "release", "n1")[0] == 0
    assert said(capsys, "ls")[1].startswith("nobody is in quarantine")
    assert "back by " in said(capsys, "ls", "--all")[1]
    code, text = said(capsys, "ls", "--all", "--json")
    told = json.loads(text)
    assert told["nodes"][0]["burn_ins"][1]["passed"] and told["concentration"][0]["count"] == 1


def test_a_burn_in_brings_back_and_lasts_as_long_as_asked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "add", "n1", "--reason", "slow")
    code, text = said(capsys, "burn-in", "n1", "--here", "--rounds", "1", "--for-s", "0.2", "--json", "--", "true")
    node = json.loads(text)
    assert code == 0 and not node["out"] and node["burn_ins"][0]["rounds"] > 1 and node["burn_ins"][0]["seconds"] >= 0.2
    assert "n1 is not in quarantine" in said(capsys, "burn-in", "n1", "--here", "--", "true")[1]


def test_preflight_is_the_default(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "add", "n1", "--reason", "slow")
    code, text = said(capsys, "burn-in", "n1", "--via", "echo", "--rounds", "1", "--json")
    assert code == 0 and json.loads(text)["burn_ins"][0]["command"] == "echo lightkeeper preflight"


def test_a_round_that_hangs_is_killed_with_all_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    why = one_round(["sh", "-c", f"sleep 100 & echo $! > {pid}.new; mv {pid}.new {pid}; wait"], 0.5)
    assert why == "did not end within 0.5 s"
    left = Path(f"/proc/{pid.read_text().strip()}/stat")
    until_s = time.monotonic() + 10
    while left.exists() and left.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < until_s:
        os.sched_yield()
    assert not left.exists() or left.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("add", "n1", "--reason", " "), "--reason must say why"),
        (("add", "a b", "--reason", "r"), "'a b' is no name of a node"),
        (("burn-in", "n1", "--", "true"), "n1 is not this machine: give --via 'ssh n1', or --here"),
        (("burn-in", "n1", "--here", "--via", "x", "--", "true"), "give one"),
        (("burn-in", "n1", "--here", "--rounds", "0"), "--rounds must be within"),
        (("burn-in", "n1", "--here", "--round-s", "0"), "--round-s must be within"),
        (("release", "n9"), "n9 is not in quarantine"),
        (("release", "n9", "--force", "--file", "x"), "it takes a reason in words, and got --file"),
    ],
)
def test_wrong_input(path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str) -> None:
    code, text = said(capsys, *words)
    assert code == 2 and told in text and len(text.splitlines()) == 1
    assert not path.exists()


def test_this_machine_needs_no_prefix(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = socket.gethostname()
    code, text = said(capsys, "add", name, "--reason", "slow")
    node = QuarantineFile(path).read().nodes[name]
    assert code == 0 and (bool(node.serial) or "without its serial: " in text)
    assert said(capsys, "burn-in", name, "--rounds", "1", "--", "true")[0] == 0
