"""What a job file says, and the example that `lightkeeper init` writes."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from lightkeeper.errors import UsageError
from lightkeeper.supervisor.joboptions import read_options
from lightkeeper.supervisor.notify.settings import Setting
from lightkeeper.supervisor.notify.settings import read_settings as read_notify
from lightkeeper.supervisor.tables import read_table

CLUSTERS = ("local",)
GROUPS_MAX = 10_000
NODES_MAX = 100_000
NAME_BYTES_MAX = 255
PLACES = ("{run_folder}", "{checkpoints}")  # that are filled in, in a command


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where nodes come from.

    Attributes:
        kind: "local": folders and process trees on this machine.
        nodes: how many, spares among them; 0: as many as the groups need.
        names: their names, instead of a number.
    """

    kind: str = "local"
    nodes: int = 0
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in CLUSTERS:
            raise UsageError(f"kind {self.kind!r}: give {' or '.join(CLUSTERS)}")
        if self.nodes < 0 or (self.nodes and self.names and self.nodes != len(self.names)):
            raise UsageError(f"nodes {self.nodes} and {len(self.names)} names: give one of them")
        if max(self.nodes, len(self.names)) > NODES_MAX:
            raise UsageError(f"nodes {max(self.nodes, len(self.names))}: at most {NODES_MAX}")
        if len(set(self.names)) < len(self.names):
            raise UsageError("names: one of them stands there twice")


