"""What a check found: it is well, it is not and why, or it could not be looked at and why.

Pure: the values that travel from a check's process to whoever decides, and their JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
STATES = (OK, FAILED, SKIPPED)
REASON_CHARS_MAX = 400
EVIDENCE_BYTES_MAX = 64 * 1024


@dataclass(frozen=True)
class Result:
    """What one check found on one node.

    Attributes:
        state: "ok", "failed" (this node must not join) or "skipped" (nothing is known, and nothing is held against it).
        reason: one line: what is wrong, or why it was not looked at; of what is well, what was seen.
        evidence: what that was read from, as JSON.
        figures: what was measured, by name; the unit is the name's end (``_gbps``: 1e9 bytes a second).
        name: of the check; its runner fills it in.
        seconds: how long it took.
    """

    state: str
    reason: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    name: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"a check is {', '.join(STATES)}, not {self.state!r}")

    def named(self, name: str, seconds: float) -> Result:
        """The same, of this check and after so long."""
        return replace(self, name=name, seconds=round(seconds, 3))

    def fields(self) -> dict[str, Any]:
        """As JSON's types."""
        return asdict(self)

    def to_json(self) -> str:
        """One line; evidence beyond its bound is left out, and that is said."""
        fields = self.fields() | {"reason": self.reason[:REASON_CHARS_MAX]}
        if len(json.dumps(fields["evidence"])) > EVIDENCE_BYTES_MAX:
            fields["evidence"] = {"left_out": f"more than {EVIDENCE_BYTES_MAX} bytes"}
        return json.dumps(fields)


def ok(
    reason: str = "", evidence: Mapping[str, Any] | None = None, figures: Mapping[str, float] | None = None
) -> Result:
    """Nothing is wrong."""
    return Result(OK, reason, evidence or {}, figures or {})


def failed(
    reason: str, evidence: Mapping[str, Any] | None = None, figures: Mapping[str, float] | None = None
) -> Result:
    """This node must not join."""
    return Result(FAILED, reason, evidence or {}, figures or {})


def skipped(reason: str, evidence: Mapping[str, Any] | None = None) -> Result:
    """It could not be looked at; nothing speaks against the node."""
    return Result(SKIPPED, reason, evidence or {})


def from_fields(fields: Any) -> Result:
    """The inverse of `Result.fields`, for what another process has written.

    Raises:
        ValueError: it is no result.
    """
    known = {"state": str, "reason": str, "evidence": dict, "figures": dict, "name": str, "seconds": (int, float)}
    if not isinstance(fields, dict) or set(fields) - set(known):
        raise ValueError(f"no result of a check: {str(fields)[:80]}")
    for name, kind in known.items():
        if name in fields and not isinstance(fields[name], kind):  # type: ignore[arg-type]
            raise ValueError(f"no result of a check: its {name} is {str(fields[name])[:80]}")
    if "state" not in fields:
        raise ValueError("no result of a check: it has no state")
    return Result(**fields)


def from_json(line: str | bytes) -> Result:
    """The inverse of `Result.to_json`.

    Raises:
        ValueError: it is no result.
    """
    return from_fields(json.loads(line))
