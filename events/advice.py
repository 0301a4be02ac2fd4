"""What a person should do about an incident."""

from __future__ import annotations

from collections.abc import Sequence

from lightkeeper.diagnose.rules import book
from lightkeeper.events.signals import Signal

_BY_KIND = {
    "exception": "fix it before {group} is started again: the same code raises again (its traceback: lightkeeper "
    "events RUN --kind user_error --json)",
    "exit": "read the last lines of {group}'s log (lightkeeper diagnose); the same code may end so again",
    "gone": "read the last lines of {group}'s log (lightkeeper diagnose)",
    "frozen": "find out who stopped it on {node} (a debugger, a scheduler that suspends, kill -STOP)",
    "silent": "look whether {node} is up and reached by the lighthouse; take it out if it happens again",
    "stuck": "look at its stacks in the evidence; if the work may take that long, declare it: with manager.expect(...)",
    "inside": "look at the links between the nodes of {group}: none of its ranks died",
    "failures": "look at {group}'s links and at its log: its reduces fail and those of the others do not",
    "network": "nothing, if it stays rare; else look at the links and switches between the named groups",
    "storage": "look at what all groups wait for: the storage, a licence or data server",
    "job": "fix the program: it raises in every group at that step, starting again would not help",
    "operator": "nothing: it was asked for",
    "slow": "look at clocks, temperature and neighbours of {node}; lightkeeper drain {group} to take it out",
    "unknown": "give all processes the same --run-folder, so that the next time more is known",
}
_BY_SIGNAL = {
    "SIGKILL": "look for the OOM killer in the kernel's log of {node}; else find out who sent the signal",
    "SIGSEGV": "it crashed in native code: look at its stacks, and at {node}'s memory if it happens again",
    "SIGBUS": "look whether /dev/shm or a file it had mapped is full or gone on {node}",
    "SIGABRT": "a library gave up: read the last lines of {group}'s log",
    "SIGTERM": "somebody asked it to end twice, or killed it: look at the scheduler of {node}",
}


def advice(kind: str, node: str, cause: str, signals: Sequence[Signal], group: str) -> str:
    """One line: by the class of its log if that is known, by the signal that killed it, by the kind of incident."""
    where = {"node": node or "its node", "group": group or "it"}
    for signal in signals:
        if signal.name == "log" and signal.group == group and signal.kind in book().causes:
            return book().causes[signal.kind].advice
    if kind == "killed":
        words = next((words for name, words in _BY_SIGNAL.items() if name in cause), _BY_KIND["exit"])
        return words.format(**where)
    return _BY_KIND.get(kind, _BY_KIND["unknown"]).format(**where)
