"""What of torchtitan does not go together with groups that may be lost: one line each, before anything is built."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata, util
from typing import Any

from lightkeeper.errors import UsageError

VERSION = ("0", "3")  # the only one whose trainer is known; pyproject.toml says the same
SPMD_TYPES = (2, 14)  # the torch whose FSDP knows torchtitan's typed meshes; on an older one it fails deep inside
INSTALL = "pip install 'lightkeeper[torchtitan]'"


def refuse_other_versions() -> None:
    """Looks for an installed torchtitan, without importing it.

    An uncaught refusal is told in one line: torchtitan's own parser lets through what is not an `ImportError`.

    Raises:
        UsageError: there is none, or not one that this package knows.
    """
    try:
        found = metadata.version("torchtitan")
    except metadata.PackageNotFoundError:
        found = ""
    if tuple(found.split(".")[:2]) == VERSION:
        return
    from lightkeeper.manager.usererrors import tell_in_one_line

    tell_in_one_line()
    if found:
        raise UsageError(f"torchtitan {found} is installed, and {'.'.join(VERSION)} is needed: {INSTALL}")
    if util.find_spec("torchtitan") is not None:
        raise UsageError(f"the torchtitan on Python's path says no version: {INSTALL}")
    raise UsageError(f"torchtitan is not installed: {INSTALL}")


def refuse_contradictions(config: Any) -> None:
    """A rank of a group that was launched trains in it.

    Raises:
        UsageError: it is told not to.
    """
    from lightkeeper.manager.spawn import SOCKET_VARIABLE

    if SOCKET_VARIABLE in os.environ and not config.fault_tolerance.enable:
        raise UsageError(
            "fault_tolerance.enable is off, and `lightkeeper launch` started this group: leave it on, or train without "
            "the launcher"
        )


def refuse_unsupported(config: Any, ranks: int = 1) -> None:
    """Looks through a config of ours.

    Args:
        config: with all flags in it.
        ranks: of this group.

    Raises:
        UsageError: for the first option that is not supported.
    """
    for problem in _problems(config, ranks):
        raise UsageError(problem)


def _problems(config: Any, ranks: int) -> Iterator[str]:
    parallelism, comm = config.parallelism, config.comm
    for what in ("pipeline", "context", "expert"):
        degree = getattr(parallelism, f"{what}_parallel_degree")
        if degree > 1:
            yield (
                f"parallelism.{what}_parallel_degree is {degree}: a fault tolerant group supports "
                "data_parallel_replicate_degree, data_parallel_shard_degree and tensor_parallel_degree; set it to 1"
            )
    if parallelism.spmd_backend == "spmd_types" and ranks > 1 and _torch() < SPMD_TYPES:
        yield (
            f"parallelism.spmd_backend spmd_types needs torch {'.'.join(map(str, SPMD_TYPES))} where a group has "
            f"several ranks, and this is {metadata.version('torch')}: give --parallelism.spmd_backend partial_dtensor"
        )
    if comm.mode != "default":
        yield f"comm.mode is {comm.mode!r}: fault tolerance needs real collectives, comm.mode default"
    if config.training.enable_cpu_offload:
        yield "training.enable_cpu_offload is not supported with fault tolerance: leave it off"
    if "DistMuon" in (group.optimizer_name for group in config.optimizer.param_groups):
        yield "optimizer DistMuon is not supported with fault tolerance: it lays its parameters out anew; give AdamW"


def _torch() -> tuple[int, ...]:
    return tuple(int(number) for number in metadata.version("torch").split("+")[0].split(".")[:2])
