"""What of torchtitan does not go together with groups that may be lost: one line each, before anything is built."""

from __future__ import annotations

from typing import Any

from lightkeeper.errors import UsageError


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
