"""Puts the commands together; tells every foreseen error in one line.

Exit codes: 0 well; 1 it failed; 2 wrong input; 130 interrupted. `launch` ends with its
script's code, or with 103 to 107 (README).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer
from typer.exceptions import TyperException

from lightkeeper.errors import ToldError
from lightkeeper.streams import open_closed_streams
from lightkeeper.words import shown

INTERRUPTED = 130
TOLD_CHARS_MAX = 4000


def build() -> typer.Typer:
    """The application with all commands."""
    from lightkeeper.cli import (
        bench,
        chaos,
        checkpoint,
        demo,
        diagnose,
        drain,
        events,
        fence,
        launch,
        lighthouse,
        manager,
        notify,
        preflight,
        quarantine,
        simulate,
        status,
        watch,
        why,
    )
    from lightkeeper.cli import (
        run as run_job,
    )

    app = typer.Typer(
        name="lightkeeper",
        help="Keeps a PyTorch training run going when replica groups die, freeze or come back.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(version_option)
    app.command("lighthouse")(lighthouse.command)
    app.command("launch")(launch.command)
    app.command("manager", hidden=True)(manager.command)
    app.command("demo")(demo.command)
    app.command("bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench.command)
    app.command("simulate")(simulate.command)
    app.add_typer(chaos.build(), name="chaos")
    app.add_typer(checkpoint.build(), name="checkpoint")
    app.add_typer(quarantine.build(), name="quarantine")
    app.command("events")(events.command)
    app.command("why")(why.command)
    app.command("diagnose")(diagnose.command)
    app.command("run")(run_job.command)
    app.command("init")(run_job.init)
    app.command("preflight")(preflight.command)
    app.command("watch")(watch.command)
    app.command("status")(status.command)
    app.command(notify.WORD)(notify.command)  # for the list of commands; `run` takes it before
    app.command("drain")(drain.command)
    app.command("fence")(fence.command)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        from lightkeeper import __version__

        typer.echo(f"lightkeeper {__version__}")
        raise typer.Exit


def version_option(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
    ),
) -> None:
    """Keeps a PyTorch training run going when replica groups die, freeze or come back."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after `lightkeeper`; None: the process's own.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["notify"]:
            from lightkeeper.cli import notify

            return notify.run(words[1:])
        code = build()(args=list(arguments) if arguments is not None else None, standalone_mode=False)
    except TyperException as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        if message:  # no arguments at all: the help has been printed already
            tell(message)
        return int(getattr(error, "exit_code", 2))
    except ToldError as error:
        tell(str(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        tell("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # `lightkeeper events RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code if isinstance(code, int) else 0


def tell(message: str) -> None:
    """One line on standard error."""
    print("lightkeeper: " + shown(" ".join(message.split()), TOLD_CHARS_MAX), file=sys.stderr)


def main() -> None:
    """Entry point of the command `lightkeeper`."""
    open_closed_streams()
    # grpc's own fork handlers crash about every fourth child that is forked while a call is running
    # (measured: 132 of 400 by SIGSEGV, 4 by SIGABRT; none without the handlers). Our children never use their
    # parent's grpc.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    sys.exit(run())
