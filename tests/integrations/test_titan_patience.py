"""torchtitan's time-outs of a group's own collectives: raised where they are its defaults, else kept or refused."""

from __future__ import annotations

import pytest

pytest.importorskip("torchtitan")

from torchtitan.config import CommConfig

from lightkeeper.errors import UsageError
from lightkeeper.integrations.torchtitan.patience import comm_of
from lightkeeper.manager.settings import Settings


def test_its_defaults_give_way() -> None:
    given = CommConfig(trace_buf_size=7)
    comm = comm_of(given, Settings(), ranks=8)
    assert (comm.init_timeout_seconds, comm.train_timeout_seconds, comm.trace_buf_size) == (1200, 1200, 7)
    assert given.train_timeout_seconds == 100, "the config is the user's"


@pytest.mark.parametrize("name", ["init_timeout_seconds", "train_timeout_seconds"])
def test_what_is_given_is_kept_or_refused_by_its_name(name: str) -> None:
    assert getattr(comm_of(CommConfig(**{name: 721}), Settings(), ranks=8), name) == 721
    with pytest.raises(UsageError, match=f"comm.{name} 720 must be above reduce_timeout_s 720 .12 x outage_budget_s"):
        comm_of(CommConfig(**{name: 720}), Settings(), ranks=8)
    assert getattr(comm_of(CommConfig(**{name: 5}), Settings(), ranks=1), name) == 5, "it waits for no other rank"
