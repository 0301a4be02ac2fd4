"""Checks that several commands share, and what `launch` hands on. Imports nothing heavy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightkeeper.errors import UsageError
from lightkeeper.wire import split_address

if TYPE_CHECKING:
    from lightkeeper.manager.settings import Settings

DEFAULT_LIGHTHOUSE = "127.0.0.1:29400"
TOKEN_VARIABLE = "LIGHTKEEPER_TOKEN"
TOKEN_FILE_VARIABLE = "LIGHTKEEPER_TOKEN_FILE"
TOKEN_CHARS_MAX = 512


@dataclass(frozen=True)
class LaunchOptions:
    """`lightkeeper launch`: a manager and its ranks.

    Attributes:
        settings: the group's settings.
        command: the script and its arguments, or `-m`, a module and its arguments.
        restarts: how often the group is started again after it was lost, without ten good minutes in between.
        warm: whether processes that have imported torch wait for that.
        log_folder: where what the ranks print is kept; empty: ``logs`` in the run's folder, if there is one.
    """

    settings: Settings
    command: tuple[str, ...]
    restarts: int = 3
    warm: bool = True
    log_folder: str = ""


def check_address(text: str, option: str) -> str:
    """`host:port`, an IPv6 host in brackets.

    Raises:
        UsageError: it is not that.
    """
    try:
        split_address(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    return text


def check_addresses(text: str, option: str) -> tuple[str, ...]:
    """One or more `host:port` with commas between.

    Raises:
        UsageError: one of them is none; it is named.
    """
    return tuple(check_address(part.strip(), option) for part in text.split(","))


def check_lighthouses(text: str, option: str) -> tuple[str, ...]:
    """Addresses of lighthouses as `--lighthouse` gives them, read from the file if it names one.

    Raises:
        UsageError: the file cannot be used, or an address is none; it is named.
    """
    from lightkeeper.manager.addresses import read_addresses

    try:
        return read_addresses(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def check_count(value: int, option: str, lowest: int = 1, highest: int = 1_000_000) -> int:
    """An integer within bounds.

    Raises:
        UsageError: it is out of them.
    """
    if not lowest <= value <= highest:
        raise UsageError(f"{option} must be within {lowest}..{highest}, got {value}")
    return value


def require_token(token_file: Path | None) -> str:
    """The job token: from the file if one is named, else from the environment.

    Raises:
        UsageError: there is none, or it cannot be read or sent.
    """
    from lightkeeper.manager.settings import read_token

    token = read_token(token_file) if token_file else os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        raise UsageError(f"no job token: give --token-file FILE or set {TOKEN_VARIABLE}")
    if not token.isascii() or not token.isprintable() or len(token) > TOKEN_CHARS_MAX:
        raise UsageError(f"the job token must be printable ASCII, at most {TOKEN_CHARS_MAX} characters")
    return token
