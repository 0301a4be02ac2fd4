"""What `lightkeeper status` says while no lighthouse answers: the groups know their epoch and step themselves."""

from __future__ import annotations

import datetime
import json as json_module
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightkeeper.cli.calls import Said, call
from lightkeeper.errors import RunFolderError, ToldError, UsageError
from lightkeeper.manager import exits

if TYPE_CHECKING:
    from lightkeeper.events.schema import Event, ProcessEnded

MANAGERS_MAX = 64  # asked one after another
STANDS_S_MIN = 2.0  # a vote is answered in milliseconds; a rank of a group that votes long before another is no news


@dataclass(frozen=True)
class Found:
    """What a run's events say of its managers.

    Attributes:
        addresses: where the newest manager of each group listens, if it has not ended.
        ended: how and when the newest manager of a group ended, by group.
        why: why nobody can be found, empty if somebody is.
    """

    addresses: tuple[str, ...] = ()
    ended: Mapping[str, ProcessEnded] = field(default_factory=dict)
    why: str = ""


def managers_in(run_folder: Path | None, job: str) -> Found:
    """Where the managers listen, by the run's events."""
    from lightkeeper.events.reader import read_run
    from lightkeeper.events.schema import ProcessEnded, ProcessStarted

    if run_folder is None:
        return Found()
    try:
        events = [event for event in read_run(run_folder).events if event.job in ("", job)]
    except RunFolderError as error:
        return Found(why=str(error))
    newest = {e.process: e for e in events if isinstance(e, ProcessStarted) and e.listens}
    if not newest:
        return Found(why=f"no manager of job {job} has written to {run_folder}")
    ends = {_writer(e): e for e in events if isinstance(e, ProcessEnded) and e.child is None and e.rank is None}
    ended = {e.group or e.process: ends[_writer(e)] for e in newest.values() if _writer(e) in ends}
    return Found(tuple(e.listens for e in newest.values() if _writer(e) not in ends), ended)


def _writer(event: Event) -> tuple[str, str, int]:
    return event.process, event.host, event.pid


def show(said: list[Said], managers: tuple[str, ...], found: Found, job: str, token: str, json: bool) -> int:
    """Asks the managers and prints what they say.

    Args:
        said: how the lighthouses did not answer.
        managers: ``host:port`` of at least one group's manager; each names those of its epoch's other members.
        found: what the run's events say, where no manager was named.
        job: the job's id.
        token: the job's token.
        json: print one JSON object instead of a table.

    Raises:
        ToldError: nobody answers at all.
        UsageError: a lighthouse answers, and neither it nor any manager knows the job; or the token is wrong.
    """
    states, silent = _ask(managers or found.addresses, job, token)
    if not states:
        raise _nobody(said, managers or found.addresses, found)
    if json:
        from google.protobuf.json_format import MessageToDict

        groups = [MessageToDict(state, preserving_proto_field_name=True) for state in states]
        lighthouses = [{"address": one.address, "says": one.details} for one in said]
        told = {"lighthouses": lighthouses, "groups": groups, "no_answer": sorted(silent)}
        sys.stdout.write(json_module.dumps({**told, "in_touch_with": in_touch_with(states)}) + "\n")
        return 0
    for line in lines(said, states, silent, job):
        print(line)
    for text in _ends(found):
        print(text)
    _table(states)
    return 0


def elsewhere(managers: tuple[str, ...], asked: tuple[str, ...], job: str, token: str) -> str:
    """That the groups are in touch with another lighthouse than those asked; empty if nobody says so."""
    try:
        states, _ = _ask(managers, job, token)
    except UsageError:  # other processes listen there by now: the lighthouse took the token
        return ""
    at = [address for address in in_touch_with(states) if address not in asked]
    return _ask_that_one(at) if at else ""


def in_touch_with(states: list[Any]) -> list[str]:
    """Addresses of the lighthouses that groups are in touch with."""
    return sorted({state.at for state in states if state.in_touch and state.at})


def lines(said: list[Said], states: list[Any], silent: dict[str, str], job: str) -> list[str]:
    """For the person on call: what is away, what the job does meanwhile, and what it waits for."""
    places = ", ".join(f"{one.address} ({one.details})" for one in said)
    told = [
        f"no lighthouse knows the job at {places}" if any(not o.nobody for o in said) else f"no lighthouse: {places}"
    ]
    at = in_touch_with(states)
    told += [_ask_that_one(at)] if at else []
    newest = max(states, key=lambda state: (state.membership.epoch.number, state.step))
    told.append(_how_it_goes(newest, states, bool(at), job))
    told += [f"a lighthouse says: {text}" for text in sorted({state.standby for state in states if state.standby})]
    told += [f"{state.group} is over: {state.over}" for state in states if state.over]
    if newest.HasField("membership"):
        inside = _inside(newest, states)
        told += [
            f"{s.group} is no member of it, and waits to come in" for s in states if s not in inside and not s.over
        ]
    told += [f"no answer from {name}, a member, at {address}" for name, address in sorted(silent.items())]
    return told


def _ask_that_one(at: list[str]) -> str:
    return f"the groups are in touch with the lighthouse at {', '.join(at)}: ask that one (--lighthouse {at[0]})"


