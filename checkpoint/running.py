"""Whether the job of this group trains already, so that the group will be given its state by the others."""

from __future__ import annotations

from lightkeeper.cli.calls import call
from lightkeeper.manager.addresses import read_addresses
from lightkeeper.manager.settings import Settings
from lightkeeper.protos import lighthouse_pb2

_MEMBERS = ("member", "spare")


def who_trains(settings: Settings) -> str | None:
    """Another group that is a member of the job now, as a lighthouse says; asks for at most 5 s an address.

    Returns:
        Its name; "" if there is none, None if nobody answers.
    """
    answered = False
    try:
        addresses = read_addresses(settings.lighthouse)
    except ValueError:
        return None  # the group's manager, which needs them, says so and goes on looking
    for address in addresses:
        said = call("Lighthouse", "Status", address, lighthouse_pb2.StatusRequest(), settings.job, settings.token)
        if said.reply is None or said.reply.stopped:
            answered = answered or said.reply is not None
            continue
        answered = True
        for group in said.reply.groups:  # the state is in words: "member", "spare, leaving", "member, not in touch"
            state, *more = group.state.split(", ")
            if state in _MEMBERS and "not in touch" not in more and group.group != settings.group:
                return str(group.group)
    return "" if answered else None
