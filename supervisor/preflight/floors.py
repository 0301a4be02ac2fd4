"""What must at least be measured. A floor is what was once measured, less a margin, in a file of its own.

Pure, but for reading and writing that file. Without a floor a figure is said and not judged: nobody knows what is
usual on hardware that was not seen before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from lightkeeper.errors import UsageError
from lightkeeper.supervisor.preflight.files import check_names, read_json

MARGIN = 0.2  # of a good figure: what varies between two runs on healthy nodes
FILE_BYTES_MAX = 64 * 1024
FIGURES = (
    "allreduce_node_gbps", "allreduce_pair_gbps", "allreduce_all_gbps", "storage_write_gbps", "storage_read_gbps",
    "storage_write_alone_gbps", "storage_read_alone_gbps",
)  # fmt: skip


def floors_from(measured: Iterable[Mapping[str, float]], margin: float = MARGIN) -> dict[str, float]:
    """Floors from the figures of all nodes: the lowest of each, less the margin.

    Args:
        measured: figures by name, of one node each.
        margin: the share by which a healthy node may be slower than the slowest was.
    """
    lowest: dict[str, float] = {}
    for figures in measured:
        for name, value in figures.items():
            lowest[name] = min(value, lowest.get(name, value))
    return {name: value * (1.0 - margin) for name, value in sorted(lowest.items())}


def below(figures: Mapping[str, float], floors: Mapping[str, float]) -> list[str]:
    """A line for each figure that is under its floor."""
    return [
        f"{name} {figures[name]:.3g} is below its floor {floors[name]:.3g}"
        for name in sorted(figures)
        if name in floors and figures[name] < floors[name]
    ]


def said(figures: Mapping[str, float], floors: Mapping[str, float]) -> str:
    """The figures in a line, and whether anything judges them."""
    parts = [
        f"{name} {value:.3g}" + (f" (floor {floors[name]:.3g})" if name in floors else " (no floor: not judged)")
        for name, value in sorted(figures.items())
    ]
    return ", ".join(parts)


def read_floors(path: str) -> dict[str, float]:
    """The floors in a file that `write_floors` wrote, or somebody by hand: an object of names and numbers.

    Raises:
        UsageError: it cannot be read, or holds something else, or a figure that nobody measures.
    """
    content = read_json("--floors", path, FILE_BYTES_MAX)
    good = isinstance(content, dict) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 for value in content.values()
    )
    if not good:
        raise UsageError(f"--floors {path}: give an object of figures' names and numbers, as --calibrate writes it")
    check_names("--floors", path, "figure", content, FIGURES)
    return {name: float(value) for name, value in content.items()}


def write_floors(path: str, floors: Mapping[str, float]) -> None:
    """Puts the floors in place by a rename, so that nobody reads half of them.

    Raises:
        UsageError: it cannot be written.
    """
    made = Path(f"{path}.{os.uname().nodename}.{os.getpid()}")  # several nodes may write to one storage
    try:
        made.write_text(json.dumps(dict(floors), indent=1) + "\n", "utf-8")
        made.replace(path)
    except OSError as error:
        made.unlink(missing_ok=True)
        raise UsageError(f"--calibrate {path}: {error.strerror or error}") from error
