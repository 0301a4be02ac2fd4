"""What is asked of a node: everything the checks are told, as one value that travels to their processes as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightkeeper.errors import UsageError
from lightkeeper.wire import split_address

NODES_MAX = 512  # each hears what every other says, all of it from node 0
WHOLE_S_MAX = 120.0


@dataclass(frozen=True)
class Request:
    """What is asked of this node.

    Attributes:
        gpus: how many GPUs it must have; None: as many as it has.
        gpu_name: what their names must hold, e.g. "H200".
        expect: facts that it must have, by name.
        memory_gib: memory that must be free, in GiB.
        disks: by path, GiB that must be free there.
        checkpoint: folder in which checkpoints are to be written.
        data: files and folders that must be readable.
        ports: ports that must be free.
        hosts: names that must be known here.
        links: by network interface or InfiniBand device, the gigabits a second it must run at (0: it must be up).
        xid_s: how long ago an Xid still counts, in seconds.
        open_files: file descriptors that a process must be allowed.
        shm_gib: size that /dev/shm must have, in GiB.
        clock_skew_s: how far its clock may be from the other nodes', in seconds.
        nnodes: nodes that are looked at together.
        node_rank: which of them this is.
        rendezvous: HOST:PORT of node 0, where they meet.
        ranks: processes of a node that take part in an all-reduce.
        wait_s: how long the others may take to come, in seconds.
        sweep: whether slow nodes are searched for by pairs, also without a floor.
        bandwidth_mib: size of an all-reduce, in MiB.
        storage_mib: what each node writes and reads to measure the storage, in MiB.
        floors: by figure, what must at least be measured.
        start: names this start of the node: its host and process.
        token: the job's, without which nobody is let into the meeting.
    """

    gpus: int | None = None
    gpu_name: str = ""
    expect: Mapping[str, Any] = field(default_factory=dict)
    memory_gib: float = 0.0
    disks: Mapping[str, float] = field(default_factory=dict)
    checkpoint: str = ""
    data: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    links: Mapping[str, float] = field(default_factory=dict)
    xid_s: float = 3600.0
    open_files: int = 1024
    shm_gib: float = 0.125
    clock_skew_s: float = 1.0
    nnodes: int = 1
    node_rank: int = 0
    rendezvous: str = ""
    ranks: int = 1
    wait_s: float = 30.0
    sweep: bool = False
    bandwidth_mib: int = 64
    storage_mib: int = 64
    floors: Mapping[str, float] = field(default_factory=dict)
    start: str = ""
    token: str = ""

    def __post_init__(self) -> None:
        _within("--nnodes", self.nnodes, 1, NODES_MAX)
        _within("--node-rank", self.node_rank, 0, self.nnodes - 1)
        _within("--ranks", self.ranks, 1, 1024)
        _within("--wait-s", self.wait_s, 0.1, WHOLE_S_MAX / 2)
        _within("--bandwidth-mib", self.bandwidth_mib, 1, 4096)
        _within("--storage-mib", self.storage_mib, 1, 65536)
        _within("--clock-skew-s", self.clock_skew_s, 0.001, 3600)
        for option, value in (("--memory-gib", self.memory_gib), ("--xid-s", self.xid_s), ("--shm-gib", self.shm_gib)):
            _within(option, value, 0, 1e9)
        _within("--open-files", self.open_files, 0, 1 << 30)
        if self.gpus is not None:
            _within("--gpus", self.gpus, 0, 1024)
        for port in self.ports:
            _within("--port", port, 1, 65535)
        if self.nnodes > 1 and not self.rendezvous:
            raise UsageError(f"--nnodes {self.nnodes}: give --rendezvous HOST:PORT of node 0, where they meet")
        if self.sweep and self.nnodes == 1:
            raise UsageError("--sweep compares pairs of nodes: give --nnodes, --node-rank and --rendezvous")
        if self.rendezvous:
            self._check_rendezvous()

    def _check_rendezvous(self) -> None:
        if self.nnodes == 1:
            raise UsageError("--rendezvous is for several nodes: give --nnodes too")
        try:
            port = split_address(self.rendezvous)[1]
        except ValueError as error:
            raise UsageError(f"--rendezvous: {error}") from None
        if port == 0:
            raise UsageError(f"--rendezvous: {self.rendezvous!r} has no port that the other nodes could know")

    def to_json(self) -> str:
        """One line; it holds the token, so it goes through pipes alone."""
        return json.dumps(asdict(self))


def request_from_json(line: str | bytes) -> Request:
    """The inverse of `Request.to_json`."""
    fields = json.loads(line)
    for name in ("data", "ports", "hosts"):
        fields[name] = tuple(fields[name])
    return Request(**fields)


def _within(option: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:
        raise UsageError(f"{option} must be within {lowest:g}..{highest:g}, got {value:g}")
