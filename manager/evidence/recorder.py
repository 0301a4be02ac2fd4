"""The manager's side of the flight recorder: asks the ranks of its node for their dumps, and has dumps compared."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightkeeper.manager.evidence.handler import groups_path, has_entries, server_path

COMPARE = "lightkeeper.manager.evidence.compare"
ANSWER_BYTES_MAX = 64 << 20
HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")  # the second where torch is built with NCCL
REQUEST = "POST /handler/{} HTTP/1.1\r\nHost: rank\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class NoDump(Exception):
    """A dump that did not come, and why."""


async def dump_of(group: str, rank: int, folder: Path, until_s: float) -> bytes:
    """A rank's dump as a file of an incident holds it. The rank need not be able to run Python for it.

    Raises:
        NoDump: it did not come.
    """
    answer = b""
    try:
        async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
            for handler in HANDLERS:
                if not has_entries(answer):
                    answer = await _asked(server_path(folder, rank), handler) or answer
    except TimeoutError:
        raise NoDump("it did not answer in time") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise NoDump(f"its worker server cannot be asked: {error}") from error
    return as_file(group, rank, folder, answer)


async def _asked(path: Path, handler: str) -> bytes:
    """What one handler of the server answers; empty if there is no such handler."""
    reader, writer = await asyncio.open_unix_connection(path, limit=ANSWER_BYTES_MAX)
    try:
        writer.write(REQUEST.format(handler).encode())
        head = await reader.readuntil(b"\r\n\r\n")
        return await reader.read(-1) if head.startswith(b"HTTP/1.1 200") else b""
    finally:
        writer.close()


def as_file(group: str, rank: int, folder: Path, dump: bytes) -> bytes:
    """A dump, with whose it is and which ranks its process groups have.

    Raises:
        NoDump: it is none, or nothing was recorded.
    """
    try:
        found = json.loads(dump)
    except ValueError as error:
        raise NoDump(f"what came is no dump: {error}") from error
    if not found.get("entries"):
        raise NoDump("nothing is recorded: it has begun no collective, or TORCH_FR_BUFFER_SIZE is 0")
    groups: dict[str, dict[str, list[Any]]] = {"own": {}, "epochs": {}}
    with contextlib.suppress(OSError, ValueError):
        groups = json.loads(groups_path(folder, rank).read_bytes())
    return json.dumps({"group": group, "rank": rank, **groups, "dump": found}).encode()


async def compared(files: Sequence[Path], until_s: float) -> tuple[str, str]:
    """Has dumps compared; the line, and the text of torch's analysis.

    Raises:
        NoDump: they cannot be compared, and why.
    """
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-m", COMPARE, *map(str, files),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
            out, error = await program.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            program.kill()
        await program.wait()
        raise NoDump("torch's analysis took too long") from None
    if program.returncode:
        last = error.decode(errors="replace").strip().rpartition("\n")[2]
        raise NoDump(f"torch's analysis failed: {last[:200]}")
    found = json.loads(out)
    return found["line"], found["text"]
