"""The facts that `--expect` names, from a file."""

from __future__ import annotations

from typing import Any

from lightkeeper.errors import UsageError
from lightkeeper.supervisor.preflight.files import check_names, read_json

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
    content = read_json("--expect", path, FILE_BYTES_MAX)
    if isinstance(content, dict) and isinstance(content.get("results"), list):
        found = [one for one in content["results"] if isinstance(one, dict) and one.get("name") == "versions"]
        if not found:
            raise UsageError(f"--expect {path}: the report has no check 'versions'")
        content = found[0].get("evidence")
    if not isinstance(content, dict) or not content:
        raise UsageError(f"--expect {path}: give an object of facts, or what `lightkeeper preflight --json` printed")
    check_names("--expect", path, "fact", content, FACTS)
    return content
