"""How an operator's command reaches a job: as it is told, else as the folder of a supervised run says."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lightkeeper.cli.options import DEFAULT_LIGHTHOUSE, TOKEN_VARIABLE, require_token
from lightkeeper.errors import RunFolderError, UsageError
from lightkeeper.manager.addresses import FILE
from lightkeeper.supervisor.runfiles import ADDRESS, STATE, TOKEN

VARIABLE = "LIGHTKEEPER_RUN_FOLDER"
DEFAULT_JOB = "job"

RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--run-folder",
        envvar=VARIABLE,
        help="Folder of a supervised run: lighthouse, job and token, unless they are given, are taken from there.",
    ),
]


@dataclass(frozen=True)
class Reach:
    """A job, and who may be asked of it.

    Attributes:
        lighthouse: as `--lighthouse` takes it.
        job: its id.
        token: its token.
    """

    lighthouse: str
    job: str
    token: str


def reach(folder: Path | None, lighthouse: str | None, job: str | None, token_file: Path | None) -> Reach:
    """What was given, by an option or in the environment, else what the folder says, else the defaults.

    Args:
        folder: of the run, None if none is named.
        lighthouse: as given, None if it was not.
        job: as given, None if it was not.
        token_file: as given, None if it was not.

    Raises:
        UsageError: there is no token, or something was not given and nothing in the folder says anything.
    """
    has_token = token_file is not None or bool(os.environ.get(TOKEN_VARIABLE, "").strip())
    if folder is not None and not (has_token and lighthouse is not None and job is not None):
        _check_says_something(folder)
        token_file = token_file if has_token or not (folder / TOKEN).exists() else folder / TOKEN
        supervised = (folder / ADDRESS).exists() or (folder / STATE).exists()
        if lighthouse is None and supervised:
            lighthouse = f"{FILE}{folder / ADDRESS}"
        job = _job(folder) if job is None else job
        if not has_token and token_file is None:
            raise UsageError(f"no job token: {folder} holds none; give --token-file FILE or set {TOKEN_VARIABLE}")
    token = require_token(token_file)
    return Reach(DEFAULT_LIGHTHOUSE if lighthouse is None else lighthouse, DEFAULT_JOB if job is None else job, token)


def _check_says_something(folder: Path) -> None:
    """Whether it is the folder of a run at all.

    Raises:
        UsageError: it is not.
    """
    from lightkeeper.events.reader import events_folder

    if any((folder / name).exists() for name in (TOKEN, ADDRESS, STATE)):
        return
    try:
        events_folder(folder)
    except RunFolderError:
        raise UsageError(
            f"{folder} is not the folder of a run: it holds no {TOKEN}, {ADDRESS}, {STATE} or event log"
        ) from None


def _job(folder: Path) -> str | None:
    """The job's id by the supervisor, else by the newest event that names one."""
    try:
        state = json.loads((folder / STATE).read_bytes())
    except (OSError, ValueError):  # not there yet, or damaged: it is the supervisor's to complain
        state = None
    told = state.get("job") if isinstance(state, dict) else None
    if isinstance(told, str) and told:
        return told
    from lightkeeper.events.reader import read_run

    try:
        return next((event.job for event in reversed(read_run(folder).events) if event.job), None)
    except RunFolderError:
        return None
