"""The jobs that faults are tried on: a lighthouse, and groups of real processes on this machine that train `toy.py`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

from lightkeeper.chaos.faults import Shape
from lightkeeper.chaos.hosts import Host
from lightkeeper.chaos.watched import (
    END_S_MAX,
    GONE_S_MAX,
    JOB,
    OUTAGE_BUDGET_S,
    POLL_S,
    START_S_MAX,
    TOY,
    Watched,
)
from lightkeeper.demo.job import LocalJob
from lightkeeper.manager.faults import VARIABLE


class Workload(Watched):
    """One job. A context manager: leaving it ends all its processes.

    Args:
        folder: the run's.
        shape: of the job.
        seed: of its weights and its order of samples.
        restarts: how often a launcher starts its group again.
        warm: whether each keeps a process for that: of use only where a group is lost more than once.
    """

    def __init__(self, folder: Path, shape: Shape, seed: int, restarts: int = 3, warm: bool = False) -> None:
        super().__init__(folder, shape, seed)
        self.restarts = restarts
        self._warm = "--warm" if warm else "--no-warm"
        self.host = Host() if shape.apart else None
        self._job = LocalJob(folder, shape.names, JOB, {
            "fingerprint-every": "1", "outage-budget-s": f"{OUTAGE_BUDGET_S:g}", "spares": str(shape.spares),
        })  # fmt: skip
        self._ended_well: set[str] = set()  # launchers whose end is no trouble

    def __enter__(self) -> Workload:
        self._job.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._job.end()
        if self.host is not None:
            self.host.remove()
        self._log.close()

    # ------------------------------------------------------------ starting

    def start(self, inside: Mapping[str, str] = MappingProxyType({}), cold: str = "") -> None:
        """Starts lighthouse and groups, and returns once all of them train.

        Args:
            inside: by group, what it is told as ``LIGHTKEEPER_FAULT``.
            cold: a group that its launcher does not start again.
        """
        if self.host is not None:
            self.host.make()
        self._job.start_lighthouse(f"{self.host.here}:0" if self.host is not None else "127.0.0.1:0")
        for group in self.shape.names:
            self.start_group(group, inside.get(group, ""), 0 if group == cold else self.restarts)
        for node in range(1, self.shape.nodes):
            self.start_node(node)
        self.until(lambda: set(self._newest) >= set(self.shape.names), "all groups train", START_S_MAX)

    def start_group(self, group: str, inside: str = "", restarts: int | None = None) -> None:
        """Starts a group by `lightkeeper launch`, on its first node."""
        apart = self.host is not None and group == self.shape.names[-1]
        more = ["--ranks", str(self.shape.ranks), self._warm]
        more += ["--restarts", str(self.restarts if restarts is None else restarts)]
        if group == self.shape.names[0] and self.shape.nodes > 1:
            more += ["--nnodes", str(self.shape.nodes), "--node-rank", "0"]
        elif self.shape.nodes > 1:
            more += ["--ranks", str(self.shape.nodes * self.shape.ranks)]  # as many as g0 has on all its nodes
        if self.shape.spares and group in self.shape.names[-self.shape.spares :]:
            more += ["--role", "spare"]
        prefix = self.host.prefix if self.host is not None and apart else ()
        self._ended_well.discard(group)
        self._job.start_group(group, self._command(), {VARIABLE: inside} if inside else {}, more, prefix=prefix)

    def start_node(self, node: int) -> None:
        """Starts a further node of g0."""
        group = self.shape.names[0]
        more = ["--ranks", str(self.shape.ranks), self._warm, "--restarts", str(self.restarts)]
        more += ["--nnodes", str(self.shape.nodes), "--node-rank", str(node)]
        self._ended_well.discard(f"{group}.{node}")
        self._job.start_group(group, self._command(), {}, more, name=f"{group}.{node}")

    def start_again(self, name: str) -> str:
        """See `Watched`; it has ended before that."""
        self.until(lambda: self.ended(name), f"the launcher of {name} ends")
        group, _, node = name.partition(".")
        if node:
            self.start_node(int(node))
        else:
            self.start_group(group)
        return f"{name} is started again"

    def restart_lighthouse(self) -> str:
        """See `Watched`: where it was, with its log."""
        self._job.children["lighthouse"].wait(GONE_S_MAX)
        self._job.start_lighthouse(self._job.lighthouse)
        return "the lighthouse is started again, where it was and with its log"

    @property
    def lighthouse(self) -> str:
        """Its address."""
        return self._job.lighthouse

    def _command(self) -> list[str]:
        return [str(TOY), "--stop", str(self._stop_file), "--seed", str(self.seed)]

    # ------------------------------------------------------------ ending

    def ends_so(self, name: str) -> None:
        """See `Watched`."""
        self._ended_well.add(name)

    def ended(self, name: str) -> bool:
        """Whether a launcher has ended."""
        return self._job.children[name].poll() is not None

    def finish(self) -> dict[str, int | None]:
        """See `Watched`."""
        self._stop_file.touch()
        names = [name for name in self._job.children if name != "lighthouse"]
        self.until(lambda: all(self.ended(name) for name in names), "all groups have ended", END_S_MAX)
        self._job.stop_lighthouse()
        self.look()
        return self._job.exit_codes()

    def exit_codes(self) -> dict[str, int | None]:
        """See `Watched`."""
        return self._job.exit_codes()

    def leftovers(self) -> list[str]:
        """See `Watched`."""
        until = time.monotonic() + GONE_S_MAX
        while (left := self._job.leftovers()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return left

    def _failed(self) -> str:
        for name, code in self._job.exit_codes().items():
            if code not in (0, None) and name not in self._ended_well and name != "lighthouse":
                return f"{name} ended with {code}: {self._job.last_line(name)}"
        return ""
