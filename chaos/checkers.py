"""What must hold of a job that was struck. Pure functions over its events and its end; a check that lacks what it needs
does not hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightkeeper.chaos.faults import Plan
from lightkeeper.events import summary
from lightkeeper.events.lineage import live_groups, pick
from lightkeeper.events.of_checkpoints import CheckpointLoaded, CheckpointSaved
from lightkeeper.events.of_supervisor import GroupEnded
from lightkeeper.events.schema import Activated, Adopted, Committed, Event, FaultInjected, GroupLost, Recovered, kind_of
from lightkeeper.events.summary import Finding
from lightkeeper.events.verdict import Incident, incidents
from lightkeeper.lighthouse.messages import FIRST_EPOCH

MORE_DESCRIPTORS_MAX = 6  # a poll, a log, a connection that is being made; a group that is not closed has more


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was asked.
        holds: whether it is so.
        text: the answer in words.
        value: its figure, if it has one.
    """

    name: str
    holds: bool
    text: str
    value: float | int | None = None


@dataclass(frozen=True)
class Struck:
    """One fault that was done to the job.

    Attributes:
        plan: which, and to whom.
        back: the groups that came back.
    """

    plan: Plan
    back: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What is left of a run.

    Attributes:
        events: its event log.
        groups: the job's.
        struck: the faults, in order; each has at least one `fault_injected`.
        exit_codes: of the launchers and the lighthouse.
        leftovers: processes that outlived their group.
        before: open descriptors by process, before the first fault.
        after: the same at the end.
        trouble: why the run was given up; empty if it was not.
        supervised: whether a supervisor had to say of every end whose fault it was.
    """

    events: Sequence[Event]
    groups: tuple[str, ...]
    struck: Sequence[Struck]
    exit_codes: Mapping[str, int | None] = field(default_factory=dict)
    leftovers: Sequence[str] = ()
    before: Mapping[str, int] = field(default_factory=dict)
    after: Mapping[str, int] = field(default_factory=dict)
    trouble: str = ""
    supervised: bool = False


def check(outcome: Outcome) -> list[Check]:
    """Every rule, in the order in which a person asks."""
    checks = [] if not outcome.trouble else [Check("the run", False, outcome.trouble)]
    for struck, window, found in zip(outcome.struck, windows(outcome), verdicts(outcome), strict=True):
        prefix = f"{struck.plan.fault.name} of {struck.plan.victim}: " if len(outcome.struck) > 1 else ""
        checks += [
            fired(prefix, struck.plan, window), blamed(prefix, struck.plan, window),
            judged(prefix, struck.plan, found), released(prefix, struck.plan, window),
            followed(prefix, struck.plan, window), back(prefix, struck),
        ]  # fmt: skip
        if outcome.supervised:
            checks.append(attributed(prefix, struck.plan, window))
        if struck.plan.fault.expected.back_to_disk:
            checks.append(redone(prefix, outcome.events, window))
    if not outcome.struck:
        checks.append(Check("fault", False, "none was done"))
    return [*checks, *state(outcome), ended(outcome), Check(
        "processes left over", not outcome.leftovers, ", ".join(outcome.leftovers) or "none",
    ), descriptors(outcome)]  # fmt: skip


# --- one fault ----------------------------------------------------------------------------------------------


def windows(outcome: Outcome) -> list[list[Event]]:
    """Of each fault, the events from its own first `fault_injected` to the next fault's."""
    return [list(outcome.events[start:end]) for start, end in _places(outcome)]


def verdicts(outcome: Outcome) -> list[list[Incident]]:
    """Of each fault, the incidents that its events made."""
    return [new_incidents(outcome.events[:end], outcome.events[:start]) for start, end in _places(outcome)]


def new_incidents(events: Sequence[Event], before: Sequence[Event]) -> list[Incident]:
    """Those that `before`, the beginning of `events`, did not have."""
    known = {(i.culprit.group, i.culprit.kind, i.culprit.since) for i in incidents(before)}
    return [i for i in incidents(events) if (i.culprit.group, i.culprit.kind, i.culprit.since) not in known]


def _places(outcome: Outcome) -> list[tuple[int, int]]:
    starts, place = [], 0
    for struck in outcome.struck:
        place = next((i for i in range(place, len(outcome.events)) if _is_of(outcome.events[i], struck.plan)), place)
        starts.append(place)
        place = _after_hits(outcome.events, place, max(1, len(struck.plan.hits)))
    return list(zip(starts, [*starts[1:], len(outcome.events)], strict=False))


def _after_hits(events: Sequence[Event], place: int, hits: int) -> int:
    """The place behind so many faults from `place` on: an act that hits several groups at once says so of each."""
    while hits and place < len(events):
        hits -= isinstance(events[place], FaultInjected)
        place += 1
    return place


def _is_of(event: Event, plan: Plan) -> bool:
    if not isinstance(event, FaultInjected):
        return False
    inside = plan.fault.inside.partition(":")[0].partition("=")[0]
    return event.fault == (inside or plan.fault.name) and event.group in (plan.victim, "")


