"""How fast the folder for checkpoints is written and read, by all nodes at once: what 4 nodes never notice, 60 do."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from lightkeeper.supervisor.preflight.floors import below, said
from lightkeeper.supervisor.preflight.meeting import Place
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import OK, Result, failed, ok, skipped
from lightkeeper.supervisor.preflight.together import with_others, without

START_S = 8.0  # for the others to come: they may still be at another check
WAIT_S = 12.0
BLOCK_BYTES = 4 << 20


def look(request: Request, earlier: Mapping[str, Result]) -> Result:
    """Measures alone if there are no others, under other figures: a floor of one is none of the other."""
    if not request.checkpoint:
        return skipped("no --checkpoint FOLDER is given")
    peers = earlier.get("peers")
    if peers is not None and peers.state == OK:
        return _together(request, earlier)
    write, read = measure(Path(request.checkpoint), request.storage_mib)
    figures = {"storage_write_alone_gbps": write, "storage_read_alone_gbps": read}
    if wrong := below(figures, request.floors):
        return failed("; ".join(wrong), figures=figures)
    return ok(said(figures, request.floors), figures=figures)


@with_others
def _together(request: Request, earlier: Mapping[str, Result], place: Place) -> Result:
    place.exchange("storage-start", None, START_S)
    write, read = measure(Path(request.checkpoint), request.storage_mib)
    figures = {"storage_write_gbps": write, "storage_read_gbps": read}
    heard = place.exchange("storage", figures, WAIT_S)
    evidence = {"nodes": {str(node): values for node, values in heard.values.items()}, "missing": list(heard.missing)}
    slow = [node for node, values in heard.values.items() if below(values, request.floors)]
    if wrong := below(figures, request.floors):
        whose = f"{len(slow)} of {len(heard.values)} nodes are below it"
        return failed(f"{'; '.join(wrong)}: {whose}", evidence, figures)
    told = f"{len(heard.values)} nodes at once: {said(figures, request.floors)}{without(heard.missing)}"
    return ok(told, evidence, figures)


def measure(folder: Path, mib: int) -> tuple[float, float]:
    """Writes a file, syncs it and reads it again past the page cache; both in GB/s (1e9 bytes a second).

    Raises:
        OSError: the folder cannot be used.
    """
    path = folder / f".preflight-storage-{os.uname().nodename}-{os.getpid()}"
    block = os.urandom(min(BLOCK_BYTES, mib << 20))
    size = mib << 20
    try:
        began = time.perf_counter()
        with open(path, "xb", buffering=0) as file:
            for _ in range(size // len(block)):
                file.write(block)
            os.fsync(file.fileno())
            write = size / (time.perf_counter() - began) / 1e9
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it is read from memory
        began = time.perf_counter()
        with open(path, "rb", buffering=0) as file:
            while file.read(BLOCK_BYTES):
                pass
        return write, size / (time.perf_counter() - began) / 1e9
    finally:
        path.unlink(missing_ok=True)
