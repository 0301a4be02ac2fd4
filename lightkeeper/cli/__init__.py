"""The command line: one file per command, which imports what it needs when it runs: `--help` is quick."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the command `lightkeeper`."""
    if sys.argv[1:2] == ["notify"]:  # before the others are put together: somebody waits for its command to start
        environment = dict(os.environ)  # of the command: what we set here is not for it
        from lightkeeper.streams import open_closed_streams

        open_closed_streams()
        from lightkeeper.cli import notify

        code = notify.main(sys.argv[2:], environment)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a notifier that hangs is left behind
    from lightkeeper.cli import app

    app.main()
