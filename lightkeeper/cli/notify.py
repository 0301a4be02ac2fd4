"""`lightkeeper notify -- COMMAND`: run any command with a durable log, and have a person told how it ended.

Read by `argparse`, and what is not needed before the command runs is imported afterwards: it starts a quarter
of a second sooner than by way of the other commands.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from lightkeeper.errors import ToldError, UsageError
from lightkeeper.words import say, shown

if TYPE_CHECKING:
    from lightkeeper.supervisor.notify.child import Child
    from lightkeeper.supervisor.notify.keeping import Kept
    from lightkeeper.supervisor.notify.message import Message
    from lightkeeper.supervisor.notify.settings import Setting

WORD = "notify"
FOLDER = "lightkeeper-notify"
TOLD_CHARS_MAX = 4000
LINE_CHARS_MAX = 160
ABOUT = "Run any command with a durable log, and have a person told how it ended. Its exit code is returned unchanged."


class _Parser(argparse.ArgumentParser):
    """One line for a wrong option, as everywhere else."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (lightkeeper notify --help)")


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = _Parser("lightkeeper notify", usage="%(prog)s [OPTION]... -- COMMAND [ARG]...", description=ABOUT,
                   allow_abbrev=False)  # fmt: skip
    add = made.add_argument
    add("--webhook", action="append", default=[], metavar="URL", help="post the message there as JSON, with a text for "
        "Slack and its like; env:NAME or file:PATH keeps the URL out of the process list")  # fmt: skip
    add("--mail-to", action="append", default=[], metavar="A", help="mail it to this address; needs --smtp")
    add("--smtp", default="", metavar="HOST:PORT", help="the mail server")
    add("--mail-from", default="", metavar="A", help="the sender's address (lightkeeper@ this host)")
    add("--smtp-security", default="", metavar="HOW", help="none (default), starttls or tls")
    add("--smtp-user", default="", metavar="USER", help="for servers that ask for one")
    add("--smtp-password", default="", metavar="env:NAME|file:PATH", help="where the password is")
    add("--command", action="append", default=[], metavar="'PROGRAM ARG...'", help="run this; the message is on its "
        "standard input as JSON, and in LIGHTKEEPER_MESSAGE")  # fmt: skip
    add("--settings", default="", metavar="FILE.toml", help="more of them, as tables [[notify]]")
    add("--on", choices=("failure", "always"), default="failure", help="when a person is told (failure)")
    add("--name", default="", help="what it is called in the message (the command's name)")
    add("--log", default=FOLDER, metavar="DIR", help=f"keep the log in a folder below this one ({FOLDER})")
    add("--artefact", action="append", default=[], metavar="GLOB", help="pack these files beside the log when it ends")
    add("--budget-mib", type=float, default=64.0, metavar="N", help="size of that archive at most; what is left out is "
        "named (64)")  # fmt: skip
    add("--within-s", type=float, default=30.0, metavar="S", help="how long it is tried at the end to tell (30)")
    return made


def run(words: Sequence[str], environment: dict[str, str] | None = None) -> int:
    """Runs the command.

    Args:
        words: the options, `--`, and the command.
        environment: of the command; None: this process's.

    Returns:
        The command's exit code, 128+N for a signal N.

    Raises:
        UsageError: an option is wrong, or no log can be kept; the command was not started.
    """
    own = dict(os.environ) if environment is None else environment
    split = list(words).index("--") if "--" in words else len(words)
    options = parser().parse_args(list(words[:split]))
    argv = list(words[split + 1 :])
    if not argv:
        raise UsageError("give the command after --: lightkeeper notify [OPTION]... -- COMMAND [ARG]...")
    for value, option, most in ((options.budget_mib, "--budget-mib", 1 << 20), (options.within_s, "--within-s", 600)):
        if not 0 < value <= most:
            raise UsageError(f"{option} must be above 0 and at most {most}, got {value:g}")
    settings = _settings(options)
    name = options.name or os.path.basename(argv[0])
    from lightkeeper.supervisor.notify.child import Child, one_stream
    from lightkeeper.supervisor.notify.keeping import Kept

    joint = one_stream()
    kept = Kept(options.log, name, argv, ["output.log"] if joint else ["stdout.log", "stderr.log"])
    logs = dict(zip((1,) if joint else (1, 2), kept.logs, strict=True))
    begun_s = time.monotonic()
    try:
        child = Child(argv, own, logs)
    except OSError as error:
        raise ToldError(f"{name} cannot be started: {error.strerror or error}") from None
    code = child.wait()
    try:
        _ended(options, settings, kept, child, name, code, time.monotonic() - begun_s)
    except Exception as error:  # a bug of ours, which is shown; whoever started the command still learns how it ended
        sys.excepthook(type(error), error, error.__traceback__)
    return code if code >= 0 else 128 - code


