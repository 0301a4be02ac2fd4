"""Starts groups of plain ranks on several nodes, which are this machine, or network namespaces of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import HERE, Job

from lightkeeper.events import schema

NO_STORE = "class TCPStore:\n    def __init__(self, *given, **named):\n        pass\n"


class NodeJob(Job):
    """A job whose groups may have several nodes.

    The store for a group's own collectives needs torch, whose import takes seconds. Plain ranks have no collectives, so
    theirs is none.

    Args:
        folder: the run's folder, to be made.
        plain: whether all ranks are plain ones.
    """

    def __init__(self, folder: Path, plain: bool = True) -> None:
        super().__init__(folder)
        if not plain:
            return
        package = folder / "without-torch" / "torch" / "distributed"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").write_text(NO_STORE)
        self.variables["PYTHONPATH"] = str(package.parents[1])

    def start_node(
        self,
        group: str,
        node: int = 0,
        nnodes: int = 2,
        ranks: int = 1,
        settings: dict[str, Any] | None = None,
        prefix: tuple[str, ...] = (),
        script: Path | None = None,
        restarts: int = 0,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Starts one node of a group; its name in the harness is ``g0.1`` for node 1 of g0, ``g0`` for node 0.

        Args:
            group: name of the group.
            node: which of its nodes.
            nnodes: how many there are.
            ranks: ranks of each node.
            settings: fields of `Settings` that differ from the job's.
            prefix: words before the command: another network namespace.
            script: what the ranks run; None: `plain_rank.py`.
            restarts: how often the launcher starts its part again.
            options: the script's.
        """
        name = f"{group}.{node}" if node else group
        options = {"trace": str(self.folder / f"{'trace' if script else 'ranks'}-{group}"), **options}
        words = [
            *prefix, sys.executable, "-m", "lightkeeper", "launch", "--group", group, "--ranks", str(ranks),
            "--nnodes", str(nnodes), "--node-rank", str(node), "--",
            str(script or HERE / "plain_rank.py"), json.dumps(options),
        ]  # fmt: skip
        given = {"outage_budget_s": 10, **(settings or {})}
        environment = self._group_environment(group, "", given, {"LIGHTKEEPER_RESTARTS": str(restarts)})
        with self.output(name).open("wb") as output:
            child = subprocess.Popen(
                words, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
                start_new_session=True,
            )  # fmt: skip
        self.launchers[name] = child
        self.started.add(child.pid)
        return child

    def traced(self, group: str, rank: int, kind: str = "commit") -> list[dict[str, Any]]:
        """What a plain rank wrote."""
        path = self.folder / f"ranks-{group}-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [found for line in lines if (found := json.loads(line))["kind"] == kind]

    def await_step(self, group: str, rank: int, step: int) -> None:
        """Returns once the rank has committed it."""
        self.until(lambda: len(self.traced(group, rank)) > step, f"step {step} of {group}'s rank {rank}")

    def pid_of(self, group: str, rank: int) -> int:
        """The rank's process."""
        return int(self.traced(group, rank, "registered")[-1]["pid"])

    def lost(self, group: str) -> schema.GroupLost:
        """How the lighthouse says that the group was lost."""
        return self.wait_for(schema.GroupLost, group=group)
