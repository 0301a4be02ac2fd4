"""What a supervisor notes in the event log, as a sentence for its terminal."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

_WHOSE = {"node": "the node's fault", "maybe": "perhaps the node's fault", "job": "the job's own fault"}


def sentence(kind: str, fields: Mapping[str, Any]) -> str:
    """What a note of this kind says ("" if another line says it): who, where, what, and why.

    Args:
        kind: of the event (`events/of_supervisor.py`).
        fields: of the event.
    """
    node, group, reason = fields.get("node", ""), fields.get("group", ""), fields.get("reason", "")
    match kind:
        case "node_checked":
            fit = f"is not fit for {group}: {fields['problem']}" if fields["problem"] else f"is fit for {group}"
            return f"{node} {fit} (preflight, {fields['seconds']:.1f} s)"
        case "group_started":
            return f"{group} starts on {', '.join(fields['nodes'])} (start {fields['start']})"
        case "group_waits":
            return f"{group} waits: {reason}"
        case "group_ended":
            return _ended(fields)
        case "node_came":
            return f"{node} can be used"
        case "node_lost":
            return f"{node} is lost: {reason}"
        case "node_leaving":
            return f"{node} is to be left: {reason}"
        case "node_quarantined":
            return f"{node} is in quarantine: {reason}"
        case "node_released":
            return f"{node} is released from quarantine"
        case "burned_in":
            done = "gets work again" if fields["returns"] else "stays in quarantine"
            return f"{node} was burned in and {done}{f': {reason}' if reason else ''}"
        case "job_restarts":
            return f"all groups start again (restart {fields['number']}) {_committed(fields['step'])}: {reason}"
        case "run_stopping":
            return f"the run ends in good order: {reason}"
        case "run_failed":
            return f"gives up ({fields['failure'].replace('_', ' ')}): {reason}"
        case "run_ended":
            return ""  # the last line
    raise ValueError(f"no words for {kind}")


def _ended(fields: Mapping[str, Any]) -> str:
    """``g0 ended on n1 in step 12: killed by SIGKILL (exit code -9, perhaps the node's fault)``."""
    where = f" on {', '.join(fields['nodes'])}" if fields["nodes"] else ""
    step = f" in step {fields['step']}" if fields["step"] >= 0 else ""
    whose = _WHOSE.get(fields["whose"], "nobody's fault")
    last = "" if fields["failure"] == "finished" else f" ({_exit(fields['code'])}; {whose})"
    return f"{fields['group']} ended{where}{step}: {fields['reason']}{last}"


def _exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _committed(step: int) -> str:
    return "from the start: no step was committed" if step < 0 else f"from the newest checkpoint, after step {step}"
