"""The typed, append-only event log of a run: schema, writer, reader and rules over it. Imports no torch."""

from lightkeeper.errors import RunFolderError
from lightkeeper.events.reader import RunLog, follow, read_run
from lightkeeper.events.schema import SCHEMA_VERSION, Event, Unknown
from lightkeeper.events.writer import EventLog

__all__ = ["SCHEMA_VERSION", "Event", "EventLog", "RunFolderError", "RunLog", "Unknown", "follow", "read_run"]
