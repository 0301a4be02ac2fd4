"""`lightkeeper run`: a job file, run unattended."""

from __future__ import annotations

import asyncio
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightkeeper.errors import UsageError
from lightkeeper.words import say

if TYPE_CHECKING:
    from lightkeeper.supervisor.jobfile import JobFile

NOTIFY_S_MAX = 30.0


def command(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml", help="What is to run; `init` writes one.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and where.")] = False,
) -> int:
    """Run a job unattended: groups are brought back on good nodes, the job again from its newest checkpoint.

    Ends with 0 if the run is finished, or was ended in good order; with 1 if a human must look.
    """
    from lightkeeper.supervisor.aside import Aside
    from lightkeeper.supervisor.clusters.local import Local
    from lightkeeper.supervisor.jobchecks import check_job
    from lightkeeper.supervisor.jobfile import read_job
    from lightkeeper.supervisor.notify.notifier import Notifier
    from lightkeeper.supervisor.quarantine_file import QuarantineFile
    from lightkeeper.supervisor.service import Service
    from lightkeeper.supervisor.single import Held

    job, base = read_job(job_file), job_file.parent.absolute()
    folder = (base / job.run_folder).resolve()
    aside = Aside(QuarantineFile(base / job.quarantine), job.name)
    os.chdir(base)  # all paths in a job file are relative to it, those of its command too
    for line in check_job(job):
        say(f"lightkeeper: {line}")
    if dry_run:
        return _show(job, folder, aside.excluded(job.nodes))
    with Held(folder):
        notifier = Notifier(job.notify)

        cluster = Local(folder / "nodes", job.nodes, job.budget.orphan_s)
        service = Service(job, folder, cluster, job.nodes, aside, notifier.tell)
        try:
            return asyncio.run(service.run())
        finally:
            notifier.close(NOTIFY_S_MAX)


def _show(job: JobFile, folder: Path, quarantined: dict[str, str]) -> int:
    from lightkeeper.supervisor.launching import launch_argv

    free = [name for name in job.nodes if name not in quarantined]
    for name, why in quarantined.items():
        typer.echo(f"node {name}: gets no work before it is released or has passed a burn-in: {why}")
    per, address = job.nodes_per_group, job.lighthouse.address
    typer.echo(f"lighthouse: {address or f'is started, and listens at {job.lighthouse.bind}'}")
    for number, group in enumerate(job.group_names):
        nodes = free[number * per : (number + 1) * per]
        typer.echo(f"{group} on {', '.join(nodes) if len(nodes) == per else 'no node: it waits for one'}")
        for rank in range(per):
            argv = launch_argv(job, folder, address or "ADDRESS", group, rank)
            typer.echo(f"  lightkeeper {shlex.join(argv[3:])}")
    spare = free[len(job.group_names) * per :]
    typer.echo(f"spare nodes: {', '.join(spare) or 'none'}")
    typer.echo(f"in {folder}; the command runs in {Path.cwd()}")
    return 0


def init(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml", help="Where the example goes.")] = Path("job.toml"),
) -> int:
    """Write a commented example of a job file."""
    from lightkeeper.supervisor.example import EXAMPLE

    try:
        with job_file.open("x", encoding="utf-8") as file:
            file.write(EXAMPLE)
    except FileExistsError as error:
        raise UsageError(f"{job_file} is there already: name another") from error
    except OSError as error:
        raise UsageError(f"cannot write {job_file}: {error.strerror or error}") from error
    typer.echo(f"{job_file}: mend name and command, then: lightkeeper run {job_file} --dry-run")
    return 0
