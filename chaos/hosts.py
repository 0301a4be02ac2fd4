"""A host of its own on this machine: a network namespace, and a link to it that can be cut."""

from __future__ import annotations

import os
import subprocess

from lightkeeper.chaos.acts import CannotStrike

IP_S_MAX = 10.0
NET = "10.232"


class Host:
    """A network namespace and its link to this one. Needs root."""

    def __init__(self) -> None:
        self._name = f"lkc{os.getpid()}"
        self._near, self._far = f"{self._name}a", f"{self._name}b"
        block = os.getpid() % 16_000
        subnet = f"{NET}.{block // 64}.{4 * (block % 64)}"
        head, _, last = subnet.rpartition(".")
        self.here, self.there = f"{head}.{int(last) + 1}", f"{head}.{int(last) + 2}"

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that is to run there."""
        return ("ip", "netns", "exec", self._name)

    def make(self) -> None:
        """Makes it.

        Raises:
            CannotStrike: this process may not, or there is no program ip.
        """
        try:
            self._ip("netns", "add", self._name)
            self._ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self._name)
            self._ip("addr", "add", f"{self.here}/30", "dev", self._near)
            self._ip("link", "set", self._near, "up")
            self._ip("-n", self._name, "addr", "add", f"{self.there}/30", "dev", self._far)
            self._ip("-n", self._name, "link", "set", self._far, "up")
            self._ip("-n", self._name, "link", "set", "lo", "up")
        except (OSError, subprocess.SubprocessError) as error:
            self.remove()
            why = (getattr(error, "stderr", "") or str(error)).strip()
            raise CannotStrike(f"no network namespace can be made here (it takes root): {why}") from None

    def cut(self) -> None:
        """Packets are dropped from now on, and nobody is told."""
        self._ip("link", "set", self._near, "down")

    def join(self) -> None:
        """They arrive again."""
        self._ip("link", "set", self._near, "up")

    def remove(self) -> None:
        """Removes it. Idempotent."""
        for words in (("link", "del", self._near), ("netns", "del", self._name)):
            try:
                subprocess.run(["ip", *words], check=False, capture_output=True, timeout=IP_S_MAX)
            except OSError:
                return

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=IP_S_MAX)
