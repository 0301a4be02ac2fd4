"""The lighthouse's log: what is in it survives, what was torn was never said, and one at a time holds it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightkeeper.lighthouse.actions import Activated, Ended, Promised
from lightkeeper.lighthouse.log import JobHistory, LighthouseLog, LogError
from lightkeeper.lighthouse.names import Epoch, Member, Membership, Term


def membership(number: int, base: int | None = None, groups: tuple[str, ...] = ("g0", "g1")) -> Membership:
    term = Term(1, "lh")
    members = tuple(Member(g, "i1", f"{g}:1", (f"{g}:2", f"{g}:3")) for g in groups)
    return Membership(Epoch(number, term), members, None if base is None else Epoch(base, term))


def reopened(folder: Path) -> LighthouseLog:
    log = LighthouseLog(folder)
    log.close()
    return log


def test_what_was_logged_is_read_back_job_by_job(tmp_path: Path) -> None:
    log = LighthouseLog(tmp_path)
    log.append("a", Promised(1))
    log.append("a", Activated(membership(1)))
    slower = replace(membership(2, 1), speeds=(1000, 700))
    log.append("a", Promised(2, slower))
    log.append("b", Promised(7))
    log.close()
    again = reopened(tmp_path)
    assert again.jobs == {"a": JobHistory(2, membership(1), [slower]), "b": JobHistory(7)}


def test_an_activation_drops_what_was_prepared_on_another_base(tmp_path: Path) -> None:
    log = LighthouseLog(tmp_path)
    log.append("a", Promised(2, membership(2, 1)))
    log.append("a", Activated(membership(3)))
    log.close()
    assert reopened(tmp_path).jobs["a"] == JobHistory(3, membership(3), [])


def test_an_end_forgets_the_members_but_not_the_numbers(tmp_path: Path) -> None:
    log = LighthouseLog(tmp_path)
    log.append("a", Promised(4))
    log.append("a", Activated(membership(4)))
    log.append("a", Ended("finished", ok=True))
    log.append("b", Activated(membership(5)))
    log.append("b", Ended("no group is left"))
    log.close()
    jobs = reopened(tmp_path).jobs
    assert jobs["a"] == JobHistory(4, None, [])
    assert jobs["b"] == JobHistory(5, None, [], broken_off=membership(5).epoch), "nobody goes on from that"


def test_every_start_is_a_higher_term_of_the_same_lighthouse(tmp_path: Path) -> None:
    terms = [reopened(tmp_path).term for _ in range(3)]
    assert [term.number for term in terms] == [1, 2, 3]
    assert len({term.lighthouse for term in terms}) == 1
    log = LighthouseLog(tmp_path)
    assert log.rise(50) == Term(50, terms[0].lighthouse)
    log.close()
    assert reopened(tmp_path).term.number == 51


def test_without_a_folder_every_start_is_another_lighthouse() -> None:
    first, second = LighthouseLog(None), LighthouseLog(None)
    assert first.term.number == second.term.number == 1 and first.term.lighthouse != second.term.lighthouse
    first.append("a", Promised(3))
    assert first.jobs["a"].highest == 3


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_taken_off(tmp_path: Path, cut: int) -> None:
    log = LighthouseLog(tmp_path)
    log.append("a", Promised(1))
    log.append("a", Promised(2))
    log.close()
    path = tmp_path / "lighthouse.log"
    path.write_bytes(path.read_bytes()[:-cut])
    log = LighthouseLog(tmp_path)
    assert log.jobs["a"].highest == 1
    log.append("a", Promised(9))
    log.close()
    assert reopened(tmp_path).jobs["a"].highest == 9, "what is appended after the cut must be readable"


def test_a_tail_of_zeros_after_a_power_cut_is_taken_off(tmp_path: Path) -> None:
    log = LighthouseLog(tmp_path)
    log.append("a", Promised(1))
    log.close()
    with open(tmp_path / "lighthouse.log", "ab") as file:
        file.write(b"\0" * 512)
    assert reopened(tmp_path).jobs["a"].highest == 1


MEMBERS = '{"job": "a", "kind": "activated", "membership": {"epoch": [1, 1, "lh"], "base": null, "members": %s}}'


@pytest.mark.parametrize(
    "line",
    [
        "nonsense", "[]", "{}", "17", '{"kind": "term"}', '{"kind": "promised"}', "\udcff", "[" * 100_000,
        '{"kind": "superseded"}', '{"kind": "superseded", "job": [1]}', '{"kind": "superseded", "job": 5}',
        '{"kind": "superseded", "job": "a", "more": ' + "[" * 100_000,
        '{"kind": "term", "number": -1, "lighthouse": "lh"}',
        '{"kind": "term", "number": 9223372036854775808, "lighthouse": "lh"}',
        '{"kind": "term", "number": 9223372036854775807, "lighthouse": "lh"}',
        '{"kind": "term", "number": true, "lighthouse": "lh"}',
        '{"kind": "ended", "job": "a", "reason": 5}',
        MEMBERS % "[]", MEMBERS % "5", MEMBERS % '[["g0", "i1", "g0:1", 7]]', MEMBERS % '[["g0", 1, "g0:1", ["g0:2"]]]',
        MEMBERS % '[["g0", "i1"]]',
    ],
)  # fmt: skip
def test_a_damaged_line_is_told_in_one_line(tmp_path: Path, line: str) -> None:
    reopened(tmp_path)
    reopened(tmp_path)
    path = tmp_path / "lighthouse.log"
    size = path.stat().st_size
    with open(path, "ab") as file:
        file.write(line.encode("utf-8", "surrogateescape") + b"\n")
    reopened_after = path.read_bytes()
    with pytest.raises(LogError, match=rf"is damaged in line 3 \(byte {size}\): ") as raised:
        LighthouseLog(tmp_path)
    assert "\n" not in str(raised.value)
    assert path.read_bytes() == reopened_after, "a damaged log is left as it is"


def test_a_kind_of_a_later_version_is_named(tmp_path: Path) -> None:
    reopened(tmp_path)
    with open(tmp_path / "lighthouse.log", "a") as file:
        file.write('{"job": "a", "kind": "quarantined"}\n')
    with pytest.raises(LogError, match="'quarantined', which this version does not know"):
        LighthouseLog(tmp_path)


def test_another_lighthouse_is_kept_out_until_the_first_ends(tmp_path: Path) -> None:
    log = LighthouseLog(tmp_path)
    with pytest.raises(LogError, match="another lighthouse holds the log"):
        LighthouseLog(tmp_path)
    log.close()
    assert reopened(tmp_path).term.number == 2


def test_the_lock_falls_with_the_process_that_held_it(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from lightkeeper.lighthouse.log import LighthouseLog;"
        "log = LighthouseLog(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120, check=False)
    assert reopened(tmp_path).term.number == 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        LogError, match=r"cannot write the lighthouse log .*file/lighthouse.log: .*; give another --log"
    ):
        LighthouseLog(tmp_path / "file")


def test_it_returns_only_when_the_record_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each fsync the whole record stands in the file, and `append` has not returned yet."""
    seen: list[bytes] = []
    path = tmp_path / "lighthouse.log"
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (seen.append(path.read_bytes()), real(descriptor)))
    log = LighthouseLog(tmp_path)
    assert len(seen) == 1 and b'"term"' in seen[0]
    log.append("a", Promised(1))
    assert len(seen) == 2 and seen[1].endswith(b'"number": 1, "planned": null}\n')
    log.rise(9)
    assert len(seen) == 3 and b'"number": 9' in seen[2]
    log.close()


def test_a_record_that_cannot_be_written_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LighthouseLog(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LogError, match="cannot write the lighthouse log .*: No space left"):
        log.append("a", Promised(1))


def test_a_full_disk_is_one_error_and_what_stands_in_the_log_stays_readable(tmp_path: Path) -> None:
    """What was not taken must not turn up again when the file is closed."""
    code = (
        "import resource, sys; from pathlib import Path; from lightkeeper.lighthouse.actions import Promised;"
        "from lightkeeper.lighthouse.log import LighthouseLog, LogError\n"
        "log = LighthouseLog(Path(sys.argv[1])); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "for number in range(1, 100):\n"
        "    try: log.append('a', Promised(number))\n"
        "    except LogError as error: print(number, error); break\n"
        "log.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], timeout=120, check=True, capture_output=True, text=True
    )
    number, _, said = done.stdout.partition(" ")
    assert "cannot write the lighthouse log" in said and not done.stderr
    assert reopened(tmp_path).jobs["a"].highest == int(number) - 1
