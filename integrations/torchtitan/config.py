"""The `fault_tolerance` section of a torchtitan config, and `fault_tolerant`, which puts it into any of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.trainer import Trainer

from lightkeeper.errors import UsageError
from lightkeeper.manager.settings import PREFIX, Settings, read_settings, read_token
from lightkeeper.manager.spawn import SOCKET_VARIABLE
from lightkeeper.manager.usererrors import tell_in_one_line

ENABLE_VARIABLE, GROUP_VARIABLE = PREFIX + "ENABLE", PREFIX + "GROUP"
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_OWN = ("enable", "microbatches", "stream_state_kb", "sync", "token_file")  # fields that are no settings of the group


def enabled_here(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the environment asks for it: ``LIGHTKEEPER_ENABLE`` says so; or, where nobody says, whether this rank was
    started by a launcher of ours or is told its group.

    Raises:
        UsageError: the variable is neither yes nor no.
    """
    environment = os.environ if environment is None else environment
    said = environment.get(ENABLE_VARIABLE)
    if said is None:
        return SOCKET_VARIABLE in environment or GROUP_VARIABLE in environment
    if said.lower() not in (*_YES, *_NO):
        raise UsageError(f"{ENABLE_VARIABLE}={said!r}: give 1 or 0")
    return said.lower() in _YES


@dataclass(kw_only=True, slots=True)
class FaultTolerance:
    """How this replica group takes part in the job. What is not given is read from ``LIGHTKEEPER_*``, as everywhere."""

    enable: bool = field(default_factory=enabled_here)
    """Train as one replica group of a job. By default as LIGHTKEEPER_ENABLE says; if that is not set, where
    LIGHTKEEPER_GROUP is, and under `lightkeeper launch`."""

    lighthouse: str | None = None
    """Its address, host:port; several with commas between, or file:PATH."""

    job: str | None = None
    """The job's id."""

    group: str | None = None
    """This replica group's stable name."""

    groups: int | None = None
    """Number of groups of the job, spares among them."""

    minimum: int | None = None
    """Fewest groups with which the job goes on."""

    spares: int | None = None
    """How many of the groups compute nothing while the others are there."""

    role: Literal["member", "spare", "reserve"] | None = None
    """What this group is: a member; the last to work; one that waits until there is a place."""

    microbatches: int | None = None
    """Microbatches of a step over all groups. By default training.global_batch_size decides: divided by the batch of
    one group; and if that is not given either, one for each group at work."""

    stream_state_kb: int = 16
    """KiB, packed, that the state of a data loader may have to travel: with it a group takes over a microbatch's data
    where it stands, instead of reading it from its beginning. 0: none travels."""

    outage_budget_s: float | None = None
    """How long anything is waited for before the group gives up, in seconds."""

    host: str | None = None
    """Address of the interface at which peers reach this node, for reduces and for healing."""

    bucket_mb: float | None = None
    """Size of a gradient bucket, in MiB."""

    history_mb: float | None = None
    """Bound on the entries kept while a group joins, in MiB."""

    fingerprint_every: int | None = None
    """The state's fingerprint is written to the event log after every so many steps; 0 never."""

    deal: Literal["speed", "even"] | None = None
    """Whether a slower group gets fewer microbatches."""

    slow: Literal["report", "evict"] | None = None
    """Whether a group that is slow for long is said to be, or asked to leave where that pays."""

    sync: Literal["every", "last"] = "every"
    """When the ranks of a group sum up their gradients: after every microbatch, or after a step's last one."""

    run_folder: str | None = None
    """Where the job's events go; all groups write into one."""

    notice_file: str | None = None
    """When this file appears, the group leaves."""

    token_file: str | None = None
    """File that holds the job's token."""

    def settings(self, environment: Mapping[str, str] | None = None) -> Settings:
        """What the group is told: these, and the environment for what is not given.

        Raises:
            UsageError: a value cannot be right, or contradicts what this group's launcher was told.
        """
        environment = os.environ if environment is None else environment
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _OWN}
        given = {name: value for name, value in given.items() if value is not None}
        if SOCKET_VARIABLE in environment:
            _check_launched(read_settings(environment), given)
        if self.token_file is not None:
            given["token"] = read_token(self.token_file)
        settings = read_settings(environment, **given)
        if not settings.token:
            raise UsageError(
                "no job token: give --fault_tolerance.token_file, or set LIGHTKEEPER_TOKEN_FILE or LIGHTKEEPER_TOKEN, "
                "the same for lighthouse and groups"
            )
        return settings


def _check_launched(launched: Settings, given: Mapping[str, Any]) -> None:
    """The manager runs already: what it was told holds."""
    for name, value in given.items():
        if getattr(launched, name) != value:
            raise UsageError(
                f"--fault_tolerance.{name} is {value!r}, and this group was launched with {getattr(launched, name)!r}: "
                "give it to `lightkeeper launch`"
            )


def fault_tolerant(config: Trainer.Config) -> Any:
    """The same config, for a run whose groups may be lost: with a `fault_tolerance` section, built by our trainer.

    Args:
        config: any config of torchtitan's own `Trainer`.

    Returns:
        A `FaultTolerantTrainer.Config`.

    Raises:
        UsageError: it builds a trainer with steps of its own, or has options of its own.
    """
    from lightkeeper.integrations.torchtitan.trainer import FaultTolerantTrainer

    tell_in_one_line()
    if isinstance(config, FaultTolerantTrainer.Config):
        return config
    owner = getattr(config, "_owner", None)
    if owner is not Trainer:
        raise UsageError(
            f"a config of {getattr(owner, '__name__', type(config).__name__)} cannot be made fault tolerant: its "
            "steps are its own, and only those of torchtitan's Trainer are known"
        )
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    if strange := given.keys() - {f.name for f in dataclasses.fields(FaultTolerantTrainer.Config)}:
        raise UsageError(
            f"a {type(config).__name__} has {', '.join(sorted(strange))}, which torchtitan's Trainer does not read: "
            "leave it out of the config that is to be fault tolerant"
        )
    return FaultTolerantTrainer.Config(**given)
