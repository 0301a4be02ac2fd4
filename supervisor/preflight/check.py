"""What a check is: its name, what it needs, how long it may take, and the function that looks."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result

GPU, TORCH, PEERS, PATH = "gpu", "torch", "peers", "path"
NEEDS = (GPU, TORCH, PEERS, PATH)
Look = Callable[[Request, Mapping[str, Result]], Result]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: what `--only` and `--skip` call it.
        says: what it looks at, in a line.
        limit_s: after so many seconds it hangs, and the node must not join.
        module: its file, which has the function `look(request, earlier)`; imported in the check's own process.
        needs: what must be there, or it is skipped: a GPU, torch, other nodes, a path that is given.
        after: checks that must have ended before it begins.
        requires: those of `after` without whose "ok" it is skipped.
        alone: it measures, so no other check may run beside it.
    """

    name: str
    says: str
    limit_s: float
    module: str
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    alone: bool = False

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    def look(self) -> Look:
        """Its function."""
        function: Look = importlib.import_module(self.module).look
        return function


def check_from_json(line: str) -> Check:
    """The inverse of `Check.to_json`."""
    fields: dict[str, Any] = json.loads(line)
    for name in ("needs", "after", "requires"):
        fields[name] = tuple(fields[name])
    return Check(**fields)


def unmet(needs: tuple[str, ...], request: Request, nvml: Any = None) -> str:
    """Why a check cannot be made here; empty if all it needs is there.

    Args:
        needs: of `NEEDS`; a check that needs a path says itself which one.
        request: what is asked of the node.
        nvml: as `gpu_counters`.
    """
    if PEERS in needs and request.nnodes == 1:
        return "there are no other nodes: --nnodes is 1"
    if TORCH in needs and importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if GPU in needs:
        from lightkeeper.supervisor.preflight.nvml import why_no_gpu

        return why_no_gpu(nvml)
    return ""
