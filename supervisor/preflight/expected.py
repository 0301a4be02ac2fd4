"""The facts that `--expect` names, from a file."""

from __future__ import annotations

import difflib
import json
from typing import Any

from lightkeeper.errors import UsageError

FILE_BYTES_MAX = 8 << 20
FACTS = (
    "python", "machine", "cpus", "lightkeeper", "torch", "torch_cuda", "nccl", "driver", "driver_cuda", "gpus",
    "infiniband",
)  # fmt: skip


def read_expected(path: str) -> dict[str, Any]:
    """Facts by name: an object of them, or the report that another node's `--json` printed.

    Raises:
        UsageError: the file cannot be read, or a fact in it is none.
    """
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(FILE_BYTES_MAX))
    except OSError as error:
        raise UsageError(f"--expect {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"--expect {path}: it is not JSON: {error}") from error
    if isinstance(content, dict) and isinstance(content.get("results"), list):
        found = [one for one in content["results"] if isinstance(one, dict) and one.get("name") == "versions"]
        if not found:
            raise UsageError(f"--expect {path}: the report has no check 'versions'")
        content = found[0].get("evidence")
    if not isinstance(content, dict) or not content:
        raise UsageError(f"--expect {path}: give an object of facts, or what `lightkeeper preflight --json` printed")
    for name in content:
        if name not in FACTS:
            near = difflib.get_close_matches(name, FACTS, 1)
            told = f": is {near[0]} meant?" if near else f"; there are {', '.join(FACTS)}"
            raise UsageError(f"--expect {path}: there is no fact {name!r}{told}")
    return content
