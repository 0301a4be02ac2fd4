"""Whether the NVLinks of each GPU are up, as many as of the others, and without errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightkeeper.supervisor.preflight.nvml import nvlinks
from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok, skipped


def look(request: Request, earlier: Mapping[str, Result], nvml: Any = None) -> Result:
    """A link that is down on a GPU with others up, and recoveries of one that is up, are faults.

    Replays are the link's own correction: said, and no fault.
    """
    found = nvlinks(nvml)
    evidence = {"gpus": found}
    up = {gpu: sum(link["active"] for link in links.values()) for gpu, links in found.items()}
    if not any(up.values()):
        return skipped("no GPU has an active NVLink", evidence)
    most = max(up.values())
    wrong = [f"GPU {gpu}: {count} of {most} links are up" for gpu, count in up.items() if count < most]
    for gpu, links in found.items():
        for link, state in links.items():
            if recoveries := state["errors"].get("recovery", 0):
                wrong.append(f"GPU {gpu}: link {link} has recovered {recoveries} times")
    if wrong:
        return failed("; ".join(wrong), evidence)
    replays = sum(link["errors"].get("replay", 0) for links in found.values() for link in links.values())
    return ok(f"{most} links up on each of {len(up)} GPUs, {replays} replays", evidence)
