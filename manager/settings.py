"""Every option of a group, from arguments or from ``LIGHTKEEPER_*``."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightkeeper.errors import UsageError
from lightkeeper.lighthouse.spares import MEMBER, ROLES
from lightkeeper.manager.addresses import check_lighthouse, has_alternatives
from lightkeeper.manager.timeouts import BUDGET_S, DERIVED, Timeouts
from lightkeeper.wire import split_address
from lightkeeper.words import counted

PREFIX = "LIGHTKEEPER_"
STRANGE_CHARS_MAX = 400
GROUPS_MAX = 1_000_000
DEALS = ("speed", "even")
SLOWS = ("report", "evict")
NODES_MAX = 10_000
OTHER_VARIABLES = frozenset(
    [
        *("MEMBERS", "TOKEN_FILE", "RESTARTS", "WARM", "LOG_FOLDER"),  # options that are no fields
        "ENABLE",  # an integration's
        *("SOCKET", "PARENT", "LAUNCHER", "STARTED_AS"),  # from one of our processes to another
        *("QUARANTINE", "MESSAGE", "MESSAGE_SUBJECT", "MESSAGE_WHAT"),  # of nodes, and to a notifier's command
        *("FAULT", "REDUCTION"),  # for tests of a job
        *("SEED", "HISTORIES", "REWRITE", "PROTOC_PYTHON"),  # for this project's own tests
    ]
)
_OF_A_SERVICE = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_|$)")  # Kubernetes sets these after a service's name


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a group is told.

    Attributes:
        lighthouse: its address, ``host:port``; several with commas between, in the order in which they are tried; or
            ``file:PATH``, a file that holds them and is read for every connection.
        job: the job's id; jobs on one lighthouse do not meet.
        group: this replica group's stable name.
        groups: configured number of groups of the job.
        minimum: fewest groups with which the job goes on, spares among them.
        spares: how many of `groups` compute nothing while the others are there, and take over what one leaves.
        role: ``member``; ``spare``: the last to work; ``reserve``: none of `groups`, it waits until there is a place.
        start_window_s: if above 0, the first epoch may start with `minimum` groups after so long.
        ranks: trainer ranks of this group, on all its nodes.
        nnodes: nodes of this group; each has as many of its ranks.
        node_rank: which of them this is; the manager is on node 0.
        manager: ``host:port`` at which node 0 listens for the agents of the others; empty: any port, and the others ask
            the lighthouse.
        token: the job's token.
        run_folder: where events go; empty writes none.
        outage_budget_s: how long anything is waited for before the group gives up, in seconds. What else bounds a wait
            is derived from it; `timeouts` has them all.
        evidence_s, stall_floor_s, form_timeout_s, quorum_wait_s, stop_deadline_s, start_budget_s, first_step_s,
            reduce_timeout_s, collective_timeout_s: what `timeouts` is to have instead of what it derives; see
            `Timeouts`.
        host: address at which peers reach this node; empty takes the interface that routes to the lighthouse.
        bucket_mb: size of a gradient bucket, in MiB.
        history_mb: bound on the entries kept while a group joins, in MiB; beyond it the joiner starts over.
        slow: ``report``: a group that is slow for long is said to be; ``evict``: it is asked to leave where that pays.
        deal: ``speed``: who is slower gets fewer microbatches; ``even``: all get as many. Alike in all groups.
        notice_file: when this file appears the group leaves, within the seconds that it holds if it holds any; empty:
            no file is looked for.
        fingerprint_every: the state's fingerprint is written to the event log after every so many steps; 0 never.
    """

    lighthouse: str = "127.0.0.1:29400"
    job: str = "job"
    group: str = "g0"
    groups: int = 1
    minimum: int = 1
    spares: int = 0
    role: str = MEMBER
    start_window_s: float = 0.0
    ranks: int = 1
    nnodes: int = 1
    node_rank: int = 0
    manager: str = ""
    token: str = ""
    run_folder: str = ""
    outage_budget_s: float = BUDGET_S
    evidence_s: float | None = None
    stall_floor_s: float | None = None
    form_timeout_s: float | None = None
    quorum_wait_s: float | None = None
    stop_deadline_s: float | None = None
    start_budget_s: float | None = None
    first_step_s: float | None = None
    reduce_timeout_s: float | None = None
    collective_timeout_s: float | None = None
    host: str = ""
    bucket_mb: float = 16.0
    history_mb: float = 4096.0
    fingerprint_every: int = 0
    deal: str = "speed"
    slow: str = "report"
    notice_file: str = ""
    told_by: InitVar[Mapping[str, str] | None] = None

    def __post_init__(self, told_by: Mapping[str, str] | None) -> None:
        self.__dict__["told_by"] = told_by  # where values come from; it makes no two settings differ
        if self.groups > GROUPS_MAX:
            raise UsageError(f"groups {self.groups}: give at most {GROUPS_MAX}")
        if not 1 <= self.minimum <= self.groups:
            raise UsageError(f"minimum {self.minimum} of {self.groups} groups: 1 <= minimum <= groups must hold")
        if not 0 <= self.spares < self.groups:
            raise UsageError(f"spares {self.spares} of {self.groups} groups: 0 <= spares < groups must hold")
        if self.role not in ROLES:
            raise UsageError(f"role {self.role!r}: give {', '.join(ROLES[:-1])} or {ROLES[-1]}")
        if self.ranks < 1:
            raise UsageError(f"ranks {self.ranks}: a group has at least one rank")
        self._check_nodes()
        self.timeouts.check()
        if not 0.001 <= self.bucket_mb <= 1024:
            raise UsageError(f"bucket_mb {self.bucket_mb}: give 0.001 to 1024 MiB")
        if not 0 <= self.history_mb <= 1 << 20:
            raise UsageError(f"history_mb {self.history_mb}: give 0 to {1 << 20} MiB")
        if not math.isfinite(self.start_window_s):
            raise UsageError(f"start_window_s {self.start_window_s}: give a number of seconds")
        if self.slow not in SLOWS:
            raise UsageError(f"slow {self.slow!r}: give {' or '.join(SLOWS)}")
        if self.deal not in DEALS:
            raise UsageError(f"deal {self.deal!r}: give {' or '.join(DEALS)}")
        if self.start_window_s < 0 or self.fingerprint_every < 0:
            raise UsageError("start_window_s and fingerprint_every are not negative")
        for name in ("job", "group"):
            value = getattr(self, name)
            if not value or len(value) > 100 or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in value):
                raise UsageError(f"{name} {value!r}: give 1 to 100 of a-z, A-Z, 0-9, '-', '_' or '.'")
        check_token(self.token)
        try:
            check_lighthouse(self.lighthouse)
        except ValueError as error:
            raise UsageError(f"lighthouse: {error}") from error
        if self.start_window_s > 0 and has_alternatives(self.lighthouse):
            raise UsageError(
                "start_window_s needs one lighthouse at a fixed address: of several none can tell whether another "
                "holds the job; let it start with all its groups"
            )

    def _check_nodes(self) -> None:
        if not 1 <= self.nnodes <= NODES_MAX or self.ranks % self.nnodes:
            raise UsageError(
                f"nnodes {self.nnodes}: give 1 to {NODES_MAX} nodes; each has as many of the group's "
                f"{counted(self.ranks, 'rank')}"
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise UsageError(f"node_rank {self.node_rank}: of {self.nnodes} nodes give 0 to {self.nnodes - 1}")
        if self.manager:
            try:
                port = split_address(self.manager)[1]
            except ValueError as error:
                raise UsageError(f"manager: {error}") from error
            if port == 0:
                raise UsageError(f"manager {self.manager!r}: name the port at which node 0 is to listen")

    @property
    def ranks_per_node(self) -> int:
        """Ranks of the group on each of its nodes."""
        return self.ranks // self.nnodes

    @property
    def ranks_here(self) -> range:
        """The ranks of this node."""
        first = self.node_rank * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    @cached_property
    def timeouts(self) -> Timeouts:
        """All that bounds a wait."""
        given = {name: getattr(self, name) for name in DERIVED}
        return Timeouts.of(self.outage_budget_s, given, self.__dict__["told_by"] or {})

    def to_environment(self) -> dict[str, str]:
        """The same settings as environment variables; what is derived is derived again."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {PREFIX + name.upper(): str(value) for name, value in values.items() if value is not None}


def read_settings(environment: Mapping[str, str] | None = None, **given: Any) -> Settings:
    """Settings from the environment, overridden by what is given and not None.

    Raises:
        UsageError: for a value that cannot be read or is out of range.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Settings):
        raw = environment.get(PREFIX + field.name.upper())
        if raw is not None:
            values[field.name] = _parse(field.name, str(field.type), raw)
    raw = environment.get(PREFIX + "MEMBERS")
    members = _parse("members", "int", raw) if raw is not None else None
    values.update({name: value for name, value in given.items() if value is not None})
    members = values.pop("members", members)
    if members is not None:
        values["groups"] = _groups_of(members, values)
    if not values.get("token"):
        values["token"] = read_token(environment.get(PREFIX + "TOKEN_FILE"))
    return Settings(**values, told_by=_told_by(environment, given))


