"""`lightkeeper watch RUN...`: from another machine, tell a person when a run makes no progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightkeeper.cli import group as shared
from lightkeeper.cli.options import check_lighthouses, require_token
from lightkeeper.errors import ToldError, UsageError
from lightkeeper.words import shown

if TYPE_CHECKING:
    from lightkeeper.supervisor.notify.message import Message
    from lightkeeper.supervisor.notify.settings import Setting
    from lightkeeper.supervisor.watch.service import Ask, Found

NOT_WELL = 1
RUNS_MAX = 100
CLOSE_S_MAX = 30.0


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The runs' folders.")],
    stalled_after: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Tell when no step was committed for so many seconds. Default: 20 usual steps or 3 of the longest, at "
            "least a minute; 10 minutes before the first steps.",
        ),
    ] = None,
    interval_s: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds between looks. Default: 10, less if --stalled-after is.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Look once, for cron: ends with 1 if a run stalls, failed or is not there.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object for every message, and at the end for every run.")
    ] = False,
    lighthouse: Annotated[
        str, typer.Option(metavar="HOST:PORT[,...]", help="Also ask this lighthouse, while it answers.")
    ] = "",
    job: Annotated[str, typer.Option(help="Id of the job at the lighthouse. Default: as the events say.")] = "",
    token_file: shared.TokenFile = None,
    webhook: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Post messages there; env:NAME, file:PATH.")
    ] = None,
    run_command: Annotated[
        list[str] | None, typer.Option("--command", metavar="'PROGRAM ARG...'", help="Run this with each message.")
    ] = None,
    mail_to: Annotated[list[str] | None, typer.Option(metavar="A", help="Mail messages there; needs --smtp.")] = None,
    smtp: Annotated[str, typer.Option(metavar="HOST:PORT", help="The mail server.")] = "",
    mail_from: Annotated[str, typer.Option(metavar="A", help="The sender's address.")] = "",
    smtp_security: Annotated[str, typer.Option(help="none (default), starttls or tls.")] = "",
    smtp_user: Annotated[str, typer.Option(help="For servers that ask for one.")] = "",
    smtp_password: Annotated[str, typer.Option(metavar="env:NAME|file:PATH", help="Where the password is.")] = "",
    settings: Annotated[str, typer.Option(metavar="FILE.toml", help="More of them, as tables [[notify]].")] = "",
    log: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep there, as events, who was told and who was not.")
    ] = None,
) -> int:
    """Tell a person when the committed step of a run stops advancing, and when it goes on; whatever else seems alive.

    Needs the runs' folders alone. Ends when all have ended: with 0 if all did so well, else with 1.
    """
    from lightkeeper.cli.telling import notifiers

    _check(runs, stalled_after, interval_s, once)
    found = notifiers(
        webhook or [], run_command or [], mail_to or [], smtp, mail_from, smtp_security, smtp_user, smtp_password,
        settings,
    )  # fmt: skip
    if job and not lighthouse:
        raise UsageError("--job is of no use without --lighthouse")
    ask = _asking(check_lighthouses(lighthouse, "--lighthouse"), require_token(token_file)) if lighthouse else None
    with _notifying(found, log) as tell:
        if once:
            return _once(runs, stalled_after, ask, job, json, tell)
        from lightkeeper.supervisor.watch.service import INTERVAL_S, watch

        usual_s = INTERVAL_S if stalled_after is None else min(INTERVAL_S, max(0.1, stalled_after / 4))
        ended = watch(runs, stalled_after, _teller(json, tell), ask, job, interval_s or usual_s)
        return max([_print(one, json) for one in ended])


def _check(runs: list[Path], stalled_after: float | None, interval_s: float | None, once: bool) -> None:
    if len(runs) > RUNS_MAX:
        raise UsageError(f"at most {RUNS_MAX} runs, got {len(runs)}")
    for value, option, lowest in ((stalled_after, "--stalled-after", 1.0), (interval_s, "--interval-s", 0.1)):
        if value is not None and not lowest <= value <= 7 * 86400:
            raise UsageError(f"{option} must be within {lowest:g}..{7 * 86400}, got {value:g}")
    if once and interval_s is not None:
        raise UsageError("--once looks once: --interval-s does not go with it")


@contextmanager
def _notifying(found: Sequence[Setting], log: Path | None) -> Iterator[Callable[[Message], None]]:
    """Tells people in the background, and at the end waits for that within a bound."""
    from lightkeeper.events.writer import EventLog
    from lightkeeper.supervisor.notify.events import event_of
    from lightkeeper.supervisor.notify.notifier import Notifier

    events = None if log is None else EventLog(log, "watch")
    notifier = Notifier(found, None if events is None else lambda outcome: events.write(event_of(outcome)))
    try:
        yield notifier.tell
    finally:
        notifier.close(CLOSE_S_MAX)


def _teller(json: bool, tell: Callable[[Message], None]) -> Callable[[Message], None]:
    def both(message: Message) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        line = message.json if json else f"{stamp} {shown(f'{message.subject}: {message.summary}', 2000)}"
        print(line, flush=True)
        tell(message)

    return both


def _once(
    runs: list[Path], stalled_after: float | None, ask: Ask | None, job: str, json: bool,
    tell: Callable[[Message], None],
) -> int:  # fmt: skip
    from lightkeeper.supervisor.watch.service import look_once, message_of

    code = 0
    for one in look_once(runs, stalled_after, ask, job):
        run, facts, alert = one
        if _print(one, json) and alert is not None:
            code = NOT_WELL
            tell(message_of(run, facts, alert))
    return code


def _print(found: Found, json: bool) -> int:
    """One line of a run; the exit code that follows from it."""
    import json as encoder

    from lightkeeper.supervisor.watch.machine import going_words

    run, facts, alert = found
    state = "goes_on" if alert is None else alert.what
    words = going_words(facts, time.time()) if alert is None else alert.summary
    if json:
        sys.stdout.write(encoder.dumps({"run": str(run), "state": state, "step": facts.best, "said": words}) + "\n")
    else:
        typer.echo(shown(f"{run}: {state.replace('_', ' ')}: {words}", 2000))
    return NOT_WELL if state in ("stalled", "failed") else 0


def _asking(addresses: tuple[str, ...], token: str) -> Ask:
    """Asks the lighthouses; whatever they do not say is said in words, and never an error."""
    from lightkeeper.cli.status import ask, choose

    def asked(job: str) -> tuple[int, str]:
        try:
            best = choose(ask(addresses, job, token))
        except ToldError as error:
            return -1, str(error)
        if best is None:
            return -1, "no lighthouse answers, or none knows the job"
        reply = best.reply
        step = max((group.step for group in reply.groups), default=-1)
        if reply.stopped:
            return step, f"the lighthouse says: stopped: {reply.stopped}"
        return step, f"the lighthouse waits for {reply.waiting}" if reply.waiting else ""

    return asked
