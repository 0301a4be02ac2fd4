"""The rules as data: `rules.toml`, read once."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

LEVELS = ("cause", "symptom", "victim", "summary")
# A line without any of these, in small letters, has no rule; looking for them costs a hundredth of trying all rules.
# What names a traceback's exception is tried in any case. A test holds the list to the patterns.
WORDS = (
    "err", "exception", "fail", "kill", "xid", "ecc", "remap", "bus", "lost", "gpu", "hardware", "machine check",
    "panic", "respond", "notready", "time limit", "runlimit", "deadline", "walltime", "preempt", "reason", "spot",
    "instance-action", "reclaim", "disruption", "memory", "oom", "memlimit", "vmem", "/dev/shm", "</torch_", "cublas",
    "cudnn", "alloc", "signal", "exit", "space", "quota", "enospc", "edquot", "storagefull", "ephemeral", "stale",
    "read-only", "evicted", "magic", "ran out", "missing", "loss scale", "nan", "inf", "diverged", "finite", "assert",
    "abort", "code", "segment", "sigsegv", "sigill", "segfault", "illegal", "double free", "corrupt", "smashing",
    "eaddrinuse", "in use", "module", "shared", "undefined", "glibc", "cxxabi", "usage", "unrecognized", "unexpected",
    "mismatch", "shape", "tensor", "same device", "scalar type", "second time", "inplace", "reduction", "ready only",
    "weight of", "require grad", "input of size", "dtype", "ordinal", "duplicate", "kernel image", "cuda", "driver",
    "compatib", "divisible", "world", "permi", "denied", "401", "403", "404", "gated", "credential", "expiredtoken",
    "signature", "unable", "authent", "does not have", "couldn't", "valid", "nosuch", "not found", "appear",
    "no file", "no such", "execve", "dataset", "samples", "truncated", "broken", "parquet", "gzip", "identify", "crc",
    "timed out", "compressed", "worker", "open files", "thread", "ancdata", "resource", "inotify", "waiting for",
    "timeout", "retriev", "connect", "joined", "rendezvous", "net/", "completion", "ibv", "down", "ucx", "transport",
    "route", "unreachable", "remote", "closed", "call to", "watchdog", "nccl", "collective", "heartbeat", "gloo",
    "recv", "pair", "socket", "pipe", "reset", "store", "misaligned", "launch", "refused", "sigterm", "terminat",
    "cancel", "sigabrt", "mpi", "deserializ", "uncorrect", "exceed", "file write", "protection", "local folder",
    "badzip", "tarfile", "timing out", "_status_", "received 15", "requeue", "diskpressure", "no progress",
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """One kind of line, and what it says of the rank that wrote it; `rules.toml` explains the fields."""

    name: str
    cause: str
    level: str
    confidence: float
    pattern: re.Pattern[str]
    where: str
    quiet: bool
    general: bool
    hit: str

    @property
    def order(self) -> int:
        """0 for a cause, 3 for a summary."""
        return LEVELS.index(self.level)


@dataclass(frozen=True)
class Cause:
    """What a cause means, in words, and what a person should do."""

    says: str
    advice: str


@dataclass(frozen=True)
class Book:
    """All rules in their order, the patterns of lines that only look alike, and the causes."""

    rules: tuple[Rule, ...]
    noise: tuple[re.Pattern[str], ...]
    causes: dict[str, Cause]

    def first(self, text: str, quiet: bool, exception: bool) -> Rule | None:
        """The rule that has this line, if any.

        Args:
            text: the line without its prefixes.
            quiet: whether it was logged as information or warning.
            exception: whether it names the exception of a traceback.
        """
        if not exception:
            small = text.lower()
            if not any(word in small for word in WORDS) or any(pattern.search(text) for pattern in self.noise):
                return None
        for rule in self.rules:
            if (quiet and not rule.quiet) or (rule.where == "exception" and not exception):
                continue
            if rule.pattern.search(text):
                return rule
        return None


@cache
def book() -> Book:
    """The rules that come with lightkeeper.

    Raises:
        ValueError: the file is not as it says itself (a bug of this package).
    """
    data = tomllib.loads(files("lightkeeper.diagnose").joinpath("rules.toml").read_text("utf-8"))
    causes = {name: Cause(**words) for name, words in data["causes"].items()}
    rules = tuple(_rule(entry) for entry in data["rule"])
    for rule in rules:
        if rule.level not in LEVELS or rule.cause not in causes or rule.where not in ("any", "exception"):
            raise ValueError(f"rules.toml: {rule.name} has a level, a cause or a place that there is none of")
    return Book(rules, tuple(re.compile(entry["pattern"]) for entry in data["noise"]), causes)


def _rule(entry: dict[str, object]) -> Rule:
    given = {"where": "any", "quiet": False, "general": False, **entry}
    return Rule(**{**given, "pattern": re.compile(str(entry["pattern"]))})  # type: ignore[arg-type]
