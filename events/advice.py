"""What a person should do about an incident."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightkeeper.diagnose.rules import book
from lightkeeper.events.signals import Signal

_STUCK = "look at its stacks in the evidence; if the work may take that long, declare it: with manager.expect(...)"
_SEGFAULT = "it crashed in native code: look at its stacks, and at {node}'s memory if it happens again"
_STACKS = {  # in place of these if there are none
    _STUCK: "if the work may take that long, declare it: with manager.expect(...); else look what it waited for",
    _SEGFAULT: "it crashed in native code: read the end of {group}'s log (python -X faulthandler prints its stacks "
    "there); test {node}'s memory if it happens again",
}
_BY_KIND = {
    "exception": "fix it before {group} is started again: the same code raises again (its traceback: lightkeeper "
    "events RUN --kind user_error --json)",
    "exit": "read the last lines of {group}'s log (lightkeeper diagnose); the same code may end so again",
    "gone": "read the last lines of {group}'s log (lightkeeper diagnose)",
    "behind": "nothing, if it stays rare: it takes a fresh copy; else give it more history (--history-mb), or look at "
    "its link to the donors",
    "frozen": "find out who stopped it on {node} (a debugger, a scheduler that suspends, kill -STOP)",
    "silent": "look whether {node} is up and reached by the lighthouse; take it out if it happens again",
    "up": "start the same launch line again: {node} is up, only the manager or the launcher of {group} is gone",
    "stuck": _STUCK,
    "inside": "look at the links between the nodes of {group}: none of its ranks died",
    "failures": "look at {group}'s links and at its log: its reduces fail and those of the others do not",
    "network": "nothing, if it stays rare; else look at the links and switches between the named groups",
    "storage": "look at what all groups wait for: the storage, a licence or data server",
    "job": "fix the program: it raises in every group at that step, starting again would not help",
    "quorum": "look why those who left, or never came, are not there",
    "operator": "nothing: it was asked for",
    "slow": "look first what else runs on {node}, then at its clocks and temperature; if it stays so: lightkeeper "
    "drain {group}",
    "unknown": "give all processes the same --run-folder, so that the next time more is known",
}
_BY_SIGNAL = {
    "SIGKILL": "look for the OOM killer in the kernel's log of {node}; else find out who sent the signal",
    "SIGSEGV": _SEGFAULT,
    "SIGBUS": "look whether /dev/shm or a file it had mapped is full or gone on {node}",
    "SIGABRT": "a library gave up: read the last lines of {group}'s log",
    "SIGTERM": "somebody asked it to end twice, or killed it: look at the scheduler of {node}",
}
_TAKEN = ("preemption", "time_limit", "host_oom", "hardware", "xid")
_CRASHED = ("crash", "shared_memory", "cuda_error", "xid", "hardware", "assert", "storage", "disk_full")
_BEHIND = {  # a signal to what the log may say of it
    "SIGKILL": ("host_oom", "preemption", "time_limit"),
    "SIGTERM": ("preemption", "time_limit"),
}


def advice(
    kind: str, node: str, cause: str, signals: Sequence[Signal], group: str, *, stacks: bool = False, up: bool = False
) -> str:
    """One line, by what weighs most: the signal that killed it, its exception, the kind of incident.

    Args:
        kind: of the culprit.
        node: its host, "" if not known.
        cause: what happened, in words.
        signals: all that was weighed; the class of its log is heard where it does not say something else.
        group: its name.
        stacks: whether its evidence has stacks.
        up: whether others on its host went on writing after it.
    """
    where = {"node": node or "its node", "group": group or "it"}
    for signal in signals:
        if signal.name == "log" and signal.group == group and signal.kind in _agreeing(kind, cause, signal):
            return book().causes[signal.kind].advice
    key = "up" if kind == "silent" and up else kind
    if kind == "killed":
        words = next((words for name, words in _BY_SIGNAL.items() if name in cause), _BY_KIND["exit"])
    else:
        words = _BY_KIND.get(key, _BY_KIND["unknown"])
    return _STACKS.get(words, words).format(**where) if not stacks else words.format(**where)


def and_go_on(line: str, keeper: str) -> str:
    """The same, and what comes after it where a job ended for want of groups; `keeper`: who kept its last step."""
    where = f": the job goes on from the step that {keeper} kept" if keeper else ""
    return f"{line}; then start all groups again{where}"


def _agreeing(kind: str, cause: str, signal: Signal) -> Collection[str]:
    """Classes of a log that say why such a thing happened, and not that something else did."""
    if kind in ("exit", "gone", "unknown", signal.kind):
        return book().causes
    if kind == "exception":  # the same one as was told
        name = cause.partition(" raised ")[2].partition(":")[0]
        return [one for one in book().causes if one != "user_error"] if name and name in signal.detail else ()
    if kind == "killed":
        return next((causes for name, causes in _BEHIND.items() if name in cause), _CRASHED)
    return _TAKEN if kind == "silent" else ()
