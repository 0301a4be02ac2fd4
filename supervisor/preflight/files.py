"""The JSON files that options of preflight name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

from lightkeeper.errors import UsageError


def read_json(option: str, path: str, bytes_max: int) -> Any:
    """What is in a file.

    Args:
        option: which names it, as ``--expect``.
        path: where it is.
        bytes_max: what is longer is not read to its end, and so is not JSON.

    Raises:
        UsageError: it cannot be read, or is not JSON.
    """
    try:
        with open(path, "rb") as file:
            return json.loads(file.read(bytes_max))
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{option} {path}: it is not JSON: {error}") from error


def check_names(option: str, path: str, what: str, names: Iterable[str], known: tuple[str, ...]) -> None:
    """Refuses a name that nobody knows, with the one that is near or with all there are.

    Args:
        option: which names the file.
        path: where it is.
        what: what is named, as ``fact``.
        names: those in the file.
        known: those there are.

    Raises:
        UsageError: one of the names is not known.
    """
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            told = f": is {near[0]} meant?" if near else f"; there are {', '.join(known)}"
            raise UsageError(f"{option} {path}: there is no {what} {name!r}{told}")
