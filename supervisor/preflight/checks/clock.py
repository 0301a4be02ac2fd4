"""Whether this node's clock agrees with the others'."""

from __future__ import annotations

from collections.abc import Mapping

from lightkeeper.supervisor.preflight.compare import wrong_clocks
from lightkeeper.supervisor.preflight.meeting import Place
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok
from lightkeeper.supervisor.preflight.together import with_others, without

WAIT_S = 5.0


@with_others
def look(request: Request, earlier: Mapping[str, Result], place: Place) -> Result:
    """All measure against node 0, and are judged by the middle of all: node 0's own clock may be the wrong one."""
    heard = place.exchange("clock", place.ahead_s(), WAIT_S)
    return judged(request, heard.values, heard.missing)


def judged(request: Request, ahead: Mapping[int, float], missing: tuple[int, ...] = ()) -> Result:
    """What follows from the offsets, in seconds, by node rank."""
    wrong = wrong_clocks(ahead, request.clock_skew_s)
    evidence = {"ahead_s": {str(node): round(value, 4) for node, value in ahead.items()}, "missing": list(missing)}
    if request.node_rank in wrong:
        skew = wrong[request.node_rank]
        way = "ahead of" if skew > 0 else "behind"
        return failed(f"{abs(skew):.2f} s {way} the others, {request.clock_skew_s:g} allowed", evidence)
    others = "".join(f"; that of node {node} is wrong by {skew:+.2f} s" for node, skew in wrong.items())
    spread = max(ahead.values()) - min(ahead.values())
    return ok(f"the clocks of {len(ahead)} nodes differ by {spread:.3f} s{others}{without(missing)}", evidence)