def _how_it_goes(newest: Any, states: list[Any], in_touch: bool, job: str) -> str:
    """Whether the job runs or stands, by who is in its newest epoch."""
    away_s = min(state.away_ms for state in states) / 1000
    away = "" if in_touch else f"no lighthouse for {away_s:.0f} s, "
    if not newest.HasField("membership"):
        without = "" if in_touch else f"; its groups have been without a lighthouse for {away_s:.0f} s"
        return f"job {job} has not begun{without}"
    epoch, step = newest.membership.epoch.number, newest.step
    inside = _inside(newest, states)
    waiting = [state for state in inside if state.waiting_ms > 0]
    waiting_s = max((state.waiting_ms for state in waiting), default=0) / 1000
    suspects = _suspects(newest, states, inside)
    if not waiting or (waiting_s <= STANDS_S_MIN and not suspects):
        return f"{away}running on epoch {epoch} at step {step}: nothing is lost"
    stands = f"job {job} stands at step {step} of epoch {epoch} since {waiting_s:.0f} s"
    if in_touch:
        return f"{stands}; their lighthouse says for whom"
    if suspects:
        broke = f"the connection to {', '.join(suspects)} broke, and there is no lighthouse to leave it out"
        return f"{stands}: {broke}; start one, it goes on by itself"
    names = ", ".join(state.group for state in waiting)
    return f"{stands}: no answer for {names}, and there is no lighthouse to decide; start one, it goes on by itself"


def _inside(newest: Any, states: list[Any]) -> list[Any]:
    """Who is a member of the newest epoch, in the incarnation that it names, and has not ended."""
    members = {(member.group, member.incarnation) for member in newest.membership.members}
    return [state for state in states if (state.group, state.incarnation) in members and not state.over]


def _suspects(newest: Any, states: list[Any], inside: list[Any]) -> list[str]:
    """Members whose connection broke and who do not answer; a later incarnation answers for itself alone."""
    answering, started_again = {s.group for s in inside}, {s.group for s in states if not s.over}
    names = sorted({name for state in inside for name in state.suspects} - answering)
    incarnations = {member.group: member.incarnation for member in newest.membership.members}
    return [
        f"the earlier processes of {name} (incarnation {incarnations.get(name, 'unknown')})"
        if name in started_again
        else name
        for name in names
    ]


def _ask(managers: tuple[str, ...], job: str, token: str) -> tuple[list[Any], dict[str, str]]:
    """States of the groups whose managers answer, and the members whose managers do not.

    Raises:
        UsageError: nobody answers but somebody who refuses the token.
    """
    from lightkeeper.protos import manager_pb2

    todo, asked = list(managers), set[str]()
    states: dict[str, Any] = {}
    unanswered: set[str] = set()
    denied = ""
    while todo and len(asked) < MANAGERS_MAX:
        address = todo.pop(0)
        if address in asked:
            continue
        asked.add(address)
        said = call("Manager", "GroupState", address, manager_pb2.GroupStateRequest(), job, token)
        if said.reply is None:
            unanswered.add(address)
            if said.code == "UNAUTHENTICATED":
                denied = denied or f"the manager at {address} says: {said.details}"
            continue
        states[said.reply.group] = said.reply
        todo += [member.manager for member in said.reply.membership.members]
    if denied and not states:
        raise UsageError(denied)
    members = {m.group: m.manager for state in states.values() for m in state.membership.members}
    silent = {name: address for name, address in members.items() if address in unanswered}
    return [states[name] for name in sorted(states)], silent


def _nobody(said: list[Said], managers: tuple[str, ...], found: Found) -> ToldError:
    ends = "; ".join(_ends(found))
    unknown = next((one for one in said if not one.nobody), None)
    if unknown is not None:
        reason = ends or "it has not begun, or it has ended and is forgotten"
        return UsageError(f"the lighthouse at {unknown.address} says: {unknown.details} ({reason})")
    places = "; ".join(f"{one.address}: {one.details}" for one in said)
    if found.why and not managers:
        return UsageError(f"no lighthouse answers at {places}; {found.why}")
    if managers:
        hint = "no manager answers either" + (f"; {ends}" if ends else "")
    else:
        hint = ends or "--manager HOST:PORT or --run-folder DIR asks the groups themselves"
    return ToldError(f"no lighthouse answers at {places}; {hint}")


def _ends(found: Found) -> list[str]:
    """How the groups ended that have, and what to do about it."""
    if not found.ended:
        return []
    words = {exits.REFUSED: "refused", exits.FENCED: "left out", exits.GAVE_UP: "gave up", exits.STOPPED: "job stopped"}
    ends = []
    for name, end in sorted(found.ended.items()):
        at = datetime.datetime.fromtimestamp(end.wall)
        word = f", {words[end.exit_code]}" if end.exit_code in words else ""
        ends.append(f"{name} at {at:%Y-%m-%d %H:%M:%S} (exit code {end.exit_code}{word})")
    some = "groups have ended" if found.addresses else "all groups have ended"
    again = "" if all(end.exit_code == 0 for end in found.ended.values()) else "; start the groups again"
    return [f"{some}: {', '.join(ends)}{again}"]


def _table(states: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column in ("group", "epoch", "step", "phase", "no lighthouse for", "waiting for an answer"):
        table.add_column(column)
    for state in states:
        away = "in touch" if state.in_touch else f"{state.away_ms / 1000:.0f} s"
        waiting = f"{state.waiting_ms / 1000:.0f} s" if state.waiting_ms else "-"
        epoch = str(state.membership.epoch.number) if state.HasField("membership") else "-"
        phase = "over" if state.over else state.phase
        table.add_row(*map(Text, (state.group, epoch, str(state.step), phase, away, waiting)))
    Console(highlight=False).print(table)
