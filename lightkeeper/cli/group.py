"""The options that `launch` and `manager` share: one per field of `Settings`, which also checks them."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightkeeper.cli.options import TOKEN_FILE_VARIABLE, require_token
from lightkeeper.errors import UsageError
from lightkeeper.words import say

if TYPE_CHECKING:
    from lightkeeper.manager.settings import Settings


TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar=TOKEN_FILE_VARIABLE,
        help="File with the job token. Without it LIGHTKEEPER_TOKEN is read.",
    ),
]


def _option(kind: type, name: str, text: str, default: str | bool = False, metavar: str | None = None) -> Any:
    variable = "LIGHTKEEPER_" + name.removeprefix("--").replace("-", "_").upper()
    return Annotated[kind | None, typer.Option(name, envvar=variable, help=text, show_default=default, metavar=metavar)]


OPTIONS: dict[str, Any] = {
    "group": _option(str, "--group", "Stable name of this replica group, e.g. g0."),
    "ranks": _option(int, "--ranks", "Trainer ranks of the group on each of its nodes.", "1"),
    "nnodes": _option(int, "--nnodes", "Nodes of the group; the same command is started on each.", "1"),
    "node_rank": _option(int, "--node-rank", "Which of them this is, from 0; the manager is on node 0.", "0"),
    "manager": _option(
        str,
        "--manager",
        "Address of node 0, and the port at which the manager there waits for the other nodes.",
        "the lighthouse is asked where it is",
        "HOST:PORT",
    ),
    "lighthouse": _option(
        str,
        "--lighthouse",
        "Address of the lighthouse; several are tried in their order; file:PATH is read for every connection.",
        "127.0.0.1:29400",
        "HOST:PORT[,...]",
    ),
    "job": _option(str, "--job", "Id of the job; jobs on one lighthouse do not meet.", "job"),
    "groups": _option(int, "--groups", "Replica groups the job is configured for, spares among them.", "1"),
    "members": _option(int, "--members", "How many groups are to work: --groups less --spares.", "--groups"),
    "spares": _option(int, "--spares", "Groups that compute nothing while the others are there.", "0"),
    "role": _option(
        str, "--role", "member; spare: the last to work; reserve: none of --groups, waits for a place.", "member"
    ),
    "minimum": _option(int, "--minimum", "Fewest groups with which the job goes on.", "1"),
    "start_window_s": _option(
        float,
        "--start-window-s",
        "If above 0, the first epoch may start with --minimum groups after so many seconds.",
        "0",
    ),
    "token_file": TokenFile,
    "run_folder": _option(Path, "--run-folder", "Write events to this run's folder; without it none are written."),
    "outage_budget_s": _option(
        float,
        "--outage-budget-s",
        "Seconds that the lighthouse or a peer may be out of reach; all time-outs follow from it.",
        "60",
    ),
    "evidence_s": _option(float, "--evidence-s", "Seconds for evidence before a group is ended.", "budget / 30"),
    "stall_floor_s": _option(
        float, "--stall-floor-s", "Shortest deadline for a rank's progress, in seconds.", "budget / 4"
    ),
    "form_timeout_s": _option(
        float, "--form-timeout-s", "Seconds that the process group of an epoch may take to form.", "budget / 2"
    ),
    "quorum_wait_s": _option(
        float,
        "--quorum-wait-s",
        "Seconds that the job may stand below --minimum before it ends and keeps its last step.",
        "budget / 2",
    ),
    "stop_deadline_s": _option(
        float, "--stop-deadline-s", "Seconds that the group which keeps the last step may take to end.", "5 budgets"
    ),
    "start_budget_s": _option(
        float, "--start-budget-s", "Seconds by which groups, or nodes, may be started apart.", "10 budgets"
    ),
    "first_step_s": _option(
        float, "--first-step-s", "Deadline of a first step, and highest of any phase, in seconds.", "10 budgets"
    ),
    "reduce_timeout_s": _option(
        float, "--reduce-timeout-s", "Seconds that a reduce may stand for a member that lives.", "12 budgets"
    ),
    "collective_timeout_s": _option(
        float,
        "--collective-timeout-s",
        "Time-out of the group's own process groups, in seconds, if the script does not say.",
        "20 budgets",
    ),
    "host": _option(str, "--host", "Address at which peers reach this node.", "the interface towards the lighthouse"),
    "bucket_mb": _option(float, "--bucket-mb", "Size of a gradient bucket, MiB.", "16"),
    "history_mb": _option(float, "--history-mb", "Bound on the entries kept while a group joins, MiB.", "4096"),
    "deal": _option(
        str,
        "--deal",
        "Who is slower gets fewer microbatches (speed), or all get as many (even); alike in all groups.",
        "speed",
        "speed|even",
    ),
    "slow": _option(
        str,
        "--slow",
        "A group that is slow for long is said to be (report), or asked to leave where that pays (evict).",
        "report",
        "report|evict",
    ),
    "notice_file": _option(
        Path,
        "--notice-file",
        "When this file appears the group leaves in good order, within the seconds that it holds.",
    ),
    "fingerprint_every": _option(
        int, "--fingerprint-every", "Write the state's fingerprint after every so many steps; 0 never.", "0"
    ),
}


def takes_options(command: Callable[..., int]) -> Callable[..., int]:
    """Puts `OPTIONS` in the place of a command's `**given`: typer reads a command's options from its signature."""
    shown = signature(command, eval_str=True)
    own = [parameter for parameter in shown.parameters.values() if parameter.kind is not Parameter.VAR_KEYWORD]
    options = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in OPTIONS.items()]
    command.__signature__ = shown.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return command


def settings(token_file: Path | None, run_folder: Path | None, notice_file: Path | None, **given: Any) -> Settings:
    """The group's settings: what was given, else the environment, else the defaults.

    Raises:
        UsageError: a value is wrong, or the group has no name or no token.
    """
    from lightkeeper.manager.notice import check_folder
    from lightkeeper.manager.settings import read_settings, strange_variables

    if strange := strange_variables(os.environ):
        say(f"lightkeeper: {strange}")
    if not given.get("group"):
        raise UsageError("--group NAME is missing: every replica group needs a name of its own, e.g. g0")
    folder, notice = (None if path is None else str(path.absolute()) for path in (run_folder, notice_file))
    check_folder(notice or "")
    return read_settings(token=require_token(token_file), run_folder=folder, notice_file=notice, **given)
