"""Runs the demo: once with a fault, once without, and compares. Waits by following the event log."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TextIO

import msgspec

from lightkeeper.demo.job import LocalJob
from lightkeeper.demo.options import DemoOptions
from lightkeeper.demo.report import Outcome, Report, build, plain_lines, table
from lightkeeper.demo.view import View
from lightkeeper.errors import RunFolderError, ToldError
from lightkeeper.events import EventLog, follow, read_run
from lightkeeper.events.schema import RunStarted, Waiting

SILENCE_S_MAX = 60.0  # nothing goes on for this long: the run is given up
STARTING_S_MAX = 300.0  # the same before the first epoch, while groups import torch: a busy machine takes minutes
FAILED_S_MAX = 5.0  # how long the others may go on after a group failed that was not broken
LATE_S_MAX = 10.0  # how long a group that was started again may outlive a run that ended before it could join
GONE_S_MAX = 3.0  # how long a group's descendants may take to be gone
FAULT_VARIABLE = "LIGHTKEEPER_FAULT"
JOB = "demo"


def run(options: DemoOptions) -> int:
    """Run the demo and print its table.

    Returns:
        0 if every check holds, else 1.
    """
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        report = _run(options)
    finally:
        signal.signal(signal.SIGTERM, previous)
    _print(report, options.as_json)
    return 0 if report.ok else 1


def _run(options: DemoOptions) -> Report:
    folder = new_folder(options.run_folder)
    stream = sys.stderr if options.as_json else sys.stdout
    victim = _victim(options)
    if options.groups == 1:
        print("one group: it trains, and nothing can heal it", file=stream)
    outcome = train(options, folder, victim, "with fault" if victim else "without fault", stream)
    reference = None
    if victim and not outcome.trouble:
        reference = train(options, folder / "reference", "", "the same run without fault", stream)
    return build(options, outcome, reference)


def _victim(options: DemoOptions) -> str:
    return "" if options.fault == "none" else group_names(options.groups)[1]


def group_names(count: int) -> tuple[str, ...]:
    """g0, g1, ..."""
    return tuple(f"g{index}" for index in range(count))


def new_folder(wanted: Path | None, kind: str = "demo") -> Path:
    """The run's folder, made.

    Args:
        wanted: by the user; None: a new one below ./runs.
        kind: what such a new one is named after.

    Raises:
        RunFolderError: it cannot be made, or already holds a run.
    """
    folder = (wanted or Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    number = 1
    while wanted is None and folder.exists():
        number += 1
        folder = folder.with_name(f"{folder.name.split('.')[0]}.{number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise RunFolderError(f"the run folder {folder} is not empty; give a new one with --run-folder")
    except OSError as error:
        raise RunFolderError(f"cannot make the run folder {folder}: {error.strerror or error}") from None
    return folder


def train(options: DemoOptions, folder: Path, victim: str, what: str, stream: TextIO) -> Outcome:
    """One run of real processes, watched until it ends."""
    names = group_names(options.groups)
    log = EventLog(folder, "demo", job=JOB)
    asked = {name: value for name, value in asdict(options).items() if name not in ("as_json", "run_folder")}
    log.write(RunStarted(settings={**asked, "victim": victim}))
    settings = {"fingerprint-every": "1"}
    title = f"{options.groups} groups, {options.steps} steps of {options.microbatches} microbatches, {what}"
    trouble = ""
    with LocalJob(folder, names, JOB, settings) as job:
        try:
            job.start_lighthouse()
            for name in names:
                job.start_group(name, train_command(options), fault_environment(options, name, victim))
            with View(title, options.steps, stream) as view:
                trouble = watch(job, view, victim)
        except ToldError as error:
            trouble = str(error)
        leftovers = wait_until_gone(job)
        job.stop_lighthouse()
        codes = job.exit_codes()
    log.close()
    return Outcome(read_run(folder).events, codes, leftovers, folder, victim, trouble)


def train_command(options: DemoOptions) -> list[str]:
    """The example's training script and its arguments."""
    import lightkeeper

    script = Path(lightkeeper.__file__).parent / "examples" / "train.py"
    words = [str(script), "--steps", str(options.steps), "--microbatches", str(options.microbatches)]
    return [*words, "--seed", str(options.seed)]


def fault_environment(options: DemoOptions, group: str, victim: str) -> dict[str, str]:
    """The variable that makes the victim break itself inside a reduce, after a quarter of the steps."""
    if group != victim:
        return {}
    return {FAULT_VARIABLE: f"{options.fault}:{group}:reduce:{fault_step(options.steps)}"}


def fault_step(steps: int) -> int:
    """Early enough for the group to come back, late enough for a normal step to be known."""
    return max(1, steps // 4)


def watch(
    job: LocalJob,
    view: View,
    victim: str,
    now: Callable[[], float] = time.monotonic,
) -> str:
    """Follow the event log until every group has ended.

    Args:
        job: the processes.
        view: shows the events.
        victim: the group that is broken, or empty; its launcher starts it again.
        now: the time, seconds.

    Returns:
        Empty, or why the run was given up: a launcher ended with a failure, or nothing goes on.
    """
    heard, failed_at, alone_at = now(), None, None
    for event in follow(job.folder, stop=lambda: not job.running()):
        if event is None:
            view.draw()
        else:
            view.update(event)
            if not isinstance(event, Waiting):  # to say that one waits is not to go on
                heard = now()
        running = job.running()
        others = [group for group in running if group != victim]
        if victim and not others:
            alone_at = now() if alone_at is None else alone_at
            if now() - alone_at > LATE_S_MAX:
                job.stop_group(victim)  # the run is over: it would wait for the others for ever
                break
        failed = job.failed()
        if failed and (others or failed != victim):
            failed_at = now() if failed_at is None else failed_at
            if now() - failed_at > FAILED_S_MAX:
                return describe_failure(job, failed)
        starting = view.state.starting(running)
        limit_s = STARTING_S_MAX if starting else SILENCE_S_MAX
        if now() - heard > limit_s:
            waiting = view.state.waiting or "nobody said for whom it waits"
            if starting:
                waiting = f"{', '.join(starting)} had not finished starting (it imports torch): is the machine busy?"
            return f"nothing went on for {limit_s:g} s at step {view.state.step + 1}: {waiting}"
    failed = job.failed(but=victim)  # whether the victim came back is a line of the table
    return describe_failure(job, failed) if failed else ""


def describe_failure(job: LocalJob, group: str) -> str:
    """One line about a group that ended badly."""
    code = job.exit_codes()[group]
    return f"{group} ended with {code}: {job.last_line(group)} (all of it: {job.folder}/output/{group}.txt)"


def wait_until_gone(job: LocalJob) -> list[str]:
    """What is left of ended groups after a short while."""
    deadline = time.monotonic() + GONE_S_MAX
    while True:
        left = job.leftovers()
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(report.as_dict()).decode() + "\n")
        return
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(table(report))
        return
    for line in plain_lines(report):
        print(line)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