def fired(prefix: str, plan: Plan, window: Sequence[Event]) -> Check:
    """The fault was done, to whom it was meant for, and where."""
    found = pick(window, FaultInjected)
    if not found or not _is_of(found[0], plan):
        return Check(f"{prefix}fault", False, "it did not strike")
    phase = plan.fault.inside.partition(":")[2]
    text = ", then ".join(f"{e.fault} of {e.target}{f' in {e.phase}' if e.phase else ''}, step {e.step}" for e in found)
    wanted = max(1, len(plan.hits)) + (plan.fault.then is not None or bool(plan.inside_again))
    holds = found[0].phase == phase and len(found) == wanted
    return Check(f"{prefix}fault", holds, text if holds else f"{text}: expected {wanted}, in {phase or 'no phase'}")


def blamed(prefix: str, plan: Plan, window: Sequence[Event]) -> Check:
    """Exactly those that must be are lost, the victim found as it must be."""
    lost = pick(window, GroupLost)
    told = ", ".join(f"{e.group} ({e.cause}, found by {e.detected_by})" for e in lost) or "nobody"
    if {e.group for e in lost} != plan.expects_lost:
        return Check(f"{prefix}blamed", False, f"{told}; expected {', '.join(sorted(plan.expects_lost)) or 'nobody'}")
    by = {e.detected_by for e in lost if e.group == plan.victim}
    if plan.fault.expected.by and not by <= set(plan.fault.expected.by):
        return Check(f"{prefix}blamed", False, f"{told}; expected found by {' or '.join(plan.fault.expected.by)}")
    hit = {e.incarnation for e in pick(window, FaultInjected) if e.group}
    strange = [e for e in lost if e.incarnation and hit and "" not in hit and e.incarnation not in hit]
    if strange:
        return Check(f"{prefix}blamed", False, f"{told}; {strange[0].group} was not hit in this incarnation")
    return Check(f"{prefix}blamed", True, told)


def judged(prefix: str, plan: Plan, found: Sequence[Incident]) -> Check:
    """The verdicts hold those guilty that were hit, as what they were, and nobody else."""
    name, expected = f"{prefix}verdict", plan.fault.expected
    held = [culprit for incident in found for culprit in (incident.culprit, *incident.others)]
    told = ", ".join(f"{c.group or 'nobody'} ({c.kind}, {c.confidence:.2f})" for c in held) or "no incident"
    wanted = plan.expects_lost | ({plan.victim} if "slow" in expected.verdict else set())
    if {culprit.group for culprit in held if culprit.group} != wanted:
        return Check(name, False, f"{told}; expected {', '.join(sorted(wanted)) or 'nobody'}")
    kinds = {culprit.kind for culprit in held if culprit.group in ("", plan.victim)}
    if expected.verdict and (not kinds or not kinds <= set(expected.verdict)):
        return Check(name, False, f"{told}; expected {' or '.join(expected.verdict)}")
    return Check(name, True, told)


def released(prefix: str, plan: Plan, window: Sequence[Event]) -> Check:
    """Each loss was said within the bound, counted from the fault in that group."""
    name, worst = f"{prefix}seen after", 0.0
    for fault in pick(window, FaultInjected):
        if fault.group not in plan.expects_lost:
            continue
        found = summary.detected_after(window, fault)
        if found.value is None:
            return Check(name, False, found.why)
        worst = max(worst, float(found.value))
    if not plan.expects_lost:
        return Check(name, True, "nobody is to be lost")
    limit_s = plan.fault.expected.within_s
    return Check(name, worst <= limit_s, f"{worst:.2f} s, at most {limit_s:g} s", round(worst, 3))


def followed(prefix: str, plan: Plan, window: Sequence[Event]) -> Check:
    """The events that must follow are there, those that must not are not, and a step was repeated if it must be."""
    expected, problems = plan.fault.expected, []
    kinds = {(kind_of(event), event.group) for event in window}
    problems += [f"no {kind} about {plan.victim}" for kind in expected.kinds if (kind, plan.victim) not in kinds]
    problems += [f"{kind} about {group}" for kind, group in sorted(kinds) if kind in expected.none]
    repeated = len(pick(window, Recovered)) + len(pick(window, Adopted))
    if expected.recovery and not repeated:
        problems.append("no step was repeated")
    stuck = {group for kind, group in kinds if kind == "stuck"} - {plan.victim}
    problems += [f"{group}, which waits for others, was called stuck" for group in sorted(stuck)]
    seen = ", ".join(kind for kind in expected.kinds) or "nothing else had to"
    return Check(f"{prefix}followed", not problems, "; ".join(problems) or seen)


def back(prefix: str, struck: Struck) -> Check:
    """Who was lost and comes back has."""
    plan = struck.plan
    wanted = plan.expects_lost - plan.stays_away
    missing = sorted(wanted - set(struck.back))
    text = f"{', '.join(missing)} did not come back" if missing else ", ".join(struck.back) or "nobody had to"
    return Check(f"{prefix}came back", not missing, text)


