"""What ranks print: unchanged on the launcher's streams, kept in a bounded log, and never in the rank's way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightkeeper.manager import ranklogs
from lightkeeper.manager.ranklogs import RankLogs
from lightkeeper.manager.tee import Log, Writer, write_stream

PRINTS = """
import os, sys
os.write(1, b"out \\xff\\n")
os.write(2, b"error\\n")
"""


def teed(tmp_path: Path, command: list[str], stdout: int | None = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """The copying process over one rank that runs `command`."""
    (out_read, out_write), (error_read, error_write) = os.pipe(), os.pipe()
    rank = subprocess.Popen(command, stdout=out_write, stderr=error_write)
    log = str(tmp_path / "rank.log")
    tee = subprocess.Popen(
        [sys.executable, "-m", "lightkeeper.manager.tee", json.dumps([(out_read, 1, log), (error_read, 2, log)])],
        stdout=stdout, stderr=subprocess.PIPE, pass_fds=(out_read, error_read),
    )  # fmt: skip
    for descriptor in (out_read, out_write, error_read, error_write):
        os.close(descriptor)
    assert rank.wait(timeout=60) == 0, "the rank was held up, or died of it"
    return tee


def test_bytes_go_to_their_stream_and_into_the_log(tmp_path: Path) -> None:
    tee = teed(tmp_path, [sys.executable, "-c", PRINTS])
    out, error = tee.communicate(timeout=60)
    assert (out, error, tee.returncode) == (b"out \xff\n", b"error\n", 0)
    assert sorted((tmp_path / "rank.log").read_bytes().splitlines()) == [b"error", b"out \xff"]


def test_a_stream_that_is_closed_is_not_taken_for_the_log(tmp_path: Path) -> None:
    """`lightkeeper launch ... >&-`: the first file that is opened would be standard output."""
    log, (out_read, out_write) = tmp_path / "log", os.pipe()
    words = json.dumps([(out_read, 1, str(log))])
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "lightkeeper.manager.tee", words]
    tee = subprocess.Popen(command, pass_fds=(out_read,))
    os.close(out_read)
    os.write(out_write, b"on")
    until_s = time.monotonic() + 60
    while not (log.exists() and log.read_bytes()) and time.monotonic() < until_s:
        time.sleep(0.01)
    os.write(out_write, b"ce\n")  # the log is open: now it would be taken for the stream
    os.close(out_write)
    assert tee.wait(timeout=60) == 0 and log.read_bytes() == b"once\n"


def test_lines_are_shown_whole_and_what_is_no_line_is_shown_soon(tmp_path: Path) -> None:
    """Others write to the same stream: two ranks, and the launcher. The rest of a line may be late."""
    script = (
        "import os, time\nos.write(1, b'a')\ntime.sleep(0.01)\nos.write(1, b'b\\nask? ')\ninput()\nos.write(1, b'c')\n"
    )
    patient = "from lightkeeper.manager import tee; tee.LINE_S = 3.0; tee.main()"
    out_read, out_write = os.pipe()
    rank = subprocess.Popen([sys.executable, "-c", script], stdout=out_write, stdin=subprocess.PIPE)
    tee = subprocess.Popen(
        [sys.executable, "-c", patient, json.dumps([(out_read, 1, str(tmp_path / "log"))])],
        stdout=subprocess.PIPE, pass_fds=(out_read,), bufsize=0,
    )  # fmt: skip
    os.close(out_write)
    os.close(out_read)
    assert tee.stdout is not None and rank.stdin is not None
    assert os.read(tee.stdout.fileno(), 100) == b"ab\n"
    assert os.read(tee.stdout.fileno(), 100) == b"ask? "
    rank.stdin.write(b"\n")
    rank.stdin.close()
    assert os.read(tee.stdout.fileno(), 100) == b"c" and tee.wait(timeout=60) == 0 and rank.wait() == 0
    assert (tmp_path / "log").read_bytes() == b"ab\nask? c"


@pytest.mark.parametrize("how", ["closed", "never read"])
def test_an_output_that_nobody_reads_holds_up_no_rank(tmp_path: Path, how: str) -> None:
    """20 MiB, more than may be behind: the rank has ended while nothing was read, and its log is whole."""
    reader, writer = os.pipe()
    if how == "closed":
        os.close(reader)
    tee = teed(tmp_path, ["head", "-c", str(20 << 20), "/dev/zero"], stdout=writer)
    os.close(writer)
    assert tee.wait(timeout=60) == 0
    kept = sum(path.stat().st_size for path in tmp_path.glob("rank.log*"))
    assert kept == 20 << 20
    if how == "never read":
        os.close(reader)


def test_a_writer_that_is_behind_says_what_it_left_out() -> None:
    go, written = threading.Event(), []

    def write(data: bytes) -> None:
        go.wait()
        written.append(data)

    writer = Writer(write, bytes_max=10)
    for data in (b"12345", b"67890", b"lost", b"lost"):
        writer.put(data)
    assert not writer.drained(time.monotonic() + 0.01)
    go.set()
    assert writer.drained(time.monotonic() + 60)
    assert b"".join(written).startswith(b"1234567890") and b"8 bytes are left out here" in b"".join(written)


def test_a_log_begins_anew_when_it_is_full(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "log"), bytes_max=10)
    for data in (b"first 10b.", b"second", b"third"):
        log.write(data)
    assert (tmp_path / "log").read_bytes() == b"third" and (tmp_path / "log.1").read_bytes() == b"second"


def test_a_disk_that_is_full_costs_bytes_which_are_said(tmp_path: Path, monkeypatch) -> None:
    from lightkeeper.manager import tee

    log, full = Log(str(tmp_path / "log")), True
    monkeypatch.setattr(tee, "AGAIN_S", 0.0)
    write = os.write

    def writes(descriptor: int, data: bytes) -> int:
        if full:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(tee.os, "write", writes)
    log.write(b"lost")
    log.write(b"lost too")
    full = False
    log.write(b"there")
    assert (tmp_path / "log").read_bytes() == (
        b"\n[lightkeeper: 12 bytes are left out here: No space left on device]\nthere"
    )


def test_a_closed_stream_is_left_alone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    write = write_stream(writer)
    write(b"nobody reads this")
    os.close(writer)
    write(b"nor is this written to whatever has that number by now")


def test_a_copier_that_is_killed_is_started_again_and_the_rank_goes_on(tmp_path: Path, capfd) -> None:
    """With its only reader the pipe would break, and end the rank by SIGPIPE."""
    goes = tmp_path / "go"
    script = f"import os, time\nprint('before', flush=True)\nwhile not os.path.exists({str(goes)!r}):\n"
    script += "    time.sleep(0.01)\nprint('after', flush=True)\n"

    async def run() -> None:
        logs = RankLogs(tmp_path / "logs", "g0", range(1), "i1")
        out, error = logs.outputs(0)
        rank = subprocess.Popen([sys.executable, "-c", script], stdout=out, stderr=error)
        logs.start()
        while b"before" not in logs.tail(0):
            await asyncio.sleep(0.01)
        first = logs._tee
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        while logs._tee is first:
            await asyncio.sleep(0.01)
        goes.touch()
        assert await asyncio.to_thread(rank.wait, 60) == 0
        await logs.end()
        assert logs.tail(0) == b"before\nafter\n" and logs.tail(0, 3) == b"er\n"

    asyncio.run(asyncio.wait_for(run(), 120))
    printed = capfd.readouterr()
    assert printed.out == "before\nafter\n" and "started again" in printed.err


def test_logs_of_earlier_starts_are_bounded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ranklogs, "KEPT", 2)

    async def run() -> None:
        for number in range(5):
            await RankLogs(tmp_path, "g0", range(1), f"i{number}").end()
            os.utime(tmp_path / f"g0-rank0-i{number}.log", (number, number))

    asyncio.run(run())
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"g0-rank0-i{n}.log" for n in (2, 3, 4)]
