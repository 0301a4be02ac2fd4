"""The quarantine as a run sees it: who is in it, who goes there, who comes back after a burn-in."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lightkeeper.supervisor.burn_in import Result
from lightkeeper.supervisor.quarantine import BurnIn
from lightkeeper.supervisor.quarantine_file import QuarantineFile


class Aside:
    """One run's view of the file.

    Args:
        file: the quarantine's.
        job: the run's name, for what it writes there.
    """

    def __init__(self, file: QuarantineFile, job: str) -> None:
        self._file, self._job = file, job

    def stamp(self) -> tuple[int, int]:
        """Of the file: it is another one when somebody has changed it."""
        try:
            found = self._file.path.stat()
        except OSError:
            return 0, 0
        return found.st_ino, found.st_mtime_ns

    def excluded(self, names: Sequence[str]) -> dict[str, str]:
        """Those of these nodes that get no work, with the reason."""
        book = self._file.read()
        return {name: why for name in names if (why := book.excluded(name))}

    def exclude(self, name: str, reason: str, evidence: str) -> None:
        """Puts a node aside."""
        with self._file.change() as held:
            held[0] = held[0].add(name, reason, time.time(), evidence=evidence, job=self._job)

    def before_burn_in(self, name: str) -> tuple[int, str]:
        """How often a node was put aside so far, for `burned_in`; and why no burn-in is to be tried, "" if one is."""
        node = self._file.read().nodes.get(name)
        if node is None or not node.out:
            return 0, ""
        put = [failure for failure in node.failures if not failure.burn_in]
        if not put or not put[-1].job:
            return node.count, f"a person put it aside: lightkeeper quarantine burn-in {name}, or release {name}"
        recent = node.recent(time.time())
        if node.returns_by_itself(time.time()):
            return node.count, ""
        return node.count, f"{recent} failures in a week: lightkeeper quarantine burn-in {name}, then release {name}"

    def burned_in(self, name: str, result: Result, since: int) -> tuple[bool, str]:
        """Writes what came of a burn-in; whether the node gets work again, and why or why not."""
        made = BurnIn(time.time(), not result.why, result.rounds, round(result.seconds, 3), "by the supervisor")
        with self._file.change() as held:
            node = held[0].nodes.get(name)
            if node is None or not node.out:
                return True, "somebody released it meanwhile"
            held[0] = held[0].burned_in(name, made, since, result.why)
            node = held[0].nodes[name]
        if result.why:
            return False, result.why
        return not node.out, node.released if not node.out else "it was put aside again meanwhile"
