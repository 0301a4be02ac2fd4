"""What asks a running job to save or to stop: files, the end of the time that there is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightkeeper.checkpoint.names import SAVE, STOP
from lightkeeper.checkpoint.requests import SLURM_END, Asked, Requests, process_age_s
from lightkeeper.errors import UsageError

NOW = 1_800_000_000.0


class Job:
    """A job whose clock stands until it is set."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, list[str]()
        self.wall_s, self.age_s = NOW, 100.0

    def requests(
        self, time_limit_s: float | None = None, end_at: float | None = None, slurm: str | None = None
    ) -> Requests:
        return Requests(
            self.folder, time_limit_s, end_at, {} if slurm is None else {SLURM_END: slurm}, self.said.append,
            lambda: self.wall_s, lambda: self.age_s,
        )  # fmt: skip

    def passes(self, seconds: float) -> None:
        self.wall_s += seconds
        self.age_s += seconds


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made


# ---------------------------------------------------------------- files


def test_files_ask_whatever_they_hold_until_it_is_done(job: Job) -> None:
    requests = job.requests()
    assert requests.poll() == Asked()
    (job.folder / SAVE).touch()
    asked = requests.poll()
    assert (asked.save, asked.stop) == ("the file SAVE", "") and requests.poll() == asked
    (job.folder / STOP).write_bytes(b"\x00" * 100)
    both = requests.poll()
    assert (both.save, both.stop) == ("the file SAVE", "the file STOP")
    requests.honoured(both, [SAVE])
    assert os.listdir(job.folder) == [STOP] and requests.poll().save == ""
    requests.honoured(both)
    assert os.listdir(job.folder) == [] and requests.poll() == Asked() and job.said == []


def test_a_file_that_is_taken_away_asks_no_more(job: Job) -> None:
    requests = job.requests()
    (job.folder / STOP).touch()
    asked = requests.poll()
    (job.folder / STOP).unlink()
    assert requests.poll() == Asked()
    requests.honoured(asked)
    assert job.said == []


def test_a_file_that_was_put_there_anew_meanwhile_asks_again(job: Job) -> None:
    requests = job.requests()
    (job.folder / SAVE).touch()
    asked = requests.poll()
    os.utime(job.folder / SAVE, ns=(1, 1))  # as `touch` does while the save is being written
    requests.honoured(asked)
    again = requests.poll()
    assert again.save == "the file SAVE" and again != asked
    requests.honoured(again)
    assert os.listdir(job.folder) == []


def make_folder(path: Path) -> None:
    path.mkdir()


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [make_folder, make_pipe])
def test_what_is_no_file_asks_for_nothing_and_that_is_said_once(job: Job, make: Callable[[Path], None]) -> None:
    requests = job.requests()
    make(job.folder / STOP)
    assert [requests.poll() for _ in range(3)] == [Asked()] * 3
    assert job.said == [f"{job.folder / STOP} asks for nothing: it is no regular file"]
    (job.folder / STOP).rmdir() if (job.folder / STOP).is_dir() else (job.folder / STOP).unlink()
    assert requests.poll() == Asked()
    (job.folder / STOP).touch()
    assert requests.poll().stop == "the file STOP"
    (job.folder / STOP).unlink()
    requests.poll()
    make(job.folder / STOP)
    assert requests.poll() == Asked() and len(job.said) == 2


def test_a_link_to_a_file_asks_and_one_to_nothing_does_not(job: Job) -> None:
    requests = job.requests()
    (job.folder / "there").touch()
    (job.folder / SAVE).symlink_to(job.folder / "there")
    (job.folder / STOP).symlink_to(job.folder / "nowhere")
    asked = requests.poll()
    assert (asked.save, asked.stop) == ("the file SAVE", "")
    requests.honoured(asked)
    assert sorted(os.listdir(job.folder)) == [STOP, "there"]


@pytest.mark.parametrize("where", ["later", "file/checkpoints"])
def test_a_folder_that_is_not_there_asks_for_nothing(job: Job, where: str) -> None:
    (job.folder / "file").touch()
    job.folder = job.folder / where
    assert job.requests().poll() == Asked() and job.said == []


def test_a_file_that_cannot_be_seen_is_said_once(job: Job) -> None:
    requests = job.requests()
    (job.folder / STOP).symlink_to(job.folder / STOP)  # a loop: as an error of the storage
    assert [requests.poll() for _ in range(3)] == [Asked()] * 3
    assert job.said == [f"{job.folder / STOP} cannot be seen: Too many levels of symbolic links"]


def test_what_cannot_be_removed_asks_again_only_when_it_is_changed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = job.requests()
    (job.folder / STOP).touch()
    asked = requests.poll()

    def refused(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refused)
        requests.honoured(asked)
    told = f"cannot remove {job.folder / STOP}: Permission denied; it asks for nothing more until it is changed"
    assert job.said == [told]
    assert [requests.poll() for _ in range(3)] == [Asked()] * 3
    os.utime(job.folder / STOP, ns=(5, 5))
    again = requests.poll()
    assert again.stop == "the file STOP" and job.said == [told]
    requests.honoured(again)
    assert os.listdir(job.folder) == []


