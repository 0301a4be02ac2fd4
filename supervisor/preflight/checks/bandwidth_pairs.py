"""How fast this node reduces with others, two at a time: it tells a slow node from a slow link (`sweep.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightkeeper.supervisor.preflight import sweep
from lightkeeper.supervisor.preflight.meeting import Place
from lightkeeper.supervisor.preflight.ranks import GRACE_S, Ranks
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped
from lightkeeper.supervisor.preflight.sweep import Pair
from lightkeeper.supervisor.preflight.together import with_others, without

READY_S = 20.0  # some import torch from a slow storage
PAIR_S = 8.0
SPARE_S = 5.0
WAVES_MAX = 3  # of one round: where most are slow, some stay in doubt
FIGURE = "allreduce_pair_gbps"
DONE_GBPS = 1e-9  # a pair that got done at all; without a floor, and without --sweep, nothing else is judged


@with_others
def look(request: Request, earlier: Mapping[str, Result], place: Place) -> Result:
    """One round with neighbours; more, with other partners, if a pair is slow or `--sweep` is given."""
    ranks = Ranks(request, 1)
    try:
        if why := ranks.start():
            return failed(why)
        heard = place.exchange("pairs", None, READY_S)
        nodes = sorted(heard.values)
        if len(nodes) < 2:
            return skipped("no other node is left" + without(heard.missing), {"missing": list(heard.missing)})
        floor = request.floors.get(FIGURE, None if request.sweep else DONE_GBPS)
        measured = _rounds(request, place, ranks, nodes, floor)
    finally:
        ranks.end()
    return judged(request, measured, floor, heard.missing)


def judged(
    request: Request, measured: Mapping[Pair, float], floor: float | None, missing: tuple[int, ...] = ()
) -> Result:
    """What the pairs say of this node."""
    found = sweep.judge(measured, floor)
    mine = {pair: gbps for pair, gbps in measured.items() if request.node_rank in pair}
    slowest = min(mine.values(), default=0.0)
    figures = {FIGURE: slowest} if slowest > 0 else {}
    named = sorted({*found.nodes, *(node for pair in found.unclear for node in pair)})
    evidence = {
        "gbps": {f"{a}-{b}": round(gbps, 4) for (a, b), gbps in sorted(measured.items())},
        "limit_gbps": found.limit_gbps, "named": named, "links": [list(pair) for pair in found.links],
        "missing": list(missing),
    }  # fmt: skip
    if against := found.named(request.node_rank):
        told = ", ".join(f"{gbps:.3g} GB/s with {a + b - request.node_rank}" for (a, b), gbps in mine.items())
        return failed(f"{against}: {told}; {found.limit_gbps:.3g} is the limit", evidence, figures)
    judge = "" if floor != DONE_GBPS else " (no floor: not judged)"
    told = f"{FIGURE} {slowest:.3g} with {len(mine)} partners{judge}; {found.line()}{without(missing)}"
    return ok(told, evidence, figures)


def _rounds(request: Request, place: Place, ranks: Ranks, nodes: list[int], floor: float | None) -> dict[Pair, float]:
    measured: dict[Pair, float] = {}
    waves = sweep.neighbours(nodes)
    for number in range(1, sweep.ROUNDS_MAX + 1):
        waves = waves[:WAVES_MAX]
        if not waves:
            break
        mine: dict[str, Any] = {}
        for pair in (pair for wave in waves for pair in wave if request.node_rank in pair):
            name = f"pair-{number}-{pair[0]}-{pair[1]}"
            mine[name] = ranks.measure(name, pair.index(request.node_rank), 2, PAIR_S).gbps
        heard = place.exchange(f"pairs-{number}", mine, len(waves) * (PAIR_S + GRACE_S) + SPARE_S, nodes)
        for pair in (pair for wave in waves for pair in wave):
            name = f"pair-{number}-{pair[0]}-{pair[1]}"
            measured[pair] = min(float(heard.values.get(node, {}).get(name, 0.0)) for node in pair)
        if sweep.settled(measured, floor) and (number > 1 or not request.sweep):
            break
        waves = sweep.next_round(nodes, measured, floor)
    return measured