def _told_by(environment: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, str]:
    """Which variable or option a value comes from; the command line has read the variables too."""
    told = {}
    for name in ("outage_budget_s", *DERIVED):
        variable, value = PREFIX + name.upper(), given.get(name)
        raw = environment.get(variable)
        if raw is not None and (value is None or _parse(name, "float", raw) == value):
            told[name] = variable
        elif value is not None:
            told[name] = "--" + name.replace("_", "-")
    return told


def strange_variables(environment: Mapping[str, str]) -> str:
    """A line on variables that look like options and are none; empty if there is no such variable.

    It is no error: another version may know them, and a Kubernetes service sets variables after its own name.
    """
    known = {field.name.upper() for field in dataclasses.fields(Settings)} | OTHER_VARIABLES
    given = sorted(name.removeprefix(PREFIX) for name in environment if name.startswith(PREFIX))
    told = []
    for name in given:
        if name not in known and not _OF_A_SERVICE.search(name):
            near = difflib.get_close_matches(name, known, 1)
            told.append(f"{PREFIX}{name} is not an option" + (f" ({PREFIX}{near[0]} is)" if near else ""))
    return ", ".join(told)[:STRANGE_CHARS_MAX]


def _groups_of(members: int, values: Mapping[str, Any]) -> int:
    """`groups`, where it is said how many of them work.

    Raises:
        UsageError: if it is said in two ways that differ.
    """
    spares = values.get("spares", 0)
    if values.get("groups", members + spares) != members + spares:
        told = f"members {members} and spares {spares}, and groups {values['groups']}"
        raise UsageError(f"{told}: groups are members and spares together; leave one of them out")
    return int(members + spares)


def read_token(path: str | Path | None) -> str:
    """The token in a file, without white space around it; empty if no file is given.

    Raises:
        UsageError: if the file cannot be read or is empty.
    """
    if path is None or str(path) == "":
        return ""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the token file {path}: {error}") from error
    if not token:
        raise UsageError(f"the token file {path} is empty")
    return check_token(token)


def check_token(token: str) -> str:
    """The token, if a call's metadata can carry it.

    Raises:
        UsageError: for white space inside it, or anything but printable ASCII.
    """
    if not all(c.isascii() and c.isprintable() and not c.isspace() for c in token):
        raise UsageError("the job token must be printable ASCII without white space")
    return token


def _parse(name: str, kind: str, raw: str) -> Any:
    try:
        return {"int": int, "float": float, "float | None": float}.get(kind, str)(raw)
    except ValueError as error:
        raise UsageError(f"{PREFIX}{name.upper()}={raw!r} is not a number") from error
