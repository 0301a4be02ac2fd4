"""What can be said of a job before anything is started: a wrong name is told at once, not by a hundred launchers."""

from __future__ import annotations

import difflib
import itertools
import os
import re
import shutil
from pathlib import Path

from lightkeeper.errors import UsageError
from lightkeeper.manager.settings import strange_variables
from lightkeeper.supervisor.jobfile import PLACES, JobFile
from lightkeeper.supervisor.joboptions import check_settings
from lightkeeper.supervisor.notify.settings import Command, is_reference
from lightkeeper.supervisor.preflight.registry import choose
from lightkeeper.wire import split_address

PLACE = re.compile(r"\{\w+\}")


def check_job(job: JobFile) -> list[str]:
    """Looks at what the job file names, from the folder in which it lies.

    Returns:
        Lines about what is wrong and yet hinders no start.

    Raises:
        UsageError: the job cannot run so.
    """
    _check_command(job)
    _check_settings(job)
    _check_run_folder(Path.cwd() / job.run_folder)
    _check_preflight(job.preflight.options)
    for words, key in ((job.requeue, "requeue"), (job.burn_in.command, "[burn_in] command")):
        if words and shutil.which(words[0]) is None:
            raise UsageError(f"{key}: there is no program {words[0]}")
    strange = strange_variables(job.environment)
    return [*([f"[environment]: {strange}"] if strange else []), *_untold(job)]


def _check_command(job: JobFile) -> None:
    for word in job.command:
        near = difflib.get_close_matches(word, PLACES, 1) if PLACE.fullmatch(word) else []
        if near and word not in PLACES:
            raise UsageError(f"command: {word} is filled in by nobody; did you mean {near[0]}?")
    if not job.torchtitan and job.command[0] != "-m" and not Path(job.command[0]).is_file():
        raise UsageError(f"command: there is no script {job.command[0]} in {Path.cwd()}")


def _check_settings(job: JobFile) -> None:
    """As every launcher would, which is told the same."""
    try:
        split_address(job.lighthouse.bind)
        if job.lighthouse.address:
            split_address(job.lighthouse.address)
    except ValueError as error:
        raise UsageError(f"[lighthouse]: {error}") from error
    if job.lighthouse.lease_s >= job.outage_budget_s:
        lease, budget = f"{job.lighthouse.lease_s:g}", f"{job.outage_budget_s:g}"
        raise UsageError(
            f"[lighthouse] lease_s {lease} must be below outage_budget_s {budget}: who waits would give up before the "
            "silent one is left out"
        )
    check_settings(
        job.options, job=job.name, groups=job.groups, minimum=job.minimum, spares=job.spares,
        ranks=job.ranks * job.nodes_per_group, nnodes=job.nodes_per_group, outage_budget_s=job.outage_budget_s,
    )  # fmt: skip


def _check_run_folder(folder: Path) -> None:
    """It need not be there, but it must be possible to make it."""
    there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if not there.is_dir():
        raise UsageError(f"run_folder {folder}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"run_folder {folder}: {there} cannot be written")


def _check_preflight(options: tuple[str, ...]) -> None:
    chosen: dict[str, list[str]] = {"--only": [], "--skip": []}
    for option, names in itertools.pairwise(options):
        if option in chosen:
            chosen[option] += [name for name in names.split(",") if name]
    choose(chosen["--only"], chosen["--skip"])


def _untold(job: JobFile) -> list[str]:
    """By whom nobody will be told."""
    lines = []
    for setting in job.notify:
        if isinstance(setting, Command) and shutil.which(setting.argv[0]) is None:
            lines.append(f"nobody will be told by {setting.via}: there is no such program")
        url = getattr(setting, "url", "")
        if is_reference(url) and url.startswith("env:") and not os.environ.get(url.removeprefix("env:")):
            lines.append(f"nobody will be told by {setting.via}: that variable is not set")
    return lines
