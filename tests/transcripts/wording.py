"""Messages, answers and records in words, for transcripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightkeeper.lighthouse import messages as m
from lightkeeper.lighthouse.actions import Activated, Ended, Note, Promised
from lightkeeper.lighthouse.names import Entry, Membership
from lightkeeper.manager import local


def worded(what: Any) -> str | None:
    """One line, or None for what a transcript leaves out (beats, a hello without news, lines for logs)."""
    words = _WORDS.get(type(what))
    return None if words is None else words(what)


def _numbers(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers)) or "nothing"


def _groups(membership: Membership) -> str:
    names = (f"({g})" if g in membership.spares else g for g in membership.groups)  # spares stand in brackets
    unlike = len({speed for speed in membership.speeds if speed}) > 1
    speeds = f" at {' '.join(map(str, membership.speeds))}" if unlike else ""
    return f"e{membership.epoch.number} of {' '.join(names)}{speeds}"


def _entry(entry: Entry | None) -> str:
    if entry is None:
        return "no entry"
    return f"step {entry.step} of e{entry.epoch.number}" if entry.made else f"the state before step {entry.step + 1}"


def _hello(hello: m.Hello) -> str:
    words = f"Hello, {hello.incarnation}"
    if hello.acknowledged is not None:
        words += f", acknowledged term {hello.acknowledged}"
    if hello.known is not None:
        words += f", knows {_groups(hello.known)}"
    words += "".join(f", prepared {_groups(planned)}" for planned in hello.prepared)
    if hello.known is None or hello.promised > hello.known.epoch.number:
        words += f", promised e{hello.promised}" if hello.promised else ""
    return words + (", follows" if hello.follows else "")


def _promise(promise: m.Promise) -> str:
    words = f"Promise e{promise.epoch.number}, knows "
    words += "no epoch" if promise.known is None else f"e{promise.known.epoch.number}"
    words += "".join(f", prepared e{planned.epoch.number}" for planned in promise.prepared)
    return words + f", has {_entry(promise.last)}, holds {_numbers(promise.held)} of {promise.total}"


def _failed(failed: m.Failed) -> str:
    suspects = f", suspects {' '.join(failed.suspects)}" if failed.suspects else ""
    return f"Failed in e{failed.epoch.number} at step {failed.step}{suspects}: {failed.error}"


def _prepare(prepare: m.Prepare) -> str:
    if prepare.planned is not None:
        return f"Prepare {_groups(prepare.planned)} on e{prepare.planned.base.number if prepare.planned.base else 0}"
    return f"Prepare e{prepare.epoch.number}" + (f" on e{prepare.base.number}" if prepare.base else "")


def _activate(activate: m.Activate) -> str:
    words = f"Activate {_groups(activate.membership)} from step {activate.first_step}; shares "
    words += ", ".join(f"{share.group}: {_numbers(share.microbatches)}" for share in activate.shares)
    for donor in activate.donors:
        words += f"; {donor.group} fetches {_entry(activate.entry)} from {donor.donor}"
    return words


def _answer(answer: local.Answer) -> str:
    if answer.verdict == "go":
        if not answer.epoch:
            return f"follow on at step {answer.step}"
        words = f"go on at step {answer.step} of e{answer.epoch}, share {_numbers(answer.share)}"
        words += f", flag e{answer.ready}" if answer.ready else ""
        return words + (", copy the state first" if answer.copy else "")
    if answer.verdict == "recover":
        assert answer.plan is not None
        plan = answer.plan
        words = f"recover in e{plan.epoch} at step {plan.step}, share {_numbers(plan.share)} of {plan.total}"
        return words + (
            f", adopt step {plan.adopt.step} of e{plan.adopt.epoch} from {plan.adopt.donor}" if plan.adopt else ""
        )
    if answer.verdict == "heal":
        assert answer.source is not None
        return f"heal before step {answer.source.step} from {' '.join(name for name, _ in answer.source.donors)}"
    if answer.verdict == "stop":
        keep = ", keep what is committed" if answer.keep else ""
        return f"stop ({'well' if answer.ok else 'not well'}){keep}: {answer.reason}"
    return f"{answer.verdict} at step {answer.step}"


def _build(build: local.Build) -> str | None:
    return f"build e{build.plan.epoch} of {' '.join(build.plan.members)}" if build.plan.planned else None


def _note(note: Note) -> str | None:
    if note.kind not in (
        "group_lost",
        "fenced",
        "refused",
        "healing",
        "heal_failed",
        "build_failed",
        "waiting",
        "job_stopped",
        "promoted",
        "parked",
    ):
        return None
    fields = {name: value for name, value in note.fields.items() if name not in ("incarnation", "since_s")}
    return f"{note.kind} " + " ".join(f"{name}={value}" for name, value in fields.items())


def _promised(record: Promised) -> str:
    return f"number {record.number}" if record.planned is None else f"planned {_groups(record.planned)}"


_WORDS: dict[type, Callable[[Any], str | None]] = {
    m.Hello: _hello,
    m.Join: lambda join: "Join" + (f", with the state before step {join.step}" if join.step else ""),
    m.Promise: _promise,
    m.Failed: _failed,
    m.Died: lambda died: f"Died: {died.cause}",
    m.Leave: lambda leave: f"Leave: {leave.reason}",
    m.Left: lambda left: f"Left before step {left.step}, by e{left.epoch.number}",
    m.Drain: lambda drain: f"Drain: {drain.reason}" + (f", within {drain.deadline_ms} ms" if drain.deadline_ms else ""),
    m.Finished: lambda finished: f"Finished: step {finished.step} of e{finished.epoch.number} is the end",
    m.Query: lambda query: f"Query: does e{query.epoch.number} stand?",
    m.Unbuilt: lambda unbuilt: f"Unbuilt: e{unbuilt.epoch.number}: {unbuilt.error}",
    m.Lost: lambda lost: f"Lost: {lost.reason}",
    m.Welcome: lambda welcome: f"Welcome by term {welcome.term}",
    m.Refused: lambda refused: f"Refused{' for now' if refused.retry else ''}: {refused.reason}",
    m.Prepare: _prepare,
    m.Activate: _activate,
    m.Fence: lambda fence: f"Fence: {fence.reason}",
    m.Stop: lambda stop: f"Stop{', and keep it' if stop.keep else ''}: {stop.reason}",
    m.Waiting: lambda waiting: f"Waiting for {', '.join(waiting.whom)}: {waiting.why}",
    m.Outside: lambda outside: f"Outside, {outside.why}" if outside.why else None,
    m.Stands: lambda stands: f"Stands: e{stands.epoch.number}",
    m.Copy: lambda copy: "Copy no more" if copy.step == m.RELEASE else f"Copy before step {copy.step}",
    m.Heal: lambda heal: f"Heal before step {heal.step} from {' '.join(d.group for d in heal.donors)}",
    local.Answer: _answer,
    local.Abort: lambda abort: f"abort below e{abort.below}" if abort.below < 1 << 61 else "abort",
    local.Build: _build,
    local.Touch: lambda touch: "make memory for a copy ready",
    local.Instead: lambda instead: f"heal before step {instead.source.step} instead",
    local.Release: lambda release: "let go of the copy",
    Activated: lambda record: f"{_groups(record.membership)} is in force",
    Ended: lambda record: f"the end: {record.reason}",
    Promised: _promised,
    Note: _note,
}
