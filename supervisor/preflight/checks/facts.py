"""Whether all nodes are made of the same: the facts of `versions`, compared with those of the others."""

from __future__ import annotations

from collections.abc import Mapping

from lightkeeper.supervisor.preflight.checks import versions
from lightkeeper.supervisor.preflight.compare import odd_ones
from lightkeeper.supervisor.preflight.meeting import Place
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok
from lightkeeper.supervisor.preflight.together import with_others, without

WAIT_S = 8.0


@with_others
def look(request: Request, earlier: Mapping[str, Result], place: Place) -> Result:
    """Fails on a node that differs from most; on the others it says who does."""
    own = earlier.get("versions")
    heard = place.exchange("facts", dict(own.evidence) if own and own.evidence else versions.facts(), WAIT_S)
    odd = odd_ones(heard.values)
    evidence = {"odd": {str(node): lines for node, lines in odd.items()}, "missing": list(heard.missing)}
    if request.node_rank in odd:
        return failed("; ".join(odd[request.node_rank]), evidence)
    others = "".join(f"; node {node} differs: {'; '.join(lines)}" for node, lines in odd.items())
    alike = len(heard.values) - len(odd)
    return ok(f"{alike} of {len(heard.values)} nodes are alike{others}{without(heard.missing)}", evidence)
