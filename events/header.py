"""What every event begins with."""

from __future__ import annotations

import re

import msgspec

SCHEMA_VERSION = 1


def tag(name: str) -> str:
    """`GroupLost` is written as `group_lost`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=tag):
    """The header of every event; the writer fills it in.

    Attributes:
        v: schema version.
        run: name of the run (of its folder).
        job: the job's id.
        process: who wrote it: "lighthouse", "manager g2", "rank g2/0".
        group: the group the event is about ("" if none).
        incarnation: which start of that group ("" if none).
        host: machine on which it was written; `mono_ns` compares only within one host.
        pid: process id of the writer.
        wall: seconds since the Unix epoch.
        mono_ns: CLOCK_MONOTONIC, nanoseconds.
        seq: counts up from 0 per file.
    """

    v: int = SCHEMA_VERSION
    run: str = ""
    job: str = ""
    process: str = ""
    group: str = ""
    incarnation: str = ""
    host: str = ""
    pid: int = 0
    wall: float = 0.0
    mono_ns: int = 0
    seq: int = 0
