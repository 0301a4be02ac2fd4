"""How fast the ranks of this node reduce among each other: NVLink, PCIe, or memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from lightkeeper.supervisor.preflight.floors import below, said
from lightkeeper.supervisor.preflight.ranks import Ranks
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped

TIMEOUT_S = 8.0
FIGURE = "allreduce_node_gbps"


def look(request: Request, earlier: Mapping[str, Result]) -> Result:
    """All of `--ranks`; nobody else takes part, so whatever is wrong is this node's."""
    if request.ranks == 1:
        return skipped("one rank a node: --ranks says how many there are")
    ranks = Ranks(request, request.ranks)
    try:
        if why := ranks.start():
            return failed(why)
        with tempfile.TemporaryDirectory() as folder:
            found = ranks.measure("node", 0, request.ranks, TIMEOUT_S, str(Path(folder) / "store"))
    finally:
        ranks.end()
    if found.error:
        return failed(found.error)
    figures = {FIGURE: found.gbps}
    if wrong := below(figures, request.floors):
        return failed("; ".join(wrong), figures=figures)
    return ok(f"{request.ranks} ranks: {said(figures, request.floors)}", figures=figures)
