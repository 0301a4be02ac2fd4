"""The process groups of a rank's epochs: built in the background, taken when the answer says so, aborted at a push."""

from __future__ import annotations

import threading

import torch

from lightkeeper.manager import local
from lightkeeper.manager.client import EpochKeys, ManagerClient
from lightkeeper.manager.groups import Build, EpochGroup, GroupFailed, start_build

ERROR_CHARS_MAX = 2_000


class Epochs:
    """All groups derived from an epoch end together.

    Args:
        client: reaches the rendezvous keys.
        rank: this rank's index in its replica group; it reduces with the same index of the others.
        backend: ``gloo`` or ``nccl``.
        host: address at which peers reach this node.
        form_timeout_s: how long a group may take to form.
    """

    def __init__(self, client: ManagerClient, rank: int, backend: str, host: str, form_timeout_s: float) -> None:
        self._client, self._rank, self._backend = client, rank, backend
        self._host, self._form_timeout_s = host, form_timeout_s
        self._lock = threading.Lock()
        self._builds: dict[int, Build] = {}
        self._plans: dict[int, local.Plan] = {}
        self._below = 0
        self._reason = ""

    def build(self, plan: local.Plan) -> None:
        """Starts to build the group of an epoch; called by the listening thread."""
        with self._lock:
            if plan.epoch < self._below or plan.epoch in self._builds:
                return
            keys = EpochKeys(self._client, plan.epoch, f"r{self._rank}/")
            name = self._name(plan.epoch)
            self._plans[plan.epoch] = plan
            size = len(plan.members)
            self._builds[plan.epoch] = start_build(
                self._backend, keys, plan.slot, size, self._form_timeout_s, name, host=self._host
            )
        if plan.planned:
            threading.Thread(target=self._tell_built, args=(plan.epoch,), name=f"built {name}", daemon=True).start()

    def abort(self, below: int, reason: str) -> None:
        """Epochs below this number are over; called by the listening thread."""
        with self._lock:
            self._below, self._reason = max(self._below, below), reason
            over = [build for epoch, build in self._builds.items() if epoch < below]
        for build in over:
            build.abort(reason)

    def take(self, epoch: int) -> EpochGroup:
        """The group of an epoch, once it is built.

        Raises:
            GroupFailed: if it could not be formed, or the epoch is over.
        """
        with self._lock:
            build = self._builds.get(epoch)
            if build is None or epoch < self._below:
                raise GroupFailed(f"epoch {epoch} is over: {self._reason}", aborted=self._reason)
        return build.wait()

    def members(self) -> dict[str, tuple[str, ...]]:
        """Groups in slot order by the name of each epoch's process group."""
        with self._lock:
            return {self._name(epoch): plan.members for epoch, plan in self._plans.items()}

    def any_below(self, below: int) -> bool:
        """Whether `abort` would end anything."""
        with self._lock:
            return below > self._below and any(epoch < below for epoch in self._builds)

    def _name(self, epoch: int) -> str:
        return f"e{epoch}r{self._rank}"

    def plan(self, epoch: int) -> local.Plan:
        """The plan of an epoch that was pushed."""
        return self._plans[epoch]

    def drop(self, below: int) -> None:
        """Closes the groups of epochs below this number: they have failed."""
        for build in self._remove(below):
            if not build.done():
                build.abort("a later epoch is in force")
                continue
            try:
                build.wait().close()
            except GroupFailed:
                continue  # it never formed, or was aborted: nothing to close

    def retire(self, below: int, timeout_s: float, wait: bool = False) -> None:
        """Closes the groups of epochs below this number in order, after an empty reduce with all their members.

        Args:
            below: first epoch that stays.
            timeout_s: bound on the empty reduce.
            wait: whether to return only when it is done (who leaves has nothing else to do).
        """
        for build in self._remove(below):
            thread = threading.Thread(target=_close_after_all, args=(build, timeout_s), name="close epoch", daemon=True)
            thread.start()
            if wait:
                thread.join()

    def _remove(self, below: int) -> list[Build]:
        with self._lock:
            over = sorted(epoch for epoch in self._builds if epoch < below)
            for epoch in over:
                self._plans.pop(epoch, None)
            return [self._builds.pop(epoch) for epoch in over]

    def _tell_built(self, epoch: int) -> None:
        with self._lock:
            build = self._builds.get(epoch)
        if build is None:
            return
        try:
            build.wait()
        except GroupFailed as failed:
            if failed.aborted is None:  # else a newer change replaces it
                self._client.send(local.BuildFailed(epoch=epoch, error=str(failed)[:ERROR_CHARS_MAX]))
            return
        self._client.send(local.Built(epoch=epoch))


def _close_after_all(build: Build, timeout_s: float) -> None:
    try:
        group = build.wait()
        group.all_reduce(torch.zeros(1)).wait(timeout_s)
        group.close()
    except GroupFailed:
        return  # a member died meanwhile: the epoch is over for everybody anyway
