"""What is done to a job from outside: signals, limits, connections. Each act has its opposite, if it needs one."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lightkeeper.chaos.targets import NotHere, Processes
from lightkeeper.errors import ToldError
from lightkeeper.manager.processes import is_stopped
from lightkeeper.supervisor.clusters.host import DRAIN

LEASE_S = 2.0  # a lighthouse's default
SHORT_S = LEASE_S / 4
STOPPED_S_MAX = 5.0
SS_S_MAX = 10.0
HOST = "lightkeeper.supervisor.clusters.host"  # by which the process is started
STALL, RAISE = signal.SIGRTMIN + 2, signal.SIGRTMIN + 3  # orders that `toy.py` takes
SKIPPED = 77  # as automake's tests say it


class CannotStrike(ToldError):
    """This machine does not allow the fault; what was asked is skipped."""

    exit_code = SKIPPED


@dataclass
class Hit:
    """What an act is done to.

    Attributes:
        processes: the job's, as they are now.
        group: that is hit.
        rank: of it.
        other: a group that is not.
        groups: all that are hit at once.
        frozen: pids that are to be thawed.
        limited: pids whose limits are to be lifted.
        drained: file by which a node is drained.
        target: the process that is hit, by name.
    """

    processes: Processes
    group: str
    rank: int = 0
    other: str = ""
    groups: tuple[str, ...] = ()
    frozen: list[int] = field(default_factory=list)
    limited: list[int] = field(default_factory=list)
    drained: Path | None = None

    @property
    def rank_pid(self) -> int:
        """Of the rank that is hit."""
        return self.processes.pid(f"rank {self.group}/{self.rank}")


@dataclass(frozen=True)
class Act:
    """How a fault is done, and how what it left is mended.

    Attributes:
        targets: name of the process that is hit, with {group} and {rank}.
        strike: breaks it.
        mend: ends what does not end by itself: thaws, lifts a limit.
    """

    targets: str
    strike: Callable[[Hit], None]
    mend: Callable[[Hit], None] = lambda hit: None

    def target(self, hit: Hit, group: str = "") -> str:
        """Of the event that says so, of one of the groups that are hit."""
        return self.targets.format(group=group or hit.group, rank=hit.rank, other=hit.other)


def freeze(hit: Hit, pids: Iterable[int]) -> None:
    """SIGSTOP, and waits until they are stopped."""
    pids = list(pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        hit.frozen.append(pid)
    until = time.monotonic() + STOPPED_S_MAX
    while not all(is_stopped(pid) or not psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > until:
            raise CannotStrike(f"SIGSTOP did not stop {pids} within {STOPPED_S_MAX:g} s")
        time.sleep(0.002)


def thaw(hit: Hit) -> None:
    """SIGCONT to what was frozen and is still there."""
    while hit.frozen:
        _signal(hit.frozen.pop(), signal.SIGCONT)


def kill_tree(hit: Hit) -> None:
    """Managers, their ranks and all below them, at one moment: frozen first, so that none sees another die."""
    pids = [pid for group in hit.groups or (hit.group,) for pid in hit.processes.tree(group)]
    freeze(hit, pids)
    for pid in pids:
        _signal(pid, signal.SIGKILL)
    hit.frozen.clear()


def freeze_tree(hit: Hit) -> None:
    """The manager first, which would see its ranks stopped."""
    freeze(hit, [hit.processes.pid(f"manager {hit.group}"), *hit.processes.ranks(hit.group)])


def freeze_shortly(hit: Hit) -> None:
    """A quarter of the lease."""
    freeze_tree(hit)
    time.sleep(SHORT_S)
    thaw(hit)


def host_of(hit: Hit) -> psutil.Process:
    """The process that stands for the node of a supervised group.

    Raises:
        NotHere: there is none: no supervisor has started the group.
    """
    for process in psutil.Process(hit.processes.pid(f"manager {hit.group}")).parents():
        if HOST in process.cmdline():
            return process
    raise NotHere(f"{hit.group} was started by no supervisor: it has no node that can be lost")


def kill_host(hit: Hit) -> None:
    """The node is gone, with all that runs there."""
    host_of(hit).kill()


def freeze_host(hit: Hit) -> None:
    """What stands for the node answers nobody any more."""
    freeze(hit, [host_of(hit).pid])


def drain(hit: Hit) -> None:
    """The node is taken out of service, as an operator does."""
    words = host_of(hit).cmdline()
    hit.drained = Path(words[words.index(HOST) + 1]) / DRAIN
    hit.drained.write_text("chaos")


def undrain(hit: Hit) -> None:
    """Takes that back."""
    if hit.drained is not None:
        hit.drained.unlink(missing_ok=True)


def let_nothing_be_written(hit: Hit) -> None:
    """No file of the group's processes may grow: writing fails as on a full disk."""
    hit.limited += [hit.processes.pid(f"manager {hit.group}"), *hit.processes.ranks(hit.group)]
    for pid in hit.limited:
        _limit_files(pid, False)


