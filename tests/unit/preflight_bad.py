"""Checks that misbehave, for the runner: each is started in a process of its own by this file's name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, ok


def look(request: Request, earlier: Mapping[str, Result]) -> Result:
    """Does what the test asks by the only word that it can give: the name to look for among the GPUs."""
    act, _, folder = request.gpu_name.partition("@")
    if act == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        with open(f"{folder}/pids", "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        print("about to hang", flush=True)
        time.sleep(600)
    if act == "leave":  # a process behind, which holds the pipes open
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(f"{folder}/pids", "w") as file:
            file.write(str(child.pid))
    if act == "raise":
        raise RuntimeError("it is not what it says")
    if act == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if act == "exit":
        sys.exit(0)
    if act == "lie":
        return {"state": "ok"}  # type: ignore[return-value]
    return ok(f"after {','.join(sorted(earlier))}")
