"""The process of one check: `python -m lightkeeper.supervisor.preflight.child`.

Standard input is a file of one JSON line: the check, what is asked, and the results it builds on. The result goes to
the descriptor that standard output was; what the check and its libraries print goes to standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightkeeper.supervisor.preflight.check import Check
    from lightkeeper.supervisor.preflight.request import Request
    from lightkeeper.supervisor.preflight.results import Result

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: whatever loses its parent below becomes a child of this process


def main() -> None:
    """Makes the check and writes what it found."""
    from lightkeeper.manager.processes import die_with_parent
    from lightkeeper.supervisor.preflight.check import check_from_json
    from lightkeeper.supervisor.preflight.request import request_from_json
    from lightkeeper.supervisor.preflight.results import from_fields

    die_with_parent()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked = json.loads(sys.stdin.buffer.readline())
    if os.getppid() != asked["parent"]:
        return  # it ended before the kernel was asked to tell
    answer = os.dup(1)
    os.dup2(2, 1)
    check = check_from_json(asked["check"])
    request = request_from_json(asked["request"])
    earlier = {fields["name"]: from_fields(fields) for fields in asked["earlier"]}
    os.write(answer, _made(check, request, earlier).encode() + b"\n")
    os.close(answer)


def _made(check: Check, request: Request, earlier: dict[str, Result]) -> str:
    """The result, as one JSON line. A check that raises is no proof of a sound node, so it counts as failed."""
    from lightkeeper.supervisor.preflight.check import unmet
    from lightkeeper.supervisor.preflight.results import failed, skipped

    try:
        why = unmet(check.needs, request)
        return (skipped(why) if why else check.look()(request, earlier)).to_json()
    except BaseException as error:  # SystemExit among them: whatever it is, it is told and ends this process alone
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        return failed(f"the check itself failed: {text}", {"traceback": traceback.format_exc()[-4000:]}).to_json()


if __name__ == "__main__":
    main()
