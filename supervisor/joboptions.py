"""What a job file may say under `[options]`: options of `lightkeeper launch` that nothing else in it says."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from lightkeeper.errors import UsageError
from lightkeeper.manager.settings import PREFIX, Settings, read_settings

ELSEWHERE = {  # said in another place of the file, or by the supervisor
    "group": "", "node-rank": "", "manager": "", "role": "", "token": "", "told-by": "", "notice-file": "",
    "groups": "groups", "minimum": "minimum", "spares": "spares", "ranks": "ranks", "nnodes": "nodes_per_group",
    "lighthouse": "[lighthouse] address", "job": "name", "run-folder": "run_folder",
    "outage-budget-s": "outage_budget_s", "restarts": "[budget] in_place",
}  # fmt: skip
KNOWN = frozenset(field.name.replace("_", "-") for field in dataclasses.fields(Settings)) - ELSEWHERE.keys()


def read_options(table: Mapping[str, Any], where: str) -> dict[str, str]:
    """The options by name, as words for the command line.

    Raises:
        UsageError: there is no such option, it is said elsewhere, or its value cannot be right.
    """
    options = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if place := ELSEWHERE.get(name):
            raise UsageError(f"{where}: {key} is said by {place}")
        if name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, 1)
            known = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(KNOWN))}"
            raise UsageError(f"{where}: unknown key {key!r}; {known}")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise UsageError(f"{where} {key} is text or a number, not {value!r}")
        options[name] = str(value)
    try:
        check_settings(options)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    return options


def check_settings(options: Mapping[str, str], **given: Any) -> None:
    """Reads what a launcher would be told, as it would.

    Args:
        options: by name, as words for the command line.
        given: further fields of `Settings`.

    Raises:
        UsageError: a value cannot be right.
    """
    variables = {PREFIX + name.replace("-", "_").upper(): value for name, value in options.items()}
    try:
        read_settings(variables, group="g0", token="-", **given)
    except UsageError as error:
        raise UsageError(str(error).replace(PREFIX, "")) from error
