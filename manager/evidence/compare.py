"""Compares the flight recorders' dumps of several ranks, by torch's own analysis: which collective, who is missing.

`python -m lightkeeper.manager.evidence.compare FILE...` prints one JSON object: the `line`, and the `text` of torch's
analysis. It is a process of its own, since a manager imports no torch; nor does this: the analysis is plain Python, so
it is loaded without running torch's own `__init__`, which takes seconds.

A dump does not say which ranks gloo's process groups have, and each group numbers its own ranks from 0. So each file
holds that beside the dump, and here every rank of every group gets a number of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.machinery
import io
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

LINE_CHARS_MAX = 300
RECOVERY = "recovery-"  # in such a folder are survivors' dumps
CAP = 1 << 30  # without the dump of a dead rank every collective is a mismatch: ours may be the last of them
Place = tuple[str, int]  # group, and rank in it


def compare(dumps: Sequence[dict[str, Any]], analysis: Any) -> tuple[str, str]:
    """Compares dumps.

    Args:
        dumps: of each rank `group`, `rank`, `own` and `epochs` (see `handler.RankEvidence.note_groups`) and `dump`,
            the flight recorder's; with `lives` a survivor's, which goes on after this.
        analysis: torch's module ``builder``.

    Returns:
        One line on the first collective that somebody stands in and others do not, empty if there is none; and what
        torch's analysis printed.
    """
    numbers = _numbers(dumps)
    descs = {name: desc for one in dumps for name, desc in _named(one)}  # also for a rank that did nothing in a group
    config = {numbers[_place(one)]: _groups_of(one, numbers, descs) for one in dumps}
    details = {
        str(number): {
            "rank": number,
            "entries": _entries_of(one, config[number]),
            "version": one["dump"]["version"],
            "pg_config": config[number],
        }
        for one in dumps
        for number in (numbers[_place(one)],)
    }
    standing = _standing(details)
    said = io.StringIO()
    with _told(said):
        options = argparse.Namespace(
            verbose=False, just_print_entries=False, allow_incomplete_ranks=True, mismatch_cap=CAP
        )
        found = analysis.build_db(details, options, next(iter(details.values()))["version"]) if details else None
    names = {number: f"rank {rank} of {group}" for (group, rank), number in numbers.items()}
    lives = {numbers[_place(one)] for one in dumps if one.get("lives")}
    line = _first(found.collectives if found else (), standing, set(config), lives, names)
    legend = "".join(f"rank {number} here is {name}\n" for number, name in sorted(names.items()))
    return line[:LINE_CHARS_MAX], f"{legend}\n{_without_repeats(said.getvalue())}"


def _without_repeats(text: str) -> str:
    """It says so of each collective that it cannot decide on."""
    return "".join(f"{line}\n" for line in dict.fromkeys(text.splitlines()) if line.strip())


def _place(one: dict[str, Any]) -> Place:
    return one["group"], one["rank"]


def _numbers(dumps: Sequence[dict[str, Any]]) -> dict[Place, int]:
    places = {_place(one) for one in dumps}
    for one in dumps:
        places |= {(one["group"], rank) for ranks in one["own"].values() for rank in ranks}
        places |= {(group, one["rank"]) for groups in one["epochs"].values() for group in groups}
    return {place: number for number, place in enumerate(sorted(places))}


def _named(one: dict[str, Any]) -> list[tuple[str, str]]:
    """Name here and description of the process group of each entry: those of a group's own begin with its name."""
    told = [entry["process_group"] for entry in one["dump"].get("entries") or ()]
    return [(name if name in one["epochs"] else f"{one['group']}/{name}", desc) for name, desc in told]


