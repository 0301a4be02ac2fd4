"""What a supervisor keeps in the run's folder for the next one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import msgspec

from lightkeeper.errors import ToldError

STATE, TOKEN, ADDRESS = "supervisor.json", "token", "lighthouse.address"


def read_state(path: Path) -> dict[str, Any] | None:
    """What an earlier supervisor left; None if there was none."""
    try:
        return dict(msgspec.json.decode(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, TypeError, ValueError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> ToldError:
    """For a state that cannot be read."""
    told = f"{type(error).__name__}: {error}"
    return ToldError(f"{path} is damaged ({told}): remove it, and what runs is ended and started again")


def token_of(folder: Path) -> tuple[str, bool]:
    """The job's token, made once for a run, and whether that was now.

    Raises:
        ToldError: it cannot be read or written.
    """
    try:
        return _token_of(folder)
    except OSError as error:
        raise ToldError(f"{folder / TOKEN}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ToldError(f"{folder / TOKEN} is no text: put back the one that what runs was told") from error


def _token_of(folder: Path) -> tuple[str, bool]:
    path = folder / TOKEN
    if path.exists() and (token := path.read_text().strip()):
        return token, False
    folder.mkdir(parents=True, exist_ok=True)
    part, token = path.with_name(".token"), secrets.token_urlsafe(24)
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    part.replace(path)
    return token, True