def _settings(options: argparse.Namespace) -> tuple[Setting, ...]:
    from lightkeeper.cli.telling import notifiers

    return notifiers(
        options.webhook, options.command, options.mail_to, options.smtp, options.mail_from, options.smtp_security,
        options.smtp_user, options.smtp_password, options.settings,
    )  # fmt: skip


def _ended(
    options: argparse.Namespace, settings: Sequence[Setting], kept: Kept, child: Child, name: str, code: int,
    seconds: float,
) -> None:  # fmt: skip
    """What is done after the command's end. Whatever goes wrong here is a line, and changes no exit code."""
    end: dict[str, Any] = {"exit_code": code, "seconds": round(seconds, 3), "wall": time.time(), "asked": child.asked}
    if child.held_open:
        say(f"lightkeeper: something that {name} started still holds its output open; what it prints now is not kept")
    if options.artefact:
        _pack(options, kept, end)
    message = None
    if code != 0 or options.on == "always":
        message = _message(kept, child, name, code, seconds)
        end.update(cause=message.cause, summary=message.summary)
    try:
        kept.close(end)
    except OSError as error:
        say(f"lightkeeper: the end of the log in {kept.path} may not be on the disk: {error.strerror or error}")
    if message is not None and code != 0:
        cause = f": {shown(message.cause, LINE_CHARS_MAX)}" if message.cause else ""
        say(f"lightkeeper: {message.summary}{cause}; its log is in {kept.path}")
    if message is not None and settings:
        _tell(settings, kept, message, options.within_s)


def _pack(options: argparse.Namespace, kept: Kept, end: dict[str, Any]) -> None:
    from lightkeeper.supervisor.notify.artefacts import pack

    try:
        packed = pack(options.artefact, os.path.join(kept.path, "artefacts.tar"), int(options.budget_mib * (1 << 20)))
        end["artefacts"] = vars(packed)
        kept.write("artefacts.json", vars(packed))
    except OSError as error:
        say(f"lightkeeper: the artefacts could not be packed into {kept.path}: {error.strerror or error}")
        return
    if packed.line:
        say(f"lightkeeper: {shown(packed.line, TOLD_CHARS_MAX)}")


def _message(kept: Kept, child: Child, name: str, code: int, seconds: float) -> Message:
    from lightkeeper.manager.exits import describe_exit
    from lightkeeper.supervisor.notify.message import Message

    lines = child.tail.lines()
    how = describe_exit(code)
    asked = f", after it was asked to end (signal {child.asked[0]})" if child.asked else ""
    return Message(
        what="finished" if code == 0 else "failed",
        job=name,
        summary=f"{name} {how} after {_duration(seconds)}{asked}",
        run=kept.cwd,
        cause=_cause(lines) if code != 0 else "",
        evidence=kept.path,
        lines=tuple(lines[-1000:]),
        host=os.uname().nodename,
        wall=time.time(),
    )


def _cause(lines: Sequence[str]) -> str:
    """The classified cause, with the line that decides; "" if no line says anything."""
    from lightkeeper.diagnose.classify import classify
    from lightkeeper.diagnose.rules import book

    found = classify(lines)
    if not found.rule:
        return ""
    cause = book().causes[found.cause]
    return f"{found.cause}: {cause.says} ({shown(found.line.strip(), LINE_CHARS_MAX)}); {cause.advice}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _tell(settings: Sequence[Setting], kept: Kept, message: Message, within_s: float) -> None:
    from lightkeeper.events.writer import EventLog
    from lightkeeper.supervisor.notify.child import while_waiting
    from lightkeeper.supervisor.notify.events import event_of
    from lightkeeper.supervisor.notify.notifier import Notifier

    try:
        log = EventLog(kept.path, "notify", job=message.job)
    except ToldError as error:
        say(f"lightkeeper: {error}")
        notifier = Notifier(settings)
    else:
        notifier = Notifier(settings, told=lambda outcome: log.write(event_of(outcome)))
    notifier.tell(message)
    if not while_waiting(lambda: notifier.close(within_s)):
        notifier.close(0.0)


def main(words: Sequence[str], environment: dict[str, str]) -> int:
    """As a process of its own: foreseen errors in one line.

    Returns:
        The exit code.
    """
    try:
        return run(words, environment)
    except ToldError as error:
        print("lightkeeper: " + shown(" ".join(str(error).split()), TOLD_CHARS_MAX), file=sys.stderr)
        return error.exit_code


def command() -> None:
    """Run any command with a durable log, and have a person told how it ended."""
