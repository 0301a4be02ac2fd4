"""`lightkeeper launch`: start one replica group, or its part on this node."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lightkeeper.cli import group
from lightkeeper.cli.options import LaunchOptions, check_count
from lightkeeper.cli.titan import USAGE, command_of
from lightkeeper.errors import UsageError


@group.takes_options
def command(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- SCRIPT [ARGS]...", help="The training script and its arguments; with --torchtitan, those alone."
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            envvar="LIGHTKEEPER_RESTARTS",
            help="Times it starts the group again after a loss (killed, frozen, left out), without ten good minutes in "
            "between.",
        ),
    ] = LaunchOptions.restarts,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm/--no-warm",
            envvar="LIGHTKEEPER_WARM",
            help="Keep a process per rank waiting that has imported torch, for a restart. --restarts 0 needs none.",
        ),
    ] = LaunchOptions.warm,
    log_folder: Annotated[
        str,
        typer.Option(
            envvar="LIGHTKEEPER_LOG_FOLDER",
            help="Keep what the ranks print in this folder. Default: logs in the run's folder, if there is one.",
        ),
    ] = LaunchOptions.log_folder,
    torchtitan: Annotated[
        bool,
        typer.Option(
            "--torchtitan",
            help="Run torchtitan.train on a config of torchtitan's, or of your own, as this group: -- --module llama3 "
            "--config llama3_8b ARGS.",
        ),
    ] = False,
    **given: Any,
) -> int:
    """Start one replica group: its manager and its ranks. Ends with the exit code of its ranks.

    A group on several nodes: the same command on each of them, with its own --node-rank.
    """
    ranks, nnodes = given["ranks"], given["nnodes"]
    if nnodes:  # `--ranks` are a node's, and the settings' those of the group
        given["ranks"] = nnodes * (1 if ranks is None else ranks)
    settings = group.settings(**given)
    if not script:
        raise UsageError(f"no script: {USAGE if torchtitan else 'lightkeeper launch --group g0 ... -- train.py ARGS'}")
    if torchtitan:
        script = [*command_of(script)]
    check_count(restarts, "--restarts", lowest=0)
    from lightkeeper.manager.launch import run

    return run(LaunchOptions(settings, tuple(script), restarts, warm and restarts > 0, log_folder))
