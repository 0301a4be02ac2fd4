"""`lightkeeper drain`: the operator asks a group to leave the job at a step boundary."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from lightkeeper.cli import group as shared
from lightkeeper.cli.calls import Said, call, operator
from lightkeeper.cli.options import DEFAULT_LIGHTHOUSE, check_lighthouses
from lightkeeper.cli.runfolder import DEFAULT_JOB, RunFolder, reach
from lightkeeper.errors import ToldError, UsageError

LOOK_S = 0.2
GRACE_S = 5.0  # after the deadline, for the word of it to arrive
AWAY_S_MAX = 60.0
DEADLINE_S_MAX = 86_400.0


class NotDrained(ToldError):
    """The group has not left in good order."""

    exit_code = 1


def command(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The group that is to leave.")],
    deadline: Annotated[
        float | None,
        typer.Option("--deadline", metavar="S", help="Seconds after which it ends at once, in mid-step."),
    ] = None,
    lighthouse: Annotated[
        str | None,
        typer.Option(
            envvar="LIGHTKEEPER_LIGHTHOUSE",
            metavar="HOST:PORT[,...]",
            help="The lighthouse of the job.",
            show_default=DEFAULT_LIGHTHOUSE,
        ),
    ] = None,
    job: Annotated[
        str | None, typer.Option(envvar="LIGHTKEEPER_JOB", help="Id of the job.", show_default=DEFAULT_JOB)
    ] = None,
    token_file: shared.TokenFile = None,
    run_folder: RunFolder = None,
) -> int:
    """Ask a group to leave: it finishes its step, hands over its share and exits 0; the others lose nothing.

    Ends with 0 once it has left in good order; with 1 if it ended otherwise, was never asked, or no lighthouse can be
    reached; with 2 for wrong input.
    """
    if deadline is not None and not 0 < deadline <= DEADLINE_S_MAX:
        raise UsageError(f"--deadline must be above 0 and at most {DEADLINE_S_MAX:.0f} seconds, got {deadline:g}")
    to = reach(run_folder, lighthouse, job, token_file)
    return _Drain(group, deadline, to.job, to.token).run(check_lighthouses(to.lighthouse, "--lighthouse"))


class _Drain:
    """One request, until it is known what became of it."""

    def __init__(self, group: str, deadline_s: float | None, job: str, token: str) -> None:
        self.group, self.deadline_s, self.job, self.token = group, deadline_s, job, token
        self.until_s: float | None = None  # from when the group was asked
        self.incarnation = ""

    def run(self, addresses: tuple[str, ...]) -> int:
        """Asks the first lighthouse that has the group, and looks until it has left.

        Raises:
            NotDrained: if it cannot be asked, or ends otherwise.
        """
        asked = self._ask_one_of(addresses)
        address, reply, answered_s = asked.address, asked.reply, time.monotonic()
        self.incarnation = reply.incarnation
        if self.deadline_s is not None:
            self.until_s = answered_s + self.deadline_s
        within = "" if self.deadline_s is None else f" within {self.deadline_s:g} s"
        if reply.here:
            typer.echo(f"{self.group} is asked to leave{within}")
        while reply.here:
            time.sleep(LOOK_S)
            said = self._call(address, check=True)
            if said.reply is None:
                self._check_bounds(said, answered_s)
                continue
            reply, answered_s = said.reply, time.monotonic()
            if reply.here and not reply.how:  # a lighthouse that was started again knows of no request
                self._call(address, check=False)
            self._check_bounds(said, answered_s)
        line = f"{self.group} {reply.how}" if reply.how else f"{self.group} has left"
        if not reply.left:
            raise NotDrained(line)
        typer.echo(line)
        return 0

    def _ask_one_of(self, addresses: tuple[str, ...]) -> Said:
        refused = []
        for address in addresses:
            said = self._call(address, check=False)
            if said.reply is not None:
                return said
            refused.append(said.why_not())
        raise NotDrained("; ".join(refused) + f"; {self.group} was not asked")

    def _call(self, address: str, check: bool) -> Said:
        from lightkeeper.protos import lighthouse_pb2

        left_s = self.deadline_s if self.until_s is None else self.until_s - time.monotonic()
        deadline_ms = 0 if left_s is None else max(1, round(1000 * left_s))  # 0 would mean none
        request: Any = lighthouse_pb2.DrainGroupRequest(
            group=self.group, by=operator(), incarnation=self.incarnation,
            deadline_ms=deadline_ms, check=check,
        )  # fmt: skip
        return call("Lighthouse", "DrainGroup", address, request, self.job, self.token)

    def _check_bounds(self, said: Said, answered_s: float) -> None:
        now = time.monotonic()
        if said.code == "NOT_FOUND" or now - answered_s > AWAY_S_MAX:
            raise NotDrained(
                f"{self.group} was asked, and the lighthouse at {said.address} can no longer tell what became of it: "
                f"{said.details}"
            )
        if self.until_s is not None and now > self.until_s + GRACE_S:
            raise NotDrained(f"{self.group} was asked, and is still there after the deadline has passed")
