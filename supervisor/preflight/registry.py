"""All checks, in the order in which they are told; and the choice among them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from lightkeeper.errors import UsageError
from lightkeeper.supervisor.preflight.check import GPU, PATH, PEERS, TORCH, Check

_HOME = "lightkeeper.supervisor.preflight.checks"


def _check(
    name: str, says: str, limit_s: float, *needs: str, after: str = "", requires: str = "", alone: bool = False
) -> Check:
    needed = tuple(requires.split())
    module = f"{_HOME}.{name.replace('-', '_')}"
    return Check(name, says, limit_s, module, needs, (*needed, *after.split()), needed, alone)


# Those with others run one after another, in the same order on all nodes, or nodes would wait for each other in vain.
CHECKS = (
    _check("gpus", "as many GPUs, of the kind, as are expected", 20),
    _check("versions", "versions of driver, CUDA, torch and NCCL, compared with --expect", 20),
    _check("gpu-processes", "processes that hold memory of a GPU", 20, GPU),
    _check("gpu-memory", "uncorrected ECC errors, rows to be remapped", 20, GPU),
    _check("xid", "recent errors of GPUs and NVSwitches in the kernel's log", 10),
    _check("nvlink", "NVLinks that are down, or had to recover", 20, GPU),
    _check("gpu-throttle", "GPUs that are slowed by heat or power", 20, GPU),
    _check("cpu-throttle", "CPUs that are slowed by heat, or capped", 15),
    _check("links", "network interfaces: up, rate, errors", 15),
    _check("infiniband", "InfiniBand's ports: active, rate, errors", 15),
    _check("matmul", "a product of matrices on every CPU, to the bit", 30),
    _check("matmul-gpu", "a product of matrices on every GPU, to the bit", 45, GPU, TORCH),
    _check("memory", "free memory", 10),
    _check("disk", "free room on disks", 10),
    _check("checkpoint", "the folder for checkpoints can be written", 20, PATH),
    _check("data", "the training data can be read", 20, PATH),
    _check("ports", "ports that must be free", 10),
    _check("names", "names of hosts are known", 15),
    _check("limits", "open files, locked memory, shared memory", 10),
    _check("peers", "the other nodes have come", 75, PEERS),
    _check("facts", "all nodes are made of the same", 15, PEERS, after="versions", requires="peers"),
    _check("clock", "the clocks of all nodes agree", 10, PEERS, after="facts", requires="peers"),
    _check("storage", "all nodes write and read at once", 30, PATH, after="clock checkpoint matmul peers", alone=True),
    _check("bandwidth-node", "all-reduce among the ranks of this node", 45, TORCH, after="storage", alone=True),
    _check(
        "bandwidth-pairs", "all-reduce between pairs of nodes", 75, PEERS, TORCH,
        after="bandwidth-node", requires="peers", alone=True,
    ),
    _check(
        "bandwidth-all", "all-reduce among all ranks of all nodes", 60, PEERS, TORCH,
        after="bandwidth-pairs", requires="peers", alone=True,
    ),
)  # fmt: skip


def choose(only: Sequence[str], skip: Sequence[str]) -> tuple[Check, ...]:
    """The checks to be made.

    Args:
        only: names; empty: all. What a named one builds on is made too.
        skip: names that are left out.

    Raises:
        UsageError: there is no such check; the nearest name is told.
    """
    names = {check.name: check for check in CHECKS}
    for option, given in (("--only", only), ("--skip", skip)):
        for name in given:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                told = f": is {near[0]} meant?" if near else f"; there are {', '.join(names)}"
                raise UsageError(f"{option}: there is no check {name!r}{told}")
    wanted = set(only) or set(names)
    for name in list(wanted):
        wanted.update(names[name].requires)
    chosen = tuple(check for check in CHECKS if check.name in wanted - set(skip))
    if not chosen:
        raise UsageError("--only and --skip leave no check")
    return chosen
