"""What of torchtitan does not go together with groups that may be lost: one line each, before anything is built."""

from __future__ import annotations

from importlib import metadata, util
from typing import Any

from lightkeeper.errors import UsageError

VERSION = ("0", "3")  # the only one whose trainer is known; pyproject.toml says the same
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


def refuse_unsupported(config: Any) -> None:
    """Looks through a config of ours.

    Raises:
        UsageError: for the first option that is not supported.
    """
    parallelism, comm = config.parallelism, config.comm
    for told, given in (
        ("parallelism.pipeline_parallel_degree", parallelism.pipeline_parallel_degree),
        ("parallelism.context_parallel_degree", parallelism.context_parallel_degree),
        ("parallelism.expert_parallel_degree", parallelism.expert_parallel_degree),
    ):
        if given > 1:
            raise UsageError(
                f"{told} is {given}: a fault tolerant group supports data_parallel_replicate_degree, "
                "data_parallel_shard_degree and tensor_parallel_degree; set it to 1"
            )
    if comm.mode != "default":
        raise UsageError(f"comm.mode is {comm.mode!r}: fault tolerance needs real collectives, comm.mode default")
    if config.training.enable_cpu_offload:
        raise UsageError("training.enable_cpu_offload is not supported with fault tolerance: leave it off")