def test_a_poll_costs_one_stat_for_each_file(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, seen = job.requests(time_limit_s=500), list[str]()
    real = os.stat

    def counted(path: Path) -> os.stat_result:
        seen.append(path.name)
        return real(path)

    opened: list[object] = []
    (job.folder / SAVE).touch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", counted)
        patched.setattr("builtins.open", opened.append)
        requests.poll(1.0)
    assert seen == [STOP, SAVE] and opened == []


# ---------------------------------------------------------------- time


def test_the_time_limit_counts_from_the_start_of_the_process_less_what_is_needed(job: Job) -> None:
    requests = job.requests(time_limit_s=3600)
    job.passes(3439)  # it was 100 s old
    assert requests.poll(60.0) == Asked()
    job.passes(1)
    assert requests.poll(60.0).stop == "the time limit of 3600 s"
    assert requests.poll(0.0).stop == "the time limit of 3600 s"  # what is needed became less: it stays
    job.wall_s -= 10_000
    assert requests.poll().stop == "the time limit of 3600 s"


def test_a_wall_clock_that_jumps_means_nothing_to_the_time_limit(job: Job) -> None:
    requests = job.requests(time_limit_s=3600)
    job.wall_s += 100_000
    assert requests.poll() == Asked()


def test_a_wall_time_is_the_end(job: Job) -> None:
    requests = job.requests(end_at=NOW + 50)
    job.passes(39)
    assert requests.poll(10.0) == Asked()
    job.passes(1)
    assert requests.poll(10.0).stop == time.strftime("the end at %Y-%m-%d %H:%M:%S", time.localtime(NOW + 50))


def test_of_two_times_the_first_to_come_counts(job: Job) -> None:
    first, second = job.requests(time_limit_s=120, end_at=NOW + 50), job.requests(time_limit_s=500, end_at=NOW + 50)
    job.passes(20)
    assert first.poll().stop == "the time limit of 120 s" and second.poll() == Asked()
    job.passes(30)
    assert first.poll().stop == "the time limit of 120 s" and second.poll().stop.startswith("the end at ")


def test_slurms_end_asks_this_group_to_leave_whatever_else_is_given(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    end = f"{NOW + 50:.0f}"
    found, given = job.requests(slurm=end), job.requests(60_000, slurm=end)
    monkeypatch.setenv(SLURM_END, end)
    of_the_process = Requests(job.folder, wall=lambda: job.wall_s, age_s=lambda: job.age_s)
    assert found.poll(49.0) == Asked()
    job.passes(50)
    why = time.strftime("Slurm's end of its time at %Y-%m-%d %H:%M:%S", time.localtime(NOW + 50))
    assert found.poll() == given.poll() == of_the_process.poll() == Asked(leave=why)
    assert job.said == []


@pytest.mark.parametrize("value", ["soon", "nan", "inf", "0", f"{NOW - 101:.0f}", "1e300"])
def test_a_variable_that_holds_no_later_time_is_said_and_no_limit_follows(job: Job, value: str) -> None:
    requests = job.requests(slurm=value)
    assert job.said == [
        f"SLURM_JOB_END_TIME is '{value}', no time after the start of this process: no time limit follows"
    ]
    job.passes(1e9)
    assert requests.poll(1e9) == Asked()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"time_limit_s": 0.0}, "time_limit_s 0.0: give seconds, more than 0"),
        ({"time_limit_s": -1.0}, "time_limit_s -1.0: give seconds, more than 0"),
        ({"time_limit_s": float("nan")}, "time_limit_s nan: give seconds, more than 0"),
        ({"time_limit_s": float("inf")}, "time_limit_s inf: give seconds, more than 0"),
        ({"end_at": 3600.0}, "end_at 3600.0: give seconds since 1970 that this process begins before"),
        ({"end_at": float("nan")}, "end_at nan: give seconds since 1970 that this process begins before"),
    ],
)
def test_a_time_that_is_none_is_refused(job: Job, words: dict[str, float], why: str) -> None:
    with pytest.raises(UsageError) as told:
        job.requests(**words)
    assert str(told.value) == why


def test_the_age_is_that_of_the_process(tmp_path: Path) -> None:
    """Of a child with an awkward name, which tells its own between two looks at the clock."""
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    code = (
        "import time; open('/proc/self/comm', 'w').write('a) S (b')\n"
        "from lightkeeper.checkpoint.requests import process_age_s\n"
        "print(process_age_s(), time.clock_gettime(time.CLOCK_BOOTTIME))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    age_s, at = map(float, done.stdout.split())
    assert before - 0.02 <= at - age_s <= at  # it was born after we looked, in ticks of a hundredth
    assert process_age_s() > age_s - (at - before)