def attributed(prefix: str, plan: Plan, window: Sequence[Event]) -> Check:
    """The supervisor has said of the end of each group that was hit whose fault it was, and of no other.

    What ends because the run is finished, or because too few were left and the whole job starts again, is nobody's.
    """
    ended = [e for e in pick(window, GroupEnded) if e.failure not in ("finished", "quorum", "ended")]
    told = "; ".join(f"{e.group}: {e.whose} ({e.failure})" for e in ended) or "nobody ended"
    wanted = set(plan.expects_lost) | ({plan.victim} if plan.fault.expected.whose == ("nobody",) else set())
    wrong = sorted({e.group for e in ended} ^ wanted)
    strange = [e for e in ended if e.whose not in plan.fault.expected.whose]
    if wrong or strange:
        return Check(f"{prefix}attributed", False, f"{told}; expected of {', '.join(sorted(wanted)) or 'nobody'}: "
                     f"{' or '.join(plan.fault.expected.whose)}")  # fmt: skip
    return Check(f"{prefix}attributed", True, told)


def redone(prefix: str, events: Sequence[Event], window: Sequence[Event]) -> Check:
    """When nobody is left, the run goes on from the newest checkpoint that was whole then, in all groups."""
    name = f"{prefix}went on from"
    began = next((e for e in pick(window, Activated) if e.cause.startswith(FIRST_EPOCH)), None)
    if began is None:
        return Check(name, False, "the job did not begin again")
    saved = max((e.step for e in pick(events, CheckpointSaved) if e.wall <= began.wall), default=0)
    reached = 1 + max((e.step for e in pick(events, Committed) if e.wall <= began.wall), default=-1)
    loaded = sorted({e.step for e in pick(window, CheckpointLoaded) if e.wall <= began.wall}) or [0]
    text = f"step {began.first_step} of {reached}, the newest saved being {saved}; loaded: {loaded}"
    return Check(name, loaded == [saved] and began.first_step == saved, text, reached - saved)


# --- the run ------------------------------------------------------------------------------------------------


def state(outcome: Outcome) -> list[Check]:
    """Steps, samples and bits."""
    events = outcome.events
    torn = {s.plan.victim for s in outcome.struck if s.plan.fault.expected.torn_log}
    whole = [event for event in events if event.group not in torn or event.process == "lighthouse"]
    rules: list[tuple[str, Finding, str]] = [
        ("steps lost", summary.steps_lost(events), "0"),
        ("recomputed by survivors", summary.recomputed_by_survivors(whole), "0"),
        ("fingerprints equal", summary.fingerprints_equal(events), "yes"),
        ("one lineage", summary.one_lineage(events), "yes"),
    ]
    if not torn:
        once = summary.samples_exactly_once(events)
        rules.insert(2, ("samples exactly once", once, f"yes, {once.value} microbatches"))
    checks = [Check(name, finding.holds, finding.why or text, finding.value) for name, finding, text in rules]
    left = set(outcome.groups) - _gone_for_good(outcome)
    there = live_groups(events)
    text = ", ".join(sorted(there)) or "nobody"
    return [*checks, Check("trained to the end", there == left, text)]


def ended(outcome: Outcome) -> Check:
    """Exit codes: 0, but for groups that were not to come back."""
    wrong, gone = [], _gone_for_good(outcome)
    codes = {code for struck in outcome.struck for code in struck.plan.fault.expected.codes}
    for name, code in sorted(outcome.exit_codes.items()):
        if code != 0 and not (name in gone and code in codes):
            wrong.append(f"{name} {code}")
    if not outcome.exit_codes:
        return Check("exit codes", False, "nobody ended")
    return Check("exit codes", not wrong, ", ".join(wrong) or f"as they must be: {_words(outcome.exit_codes)}")


def _gone_for_good(outcome: Outcome) -> set[str]:
    return {group for struck in outcome.struck for group in struck.plan.stays_away}


def _words(codes: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name} {code}" for name, code in sorted(codes.items()))


def descriptors(outcome: Outcome) -> Check:
    """No process that was there before the fault and at the end has many more open descriptors."""
    both = sorted(set(outcome.before) & set(outcome.after))
    grown = {name: outcome.after[name] - outcome.before[name] for name in both}
    if not both:
        return Check("descriptors", False, "no process was looked at before and after")
    worst = max(grown, key=lambda name: grown[name])
    text = f"of {len(both)} processes at most {grown[worst]:+d} ({worst})"
    return Check("descriptors", grown[worst] <= MORE_DESCRIPTORS_MAX, text, grown[worst])


def as_dict(checks: Sequence[Check]) -> dict[str, Any]:
    """For ``--json`` and the journal."""
    return {
        "ok": all(each.holds for each in checks),
        "failed": {each.name: each.text for each in checks if not each.holds},
        "checks": {each.name: {"holds": each.holds, "text": each.text, "value": each.value} for each in checks},
    }
