"""What `lightkeeper status` says while no lighthouse answers: the groups know their epoch and step themselves."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Any

from lightkeeper.cli.calls import Said, call
from lightkeeper.errors import RunFolderError, ToldError, UsageError

MANAGERS_MAX = 64  # asked one after another


def managers_in(run_folder: Path | None) -> tuple[str, ...]:
    """Where the newest manager of each group listens, by the run's events; empty if nobody knows."""
    from lightkeeper.events.reader import read_run
    from lightkeeper.events.schema import ProcessStarted

    if run_folder is None:
        return ()
    try:
        events = read_run(run_folder).events
    except RunFolderError:
        return ()
    newest = {e.process: e.listens for e in events if isinstance(e, ProcessStarted) and e.listens}
    return tuple(newest.values())


def show(said: list[Said], managers: tuple[str, ...], job: str, token: str, json: bool) -> int:
    """Asks the managers and prints what they say.

    Args:
        said: how the lighthouses did not answer.
        managers: ``host:port`` of at least one group's manager; each names those of its epoch's other members.
        job: the job's id.
        token: the job's token.
        json: print one JSON object instead of a table.

    Raises:
        ToldError: nobody answers at all.
        UsageError: a lighthouse answers, and neither it nor any manager knows the job.
    """
    states, silent = _ask(managers, job, token)
    if not states:
        raise _nobody(said, managers)
    if json:
        from google.protobuf.json_format import MessageToDict

        groups = [MessageToDict(state, preserving_proto_field_name=True) for state in states]
        lighthouses = [{"address": one.address, "says": one.details} for one in said]
        text = json_module.dumps({"lighthouses": lighthouses, "groups": groups, "no_answer": sorted(silent)})
        sys.stdout.write(text + "\n")
        return 0
    for line in lines(said, states, silent, job):
        print(line)
    _table(states)
    return 0


def lines(said: list[Said], states: list[Any], silent: dict[str, str], job: str) -> list[str]:
    """For the person on call: what is away, what the job does meanwhile, and what it waits for."""
    places = ", ".join(f"{one.address} ({one.details})" for one in said)
    away_s = min(state.away_ms for state in states) / 1000
    told = [
        f"no lighthouse knows the job at {places}" if any(not o.nobody for o in said) else f"no lighthouse: {places}"
    ]
    newest = max(states, key=lambda state: (state.membership.epoch.number, state.step))
    epoch, step = newest.membership.epoch.number, newest.step
    waiting_s = max(state.waiting_ms for state in states) / 1000
    suspects = sorted({name for state in states for name in state.suspects} - {s.group for s in states if not s.over})
    if not newest.HasField("membership"):
        told.append(f"job {job} has not begun; its groups have been without a lighthouse for {away_s:.0f} s")
    elif suspects and waiting_s > 0:
        told.append(
            f"job {job} stands at step {step} of epoch {epoch} since {waiting_s:.0f} s: the connection to "
            f"{', '.join(suspects)} broke, and there is no lighthouse to leave it out; start one, it goes on by itself"
        )
    else:
        told.append(f"no lighthouse for {away_s:.0f} s, running on epoch {epoch} at step {step}: nothing is lost")
    told += [f"standby: {text}" for text in sorted({state.standby for state in states if state.standby})]
    told += [f"{state.group} is over: {state.over}" for state in states if state.over]
    told += [f"no answer from {name}, a member, at {address}" for name, address in sorted(silent.items())]
    return told


def _ask(managers: tuple[str, ...], job: str, token: str) -> tuple[list[Any], dict[str, str]]:
    """States of the groups whose managers answer, and the members whose managers do not."""
    from lightkeeper.protos import manager_pb2

    todo, asked = list(managers), set[str]()
    states: dict[str, Any] = {}
    unanswered: set[str] = set()
    while todo and len(asked) < MANAGERS_MAX:
        address = todo.pop(0)
        if address in asked:
            continue
        asked.add(address)
        said = call("Manager", "GroupState", address, manager_pb2.GroupStateRequest(), job, token)
        if said.reply is None:
            unanswered.add(address)
            continue
        states[said.reply.group] = said.reply
        todo += [member.manager for member in said.reply.membership.members]
    members = {m.group: m.manager for state in states.values() for m in state.membership.members}
    silent = {name: address for name, address in members.items() if address in unanswered}
    return [states[name] for name in sorted(states)], silent


def _nobody(said: list[Said], managers: tuple[str, ...]) -> ToldError:
    unknown = next((one for one in said if not one.nobody), None)
    if unknown is not None:
        reason = "it has not begun, or it has ended and is forgotten"
        return UsageError(f"the lighthouse at {unknown.address} says: {unknown.details} ({reason})")
    places = "; ".join(f"{one.address}: {one.details}" for one in said)
    hint = (
        "no manager answers either"
        if managers
        else "--manager HOST:PORT or --run-folder DIR asks the groups themselves"
    )
    return ToldError(f"no lighthouse answers at {places}; {hint}")


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
