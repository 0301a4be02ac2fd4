"""`lightkeeper manager`: one group's manager process. Started by `launch` or by rank 0, not by hand."""

from __future__ import annotations

from typing import Any

from lightkeeper.cli import group


@group.takes_options
def command(**given: Any) -> int:
    """Run the manager of one replica group, without its ranks."""
    settings = group.settings(**given)
    from lightkeeper.manager.main import run

    return run(settings)
