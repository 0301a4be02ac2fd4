"""How fast all ranks of all nodes reduce together, but for the nodes that the pairs have named."""

from __future__ import annotations

from collections.abc import Mapping

from lightkeeper.supervisor.preflight.floors import below, said
from lightkeeper.supervisor.preflight.meeting import Place
from lightkeeper.supervisor.preflight.ranks import Ranks, longest_s
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped
from lightkeeper.supervisor.preflight.together import with_others, without

READY_S = 20.0
TIMEOUT_S = 8.0
SPARE_S = 5.0
FIGURE = "allreduce_all_gbps"


@with_others
def look(request: Request, earlier: Mapping[str, Result], place: Place) -> Result:
    """What is below the floor here is nobody's in particular: each pair was well. So it counts against all."""
    pairs = earlier.get("bandwidth-pairs")
    named = set(pairs.evidence.get("named", [])) if pairs else set()
    if request.node_rank in named:
        return skipped("left out, as this node was found unfit before")
    ranks = Ranks(request, request.ranks)
    try:
        if why := ranks.start():
            return failed(why)
        ready = place.exchange("all", request.ranks, READY_S, set(range(request.nnodes)) - named)
        nodes = sorted(ready.values)
        if len(nodes) < 2:
            return skipped("no other node is left" + without(ready.missing), {"missing": list(ready.missing)})
        first = sum(ready.values[node] for node in nodes if node < request.node_rank)
        found = ranks.measure("all", first, sum(ready.values.values()), TIMEOUT_S)
    finally:
        ranks.end()
    if found.silent:
        return failed(found.error)
    heard = place.exchange("all-done", found.error, SPARE_S + longest_s(TIMEOUT_S), nodes)
    missing = (*ready.missing, *heard.missing)
    evidence = {"nodes": nodes, "errors": {str(node): error for node, error in heard.values.items() if error},
                "missing": list(missing)}  # fmt: skip
    if found.error and heard.missing:
        return skipped(f"it did not get done: {found.error}{without(missing)}", evidence)
    if found.error:
        return failed(f"it did not get done, and nobody is missing: {found.error}", evidence)
    figures = {FIGURE: found.gbps}
    if wrong := below(figures, request.floors):
        return failed(f"{'; '.join(wrong)}: among {len(nodes)} nodes, and no pair of them is slow", evidence, figures)
    told = f"{sum(ready.values.values())} ranks of {len(nodes)} nodes: {said(figures, request.floors)}"
    return ok(told + without(missing), evidence, figures)