def let_all_be_written(hit: Hit) -> None:
    """Lifts the limit again."""
    while hit.limited:
        _limit_files(hit.limited.pop(), True)


def cut_link(hit: Hit) -> None:
    """One TCP connection between the rank and the same rank of another group, by the kernel's own means.

    Raises:
        NotHere: there is no such connection.
        CannotStrike: the kernel or the rights of this process do not allow it.
    """
    program = shutil.which("ss")
    if program is None or os.geteuid() != 0:
        raise CannotStrike("cut-link needs root and the program ss (Linux, package iproute2)")
    mine, theirs = hit.rank_pid, hit.processes.pid(f"rank {hit.other}/{hit.rank}")
    port = _port_between(mine, theirs)
    command = [program, "--kill", "--tcp", "--numeric", "--no-header", "sport", "=", f":{port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SS_S_MAX, check=False)
    if done.returncode or f":{port}" not in done.stdout:
        why = done.stderr.strip() or "the kernel has no CONFIG_INET_DIAG_DESTROY"
        raise CannotStrike(f"the connection could not be cut: {why}")


def _port_between(mine: int, theirs: int) -> int:
    """The local port of one of `mine`'s connections whose other end is one of `theirs`."""
    ends = [
        {(c.laddr.port, c.raddr.port) for c in psutil.Process(pid).net_connections("tcp") if c.raddr}
        for pid in (mine, theirs)
    ]
    between = sorted(local for local, remote in ends[0] if (remote, local) in ends[1])
    if not between:
        raise NotHere(f"there is no TCP connection between pid {mine} and pid {theirs}")
    return between[0]


def _limit_files(pid: int, lift: bool) -> None:
    try:
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if lift else 0, hard))
    except ProcessLookupError:
        return
    except PermissionError:
        raise CannotStrike(f"the limits of pid {pid} are another user's: be that user, or root") from None


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def kill_of(name: str) -> Callable[[Hit], None]:
    """SIGKILL of the process of this name."""
    return lambda hit: os.kill(hit.processes.pid(name.format(group=hit.group, rank=hit.rank)), signal.SIGKILL)


def order(number: int) -> Callable[[Hit], None]:
    """Tells a rank of `toy.py` to misbehave."""
    return lambda hit: os.kill(hit.rank_pid, number)


def freeze_of(name: str) -> Callable[[Hit], None]:
    """SIGSTOP of the process of this name."""
    return lambda hit: freeze(hit, [hit.processes.pid(name.format(group=hit.group, rank=hit.rank))])


RANK, MANAGER, AGENT, LIGHTHOUSE = "rank {group}/{rank}", "manager {group}", "agent {group}/1", "lighthouse"
NODE, SUPERVISOR = "node of {group}", "supervisor"
ACTS = {
    "kill": Act(RANK, kill_of(RANK)),
    "kill-group": Act("group {group}", kill_tree),
    "freeze": Act(RANK, freeze_of(RANK), thaw),
    "freeze-manager": Act(MANAGER, freeze_of(MANAGER), thaw),
    "freeze-group": Act("group {group}", freeze_tree, thaw),
    "freeze-agent": Act(AGENT, freeze_of(AGENT), thaw),
    "freeze-short": Act("group {group}", freeze_shortly, thaw),
    "cut-link": Act("link {group}-{other}", cut_link),
    "lighthouse-freeze": Act(LIGHTHOUSE, freeze_of(LIGHTHOUSE)),
    "freeze-for-good": Act("group {group}", freeze_tree),
    "lighthouse-kill": Act(LIGHTHOUSE, kill_of(LIGHTHOUSE)),
    "manager-kill": Act(MANAGER, kill_of(MANAGER)),
    "agent-kill": Act(AGENT, kill_of(AGENT)),
    "node-kill": Act(NODE, kill_host),
    "node-freeze": Act(NODE, freeze_host, thaw),
    "node-drain": Act(NODE, drain, undrain),
    "supervisor-kill": Act(SUPERVISOR, kill_of(SUPERVISOR)),
    "stall": Act(RANK, order(STALL)),
    "raise": Act(RANK, order(RAISE)),
    "log-unwritable": Act("group {group}", let_nothing_be_written, let_all_be_written),
}