@dataclass(frozen=True, kw_only=True)
class Lighthouse:
    """The job's lighthouse.

    Attributes:
        bind: where the one that is started listens; port 0 picks a free one.
        address: of one that is there already: then none is started.
        lease_s: seconds of missed beats after which a group is held to be silent.
    """

    bind: str = "127.0.0.1:0"
    address: str = ""
    lease_s: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What is checked of a node before a group is started there.

    Attributes:
        enabled: whether anything is.
        options: words for `lightkeeper preflight`.
        limit_s: of the whole; a node that takes longer does not join.
    """

    enabled: bool = True
    options: tuple[str, ...] = ()
    limit_s: float = 120.0

    def __post_init__(self) -> None:
        if self.limit_s <= 0:
            raise UsageError(f"limit_s {self.limit_s}: give seconds above 0")


@dataclass(frozen=True, kw_only=True)
class BurnIn:
    """How a node that is in quarantine is tried before it gets work again (`docs/quarantine.md`).

    Attributes:
        enabled: whether it is; else a person must release it.
        command: what is run there; empty: preflight, with the same options.
        rounds: so often at least.
        for_s: and for so long at least.
        round_s: a round that takes longer has failed.
    """

    enabled: bool = True
    command: tuple[str, ...] = ()
    rounds: int = 3
    for_s: float = 300.0
    round_s: float = 600.0

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.for_s < 0 or self.round_s <= 0:
            raise UsageError("rounds is at least 1, for_s not negative, round_s above 0")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How often, and how fast, things are started again.

    Attributes:
        attempts: starts of groups after a failure, over the whole run.
        job_restarts: whole-job restarts among them.
        pause_s: before the second start in a row of one thing; it doubles.
        pause_s_max: at most.
        good_s: seconds at work after which a pause begins anew.
        without_progress: attempts in a row that commit no further step, after which the job stops.
        same_failure: so many failures of one kind at one step, on different nodes, are a crash loop.
        in_place: how often a group's launcher may start its ranks again where they were, before the supervisor
            looks at what happened; 0: never.
        orphan_s: seconds that a job goes on without its supervisor.
        time_limit_s: the run ends in good order so long after this command began, and `requeue` follows; 0: no limit.
    """

    attempts: int = 50
    job_restarts: int = 20
    pause_s: float = 1.0
    pause_s_max: float = 300.0
    good_s: float = 600.0
    without_progress: int = 5
    same_failure: int = 3
    in_place: int = 0
    orphan_s: float = 600.0
    time_limit_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("attempts", "job_restarts", "orphan_s", "time_limit_s", "pause_s", "in_place"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} {getattr(self, name)}: it is not negative")
        if self.pause_s_max < self.pause_s:
            raise UsageError(f"pause_s_max {self.pause_s_max} is below pause_s {self.pause_s}")
        for name in ("without_progress", "same_failure"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}: give at least 1")


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A job.

    Attributes:
        name: the job's id.
        command: the script and its arguments; {run_folder} and {checkpoints} are filled in.
        run_folder: where everything of the run is kept; relative to the job file.
        groups: replica groups, group spares among them.
        minimum: fewest groups with which the job goes on.
        spares: groups that compute nothing while the others are there.
        ranks: trainer ranks of a group on each of its nodes.
        nodes_per_group: nodes of a group.
        torchtitan: the command holds torchtitan's arguments alone.
        checkpoints: folder of the checkpoints, relative to the run's folder.
        outage_budget_s: see `docs/timeouts.md`.
        environment: variables of every rank.
        options: further options of `lightkeeper launch`, by name.
        requeue: command that puts the run back when its time is over or it got notice; run where the job file lies.
        quarantine: file that holds who is in quarantine; relative to the job file.
        notify: who is told.
    """

    name: str
    command: tuple[str, ...]
    run_folder: str = "run"
    groups: int = 1
    minimum: int = 1
    spares: int = 0
    ranks: int = 1
    nodes_per_group: int = 1
    torchtitan: bool = False
    checkpoints: str = "checkpoints"
    outage_budget_s: float = 60.0
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    requeue: tuple[str, ...] = ()
    quarantine: str = "quarantine.json"
    notify: tuple[Setting, ...] = ()
    cluster: Cluster = field(default_factory=Cluster)
    lighthouse: Lighthouse = field(default_factory=Lighthouse)
    preflight: Preflight = field(default_factory=Preflight)
    burn_in: BurnIn = field(default_factory=BurnIn)
    budget: Budget = field(default_factory=Budget)

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError("command is empty: give the script and its arguments")
        for name in ("run_folder", "checkpoints", "quarantine"):
            _check_path(name, getattr(self, name))
        if self.groups > GROUPS_MAX:
            raise UsageError(f"groups {self.groups}: at most {GROUPS_MAX}")
        if not 1 <= self.minimum <= self.groups:
            raise UsageError(f"minimum {self.minimum} of {self.groups} groups: 1 <= minimum <= groups must hold")
        if not 0 <= self.spares < self.groups:
            raise UsageError(f"spares {self.spares} of {self.groups} groups: 0 <= spares < groups must hold")
        if self.ranks < 1 or self.nodes_per_group < 1:
            raise UsageError("ranks and nodes_per_group are at least 1")
        needed = self.groups * self.nodes_per_group
        if 0 < len(self.nodes) < needed:
            raise UsageError(
                f"{len(self.nodes)} nodes for {self.groups} groups of {self.nodes_per_group}: give at least {needed}"
            )

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes of a local cluster."""
        if self.cluster.names:
            return self.cluster.names
        return tuple(f"n{i}" for i in range(self.cluster.nodes or self.groups * self.nodes_per_group))

    def command_in(self, run_folder: Path) -> list[str]:
        """The command of a run in this folder; all other braces stay as they are."""
        places = dict(zip(PLACES, (str(run_folder), str(run_folder / self.checkpoints)), strict=True))
        words = list(self.command)
        for place, path in places.items():
            words = [word.replace(place, path) for word in words]
        return words

    @property
    def group_names(self) -> tuple[str, ...]:
        """Of all groups."""
        return tuple(f"g{i}" for i in range(self.groups))


def _check_path(name: str, path: str) -> None:
    if not path or "\0" in path or any(len(part.encode()) > NAME_BYTES_MAX for part in path.split("/")):
        raise UsageError(f"{name}: {path[:80]!r} is no path")


def read_job(path: Path) -> JobFile:
    """A job file.

    Raises:
        UsageError: it cannot be read, or a line of it cannot be right.
    """
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read the job file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from error
    notify = read_notify(table.pop("notify", []), f"{path.name} notify")
    options = table.get("options")
    if isinstance(options, dict):
        table["options"] = read_options(options, f"{path.name} options")
    return dataclasses.replace(read_table(JobFile, table, path.name), notify=notify)
