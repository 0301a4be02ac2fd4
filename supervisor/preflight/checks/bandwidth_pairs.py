"""How fast this node reduces with others, two at a time: it tells a slow node from a slow link (`sweep.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightkeeper.supervisor.preflight import sweep
from lightkeeper.supervisor.preflight.meeting import Place
from lightkeeper.supervisor.preflight.ranks import Ranks, longest_s
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import FAILED, Result, failed, ok, skipped
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
    own = earlier.get("bandwidth-node")
    fit = own is None or own.state != FAILED
    ranks = Ranks(request, 1)
    try:
        if fit and (why := ranks.start()):
            return failed(why)
        heard = place.exchange("pairs", fit, READY_S)
        unfit = [node for node, value in sorted(heard.values.items()) if not value]
        nodes = [node for node in sorted(heard.values) if node not in unfit]
        evidence = {"missing": list(heard.missing), "named": unfit}
        if not fit:
            return skipped("this node's ranks do not reduce among each other as they should", evidence)
        if len(nodes) < 2:
            return skipped("no other node is left" + without(heard.missing), evidence)
        floor = request.floors.get(FIGURE, None if request.sweep else DONE_GBPS)
        measured, gone = _rounds(request, place, ranks, nodes, floor)
    finally:
        ranks.end()
    return judged(request, measured, floor, (*heard.missing, *gone), unfit)


def judged(
    request: Request,
    measured: Mapping[Pair, float],
    floor: float | None,
    missing: Sequence[int] = (),
    unfit: Sequence[int] = (),
) -> Result:
    """What the pairs say of this node; `unfit` have said themselves that they are not to be paired."""
    found = sweep.judge(measured, floor)
    mine = {pair: gbps for pair, gbps in measured.items() if request.node_rank in pair}
    named = sorted({*unfit, *found.nodes, *(node for pair in found.unclear for node in pair)})
    # with those that are named everybody is slow: a floor is made of what is left
    sound = [gbps for pair, gbps in mine.items() if not set(pair) & (set(named) - {request.node_rank})]
    slowest = min(sound or mine.values(), default=0.0)
    figures = {FIGURE: slowest} if slowest > 0 else {}
    evidence = {
        "gbps": {f"{a}-{b}": round(gbps, 4) for (a, b), gbps in sorted(measured.items())},
        "limit_gbps": found.limit_gbps, "named": named, "links": [list(pair) for pair in found.links],
        "missing": list(missing),
    }  # fmt: skip
    if against := found.named(request.node_rank):
        told = ", ".join(f"{gbps:.3g} GB/s with {a + b - request.node_rank}" for (a, b), gbps in mine.items())
        return failed(f"{against}: {told}; {found.limit_gbps:.3g} is the limit", evidence, figures)
    judge = "" if floor != DONE_GBPS else " (no floor: not judged)"
    told = f"{FIGURE} {slowest:.3g} with {len(sound)} of {len(mine)} partners{judge}"
    return ok(f"{told}; {found.line()}{without(tuple(missing))}", evidence, figures)


def _rounds(
    request: Request, place: Place, ranks: Ranks, nodes: list[int], floor: float | None
) -> tuple[dict[Pair, float], list[int]]:
    """What each pair reached, and who fell silent meanwhile: with those no pair gets done."""
    measured: dict[Pair, float] = {}
    gone: list[int] = []
    waves = sweep.neighbours(nodes)
    for number in range(1, sweep.ROUNDS_MAX + 1):
        for wave, pairs in enumerate(waves[:WAVES_MAX]):
            live = [pair for pair in pairs if not set(pair) & set(gone)]
            mine = _measured(request.node_rank, ranks, live, f"pair-{number}")
            # together again after each wave, or who was held up by a silent partner would be missed by the next one
            wait_s = longest_s(PAIR_S) + SPARE_S
            heard = place.exchange(f"pairs-{number}-{wave}", mine, wait_s, set(nodes) - set(gone))
            gone += heard.missing
            for pair in pairs:
                both = [heard.values.get(node) for node in pair] if pair in live else [None]
                measured[pair] = min(0.0 if gbps is None else float(gbps) for gbps in both)
        if sweep.settled(measured, floor) and (number > 1 or not request.sweep):
            break
        waves = sweep.next_round(nodes, measured, floor)
        if not waves:
            break
    return measured, gone


def _measured(node: int, ranks: Ranks, pairs: list[Pair], name: str) -> float | None:
    """This node's part in a wave; None if it has none."""
    for pair in pairs:
        if node in pair:
            return ranks.measure(f"{name}-{pair[0]}-{pair[1]}", pair.index(node), 2, PAIR_S).gbps
    return None