def _groups_of(one: dict[str, Any], numbers: dict[Place, int], descs: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Process groups as the dump should have told them; a group's own are known by their name and its own."""
    found: dict[str, dict[str, Any]] = {}
    for name, ranks in one["own"].items():
        found[f"{one['group']}/{name}"] = {"ranks": [numbers[one["group"], rank] for rank in ranks]}
    for name, groups in one["epochs"].items():
        found[name] = {"ranks": [numbers[group, one["rank"]] for group in groups]}
    return {name: {"ranks": str(group["ranks"]), "desc": descs.get(name, "")} for name, group in found.items()}


def _entries_of(one: dict[str, Any], config: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries of groups that are known, under their names here."""
    entries = one["dump"].get("entries") or ()
    return [
        {**entry, "process_group": [name, desc]}
        for entry, (name, desc) in zip(entries, _named(one), strict=True)
        if name in config and config[name]["desc"] == desc
    ]


def _standing(details: dict[str, dict[str, Any]]) -> dict[tuple[str, int], set[int]]:
    """Who has begun each collective (process group and number) and not ended it."""
    found: dict[tuple[str, int], set[int]] = {}
    for one in details.values():
        for entry in one["entries"]:
            if not entry["retired"]:
                key = entry["process_group"][0], entry["collective_seq_id"]
                found.setdefault(key, set()).add(one["rank"])
    return found


def _first(
    collectives: Sequence[Any],
    standing: dict[tuple[str, int], set[int]],
    dumped: set[int],
    lives: set[int],
    names: dict[int, str],
) -> str:
    """The collective with somebody standing in it that tells most of what torch's analysis finds at fault, in words.

    Different calls tell more than a rank that could not be asked, and that more than one that has not come: it may only
    be late, since the dumps are of a moment. A survivor that has not come is not at fault. And what a group does within
    itself is nearer to the cause than what it does with others.
    """
    found: list[tuple[tuple[int, bool], str]] = []
    for one in collectives:
        stand = standing.get((one.group_id, one.collective_seq_id), set())
        if not stand:
            continue
        desc = one.pg_desc.rpartition(":")[2]
        where = one.group_id if desc in ("epoch", "undefined", "") else desc
        what = f"{one.collective_name.partition(':')[2]} #{one.collective_seq_id} of {where}"
        stands = f"{_listed(stand, names)} {'waits' if len(stand) == 1 else 'wait'}"
        across = desc == "epoch"
        missing = set(one.missing_ranks or ()) - lives
        if one.mismatch_collectives:
            found.append(((0, across), f"{what}: {_mismatch(one, names)}"))
        elif silent := one.expected_ranks - dumped:
            found.append(((1, across), f"{what}: no dump of {_listed(silent, names)}; {stands}"))
        elif missing:
            found.append(((2, across), f"{what}: {_listed(missing, names)} never arrived; {stands}"))
    return min(found, key=lambda one: one[0])[1] if found else ""


def _mismatch(one: Any, names: dict[int, str]) -> str:
    """Who called something else. The analysis takes its first rank's call for the right one; we the majority's."""
    odd = set(one.mismatch_collectives)
    other = one.mismatch_collectives[min(odd)]
    why = str(other.type_of_mismatch).replace("Error type: ", "").partition(",")[0]
    calls = [f"{call.collective_name.partition(':')[2]} {call.input_sizes}" for call in (one, other)]
    if 2 * len(odd) > len(one.expected_ranks):
        odd, calls = set(one.expected_ranks) - odd, calls[::-1]
    if 2 * len(odd) == len(one.expected_ranks):  # nobody can say who is right
        who = ", ".join(names[number].removeprefix("rank ") for number in sorted(odd))
        return f"ranks call different things: {calls[1]} by {who}, {calls[0]} by the others ({why})"
    return f"{_listed(odd, names)} called {calls[1]} where the others called {calls[0]} ({why})"


def _listed(numbers: set[int], names: dict[int, str]) -> str:
    return ", ".join(names[number] for number in sorted(numbers))


@contextlib.contextmanager
def _told(said: io.StringIO) -> Any:
    """What torch's analysis says goes there: it logs, and prints."""
    log = logging.getLogger("Flight Recorder")
    handler = logging.StreamHandler(said)
    before, log.handlers, log.propagate = log.handlers, [handler], False
    try:
        with contextlib.redirect_stdout(said):
            yield
    finally:
        log.handlers = before


def load_analysis() -> Any:
    """Torch's ``flight_recorder.components.builder``, without torch.

    Raises:
        ImportError: torch is not there, or its analysis needs more of it.
    """
    folder = None
    for name in ("torch", "torch.distributed", "torch.distributed.flight_recorder"):
        if name in sys.modules:
            continue
        spec = importlib.machinery.PathFinder.find_spec(name, folder)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"no {name}")
        package = ModuleType(name)
        folder = package.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = package
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return importlib.import_module("torch.distributed.flight_recorder.components.builder")


def read_dumps(paths: Sequence[str]) -> list[dict[str, Any]]:
    """The dumps in these files, one a rank: the newest where there are several."""
    found: dict[Place, dict[str, Any]] = {}
    for path in sorted(paths, key=lambda path: Path(path).stat().st_mtime):
        one = {**json.loads(Path(path).read_bytes()), "lives": Path(path).parent.name.startswith(RECOVERY)}
        if one["dump"].get("entries"):
            found[_place(one)] = one
    return [found[place] for place in sorted(found)]


def main() -> None:
    """Compares the files of the command line.

    It makes way for whoever trains by itself: a manager that had it do so before its `exec` would fork with grpc's
    handlers, which wait for all calls to end, and stand still for a second.
    """
    os.nice(10)
    line, text = compare(read_dumps(sys.argv[1:]), load_analysis())
    json.dump({"line": line, "text": text}, sys.stdout)


if __name__ == "__main__":
    main()
