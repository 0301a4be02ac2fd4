"""Whether a node may join, and how that is told. Pure functions over results.

What was skipped is unknown and counts for nothing: else a node without InfiniBand could never join.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightkeeper.supervisor.preflight.results import FAILED, Result
from lightkeeper.words import counted, shown

REASON_CHARS_MAX = 300


@dataclass(frozen=True)
class Report:
    """All that is told of a run.

    Attributes:
        node: rank of this node.
        host: its name.
        seconds: how long it took.
        results: of its checks.
        nodes: by rank, what the others told of themselves (`summary`); of one that did not, ``{"came": False}``.
    """

    node: int
    host: str
    seconds: float
    results: tuple[Result, ...]
    nodes: Mapping[int, Mapping[str, Any]]

    @property
    def may_join(self) -> bool:
        """Whether nothing speaks against this node."""
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """What speaks against it, by check."""
        return reasons(self.results)

    def fields(self) -> dict[str, Any]:
        """As JSON's types."""
        return {
            "may_join": self.may_join,
            "node": self.node,
            "host": self.host,
            "seconds": round(self.seconds, 3),
            "reasons": self.reasons,
            "results": [result.fields() for result in self.results],
            "nodes": {str(node): dict(said) for node, said in sorted(self.nodes.items())},
        }


def reasons(results: Sequence[Result]) -> list[str]:
    """What speaks against a node: a line for each check that failed."""
    return [f"{result.name}: {result.reason}" for result in results if result.state == FAILED]


def summary(host: str, results: Sequence[Result], figures: Mapping[str, float]) -> dict[str, Any]:
    """What a node tells the others of itself."""
    found = reasons(results)
    told = [shown(reason, REASON_CHARS_MAX) for reason in found]
    return {"came": True, "host": host, "may_join": not found, "reasons": told, "figures": dict(figures)}


def table(report: Report) -> list[str]:
    """The lines for a person: a row for each check, then who may join."""
    width = max((len(result.name) for result in report.results), default=0)
    lines = [
        f"{result.name:<{width}}  {result.state:<7}  {result.seconds:5.1f} s  {shown(result.reason, REASON_CHARS_MAX)}"
        for result in report.results
    ]
    for node, said in sorted(report.nodes.items()):
        if node != report.node:
            lines.append(_of_other(node, said))
    lines.append(_of_this(report))
    return lines


def _of_other(node: int, said: Mapping[str, Any]) -> str:
    if not said.get("came"):
        return f"node {node} did not come, or has not ended: do not join it"
    name = f"node {node} ({shown(str(said['host']), 100)})"
    if said["may_join"]:
        return f"{name} may join"
    return f"{name} must not join: {shown('; '.join(map(str, said['reasons'])), REASON_CHARS_MAX)}"


def _of_this(report: Report) -> str:
    states = [result.state for result in report.results]
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states), reverse=True))
    name = f"this node (node {report.node}, {report.host})" if report.nodes else f"this node ({report.host})"
    verdict = "may join" if report.may_join else f"must not join: {', '.join(_names(report))}"
    return f"{name} {verdict} ({counts} of {counted(len(states), 'check')}, {report.seconds:.1f} s)"


def _names(report: Report) -> list[str]:
    return [result.name for result in report.results if result.state == FAILED]
