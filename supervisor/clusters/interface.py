"""What every cluster can do. `tests/contracts/test_clusters.py` holds for each of them.

Names of processes are the supervisor's: "g0", "check-g0". One name stands for one process per node at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lightkeeper.errors import ToldError


class CannotStart(ToldError):
    """A process cannot be started on a node; one line says why. The node may be gone, or a disk full."""


@dataclass(frozen=True)
class Exited:
    """A process has ended, with all that it had started.

    Attributes:
        node, name: which.
        code: exit code, negative for a signal; None if nobody knows.
    """

    node: str
    name: str
    code: int | None


@dataclass(frozen=True)
class NodeLost:
    """A node is gone; what ran there is ended, or fenced off, before this is said."""

    node: str
    why: str


@dataclass(frozen=True)
class NodeLeaving:
    """A node is to be left in good order: it is drained, or will be taken away. `NodeCame` takes that back."""

    node: str
    why: str


@dataclass(frozen=True)
class NodeCame:
    """A node can be used, for the first time or again."""

    node: str


Happening = Exited | NodeLost | NodeLeaving | NodeCame
Heard = Callable[[Happening], None]


class Cluster(Protocol):
    """Nodes, and what runs on them."""

    async def open(self, heard: Heard) -> list[tuple[str, str]]:
        """Takes the nodes up; from now on `heard` is told what happens.

        Returns:
            What runs already, by node and name: an earlier supervisor started it. What has ended since that one was
            here is told as `Exited`.
        """

    async def start(self, node: str, name: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Starts a process; its output goes to `log`, which exists, on the disk, before the process does.

        Raises:
            CannotStart: it cannot be.
        """

    async def signal(self, node: str, name: str, number: int) -> None:
        """Sends a signal to the process, not to what it started; nothing if it has ended."""

    async def kill(self, node: str, name: str) -> None:
        """Kills the process and all that it started; `Exited` comes when nothing of it is left."""

    async def close(self, end: bool) -> None:
        """No more is wanted of it; `end`: whatever still runs is killed, and the nodes are given back."""
