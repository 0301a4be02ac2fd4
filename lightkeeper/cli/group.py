"""The options that `launch` and `manager` share: one per field of `Settings`, which also checks them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightkeeper.cli.options import TOKEN_FILE_VARIABLE, require_token
from lightkeeper.errors import UsageError

if TYPE_CHECKING:
    from lightkeeper.manager.settings import Settings


def _option(name: str, text: str, default: str | bool = False, metavar: str | None = None) -> Any:
    variable = "LIGHTKEEPER_" + name.removeprefix("--").replace("-", "_").upper()
    return typer.Option(name, envvar=variable, help=text, show_default=default, metavar=metavar)


Group = Annotated[str | None, _option("--group", "Stable name of this replica group, e.g. g0.")]
Ranks = Annotated[int | None, _option("--ranks", "Trainer ranks of the group on this node.", "1")]
Lighthouse = Annotated[
    str | None, _option("--lighthouse", "Address of the lighthouse.", "127.0.0.1:29400", "HOST:PORT")
]
Job = Annotated[str | None, _option("--job", "Id of the job; jobs on one lighthouse do not meet.", "job")]
Groups = Annotated[int | None, _option("--groups", "Replica groups the job is configured for.", "1")]
Minimum = Annotated[int | None, _option("--minimum", "Fewest groups with which the job goes on.", "1")]
StartWindow = Annotated[
    float | None,
    _option(
        "--start-window-s",
        "If above 0, the first epoch may start with --minimum groups after so many seconds.",
        "0",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar=TOKEN_FILE_VARIABLE,
        help="File with the job token. Without it LIGHTKEEPER_TOKEN is read.",
    ),
]
RunFolder = Annotated[
    Path | None, _option("--run-folder", "Write events to this run's folder; without it none are written.")
]
OutageBudget = Annotated[
    float | None,
    _option(
        "--outage-budget-s",
        "Seconds that the lighthouse or a peer may be out of reach; all time-outs follow from it.",
        "60",
    ),
]
Host = Annotated[
    str | None,
    _option("--host", "Address at which peers reach this node.", "the interface towards the lighthouse"),
]
BucketMb = Annotated[float | None, _option("--bucket-mb", "Size of a gradient bucket, MiB.", "16")]
HistoryMb = Annotated[
    float | None, _option("--history-mb", "Bound on the entries kept while a group joins, MiB.", "4096")
]
FingerprintEvery = Annotated[
    int | None,
    _option("--fingerprint-every", "Write the state's fingerprint after every so many steps; 0 never.", "0"),
]


def settings(token_file: Path | None, run_folder: Path | None, **given: Any) -> Settings:
    """The group's settings: what was given, else the environment, else the defaults.

    Raises:
        UsageError: a value is wrong, or the group has no name or no token.
    """
    from lightkeeper.manager.settings import read_settings

    if not given.get("group"):
        raise UsageError("--group NAME is missing: every replica group needs a name of its own, e.g. g0")
    folder = None if run_folder is None else str(run_folder.absolute())
    return read_settings(token=require_token(token_file), run_folder=folder, **given)
