"""From the lines of a log to the one that decides.

Every line that a rule has is a hit. Which hit decides:

1. Of a chain of exceptions one hit remains: the first, or the first that says more than that something was raised.
2. What the run survived (steps went on after it) counts only if nothing else is found.
3. Causes before symptoms, symptoms before what victims say, victims before a launcher's account.
4. Among equals the earliest: what came after it came because of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lightkeeper.diagnose.lines import Line, clean
from lightkeeper.diagnose.rules import LEVELS, Rule, book
from lightkeeper.diagnose.tracebacks import Place, Tracebacks

STEPS_SURVIVED = 3  # so many later steps show that a line was not the end
HITS_MAX = 20_000  # of one log: a watchdog may say the same for hours
LINE_CHARS_MAX = 300
DOUBT = 0.7  # of an exception that Python went on after, or whose traceback is not there
VICTIM = LEVELS.index("victim")
SAID_AGAIN_LINES = 200  # an exception so soon after its rank was left alone is about that
_PROGRESS = re.compile(
    r"(?i)\b(?:global[ _]?step|step|iter(?:ation)?|update|batch)s?\b[\s:=/\[\]\"'#]*(?P<step>\d+)\b.*"
    r"\b(?:loss|lr|learning[ _]rate|tokens?|tok/s|tps|grad|it/s|s/it|mfu|time|ms|ppl)\b"
    r"|\b(?P<bar>\d+)/\d+ \[[\d:]+<"
)
_EXCEPTION = re.compile(
    r"^(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Failed|Exit)\b(?:\[.*?\]|\(.*?\))?(?::|$)"
)
_NAMED = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?::|\(|\[|$)")
_DATA_CONFIDENCE = 0.7


@dataclass(frozen=True)
class Diagnosis:
    """Why a rank ended, by its log.

    Attributes:
        cause: one of the causes of `rules.toml`, "unknown" if no rule has a line.
        line: the deciding line, without the terminal's codes; "" if there is none.
        number: of that line, from 1; 0 if there is none.
        confidence: 0 to 1.
        rule: name of the rule.
        victim: whether somebody else failed first: the cause is to be looked for in another log.
        rank: whose line it is, if the log says so.
    """

    cause: str = "unknown"
    line: str = ""
    number: int = 0
    confidence: float = 0.0
    rule: str = ""
    victim: bool = False
    rank: int | None = None


@dataclass(frozen=True)
class _Hit:
    rule: Rule
    line: Line
    place: Place
    order: float  # of its level; a line that did not end the run comes after all others
    confidence: float


def classify(lines: Iterable[str]) -> Diagnosis:
    """The cause that a log tells.

    Args:
        lines: the log, or its end, in order; a rank's own or that of several.

    Returns:
        The cause with the line that decides, "unknown" if no line says anything.
    """
    hits, steps = _hits(lines)
    hits = [_survived(hit, steps) for hit in _heads(hits)]
    hits = _explained(hits)
    if not hits:
        return Diagnosis()
    best = min(hits, key=lambda hit: (hit.order, hit.line.number))
    rule, cause, confidence = best.rule, best.rule.cause, best.confidence
    if rule.general and best.place.loader:
        cause, confidence = "data", max(confidence, _DATA_CONFIDENCE)
    said = best.line.raw[:LINE_CHARS_MAX]
    return Diagnosis(cause, said, best.line.number, confidence, rule.name, rule.level == "victim", best.line.rank)


def confidence_of(line: str, cause: str) -> float:
    """How sure one line alone is of a cause that was found by it; of another cause it is so at most by half.

    Returns:
        0 if no rule has it: it is a warning, or of another group.
    """
    found = [classify([line])]
    if any(_NAMED.match(one.text) for one in clean([line])):  # it stood at the end of a traceback
        found.append(classify(["Traceback (most recent call last):", line]))
    same = [one.confidence for one in found if one.cause == cause]
    return max(same, default=max(min(one.confidence, 0.5) for one in found))


def _hits(lines: Iterable[str]) -> tuple[list[_Hit], list[tuple[int, int]]]:
    """Every line that a rule has, and every line (its number, the step) that shows progress."""
    rules, tracebacks = book(), Tracebacks()
    hits: list[_Hit] = []
    steps: list[tuple[int, int]] = []
    known: dict[tuple[str, bool, bool], Rule | None] = {}
    for line in clean(lines):
        place = tracebacks.place(line)
        if place.part == "stack":
            continue
        text = line.text.strip()
        told = place.part == "exception"
        exception = told or (not line.quiet and _EXCEPTION.match(text) is not None)
        key = (text, line.quiet, exception)
        if key not in known:
            if len(known) > HITS_MAX:
                known.clear()
            known[key] = rules.first(text, line.quiet and not told, exception)
        rule = known[key]
        if rule is None:
            if found := _PROGRESS.search(text):
                steps.append((line.number, int(found["step"] or found["bar"])))
            continue
        if len(hits) < HITS_MAX:
            order = rule.order + (1 if place.ignored and rule.order == 0 else 0)
            doubt = place.ignored or (rule.general and not told)
            hits.append(_Hit(rule, line, place, order, round(rule.confidence * (DOUBT if doubt else 1.0), 2)))
    return hits, steps


def _heads(hits: list[_Hit]) -> list[_Hit]:
    """One hit of every chain of exceptions, and all hits outside of chains."""
    chains: dict[int, list[_Hit]] = {}
    alone: list[_Hit] = []
    for hit in hits:
        (chains.setdefault(hit.place.chain, []) if hit.place.part == "exception" else alone).append(hit)
    return alone + [_head(chain) for chain in chains.values()]


def _head(chain: list[_Hit]) -> _Hit:
    own = [hit for hit in chain if hit.rule.level != "summary"] or chain
    first = own[0]
    if not first.rule.general:
        return first
    telling = (hit for hit in own if hit.rule.level != "victim" and not hit.rule.general)
    return replace(next(telling, first), place=first.place)


def _survived(hit: _Hit, steps: list[tuple[int, int]]) -> _Hit:
    later = {step for number, step in steps if number > hit.line.number}
    if len(later) < STEPS_SURVIVED:
        return hit
    return replace(hit, order=hit.order + 10, confidence=round(hit.confidence / 2, 2))


def _explained(hits: list[_Hit]) -> list[_Hit]:
    """With what only says again what a victim has said counted as a victim's word.

    That is a general exception soon after it in the same rank's log, and a general symptom of the same cause anywhere.
    """
    victims = {hit.rule.cause for hit in hits if hit.rule.level == "victim"}
    told: dict[int | None, list[int]] = {}
    for hit in hits:
        if hit.rule.level == "victim":
            told.setdefault(hit.line.rank, []).append(hit.line.number)

    def again(hit: _Hit) -> bool:
        if not hit.rule.general or hit.order >= VICTIM:
            return False
        if hit.rule.level == "symptom":
            return hit.rule.cause in victims
        near = range(hit.line.number - SAID_AGAIN_LINES, hit.line.number)
        return any(number in near for number in told.get(hit.line.rank, []))

    return [replace(hit, order=VICTIM + 0.5) if again(hit) else hit for hit in hits]
