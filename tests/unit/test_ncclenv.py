"""What NCCL is told: inside a group it fails fast, but not before the runtime can act; across groups it ends nobody."""

from __future__ import annotations

import pytest

from lightkeeper.errors import UsageError
from lightkeeper.manager import ncclenv
from lightkeeper.manager.settings import Settings

TIMEOUTS = Settings().timeouts
TABLE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1500",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
}


def test_the_table() -> None:
    """As `docs/nccl.md` shows it."""
    assert ncclenv.unset({}, TIMEOUTS) == TABLE
    longer = ncclenv.unset({}, Settings(outage_budget_s=600).timeouts)
    assert (longer[ncclenv.HEARTBEAT], longer[ncclenv.NONBLOCKING]) == ("15000", "300")
    raised = Settings(collective_timeout_s=4000).timeouts
    assert float(ncclenv.unset({}, raised)[ncclenv.HEARTBEAT]) > 4000


@pytest.mark.parametrize(
    ("name", "value"), [*TABLE.items(), ("TORCH_NCCL_TRACE_BUFFER_SIZE", "9"), ("NCCL_ASYNC_ERROR_HANDLING", "1")]
)
def test_what_the_user_has_set_is_kept(name: str, value: str) -> None:
    new_name = {old: new for new, old in ncclenv.OLD_NAMES.items()}.get(name, name)
    assert ncclenv.unset({name: value}, TIMEOUTS).keys() == TABLE.keys() - {new_name}
    environment = {name: value}
    assert ncclenv.settle(environment, TIMEOUTS, made=False) == [] and environment[name] == value
    assert environment.keys() == (TABLE.keys() - {new_name}) | {name}


@pytest.mark.parametrize("seconds", ["10", "480", "720"])
def test_a_watchdog_that_ends_the_process_first_is_refused(seconds: str) -> None:
    with pytest.raises(UsageError) as raised:
        ncclenv.settle({ncclenv.HEARTBEAT: seconds}, TIMEOUTS, made=False)
    assert str(raised.value) == (
        f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={seconds} must be above reduce_timeout_s 720 (12 x outage_budget_s): NCCL's "
        "watchdog would end the process before this package can act; leave it out (1500 is set then), or "
        "TORCH_NCCL_ENABLE_MONITORING=0"
    )
    assert ncclenv.settle({ncclenv.HEARTBEAT: seconds, ncclenv.MONITORING: "0"}, TIMEOUTS, made=False) == []
    with pytest.raises(UsageError, match="above reduce_timeout_s"):
        ncclenv.settle({ncclenv.HEARTBEAT: seconds, ncclenv.MONITORING: "1"}, TIMEOUTS, made=False)


def test_what_is_no_number_is_named() -> None:
    with pytest.raises(UsageError, match="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC='soon' is not a whole number of seconds"):
        ncclenv.settle({ncclenv.HEARTBEAT: "soon"}, TIMEOUTS, made=False)


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"])
@pytest.mark.parametrize("value", ["0", "2"])
def test_a_group_that_does_not_fail_fast_is_told(name: str, value: str) -> None:
    (line,) = ncclenv.settle({name: value}, TIMEOUTS, made=False)
    assert line.startswith(f"TORCH_NCCL_ASYNC_ERROR_HANDLING={value}: kept, but") and "give 1 or 3" in line


def test_an_epoch_that_takes_longer_to_fail_than_anybody_waits_is_told() -> None:
    (line,) = ncclenv.settle({ncclenv.NONBLOCKING: "1800"}, TIMEOUTS, made=False)
    assert "must be below outage_budget_s 60 (the default)" in line


def test_groups_that_were_made_before_keep_torchs_watchdog_and_it_is_said_if_that_is_too_short() -> None:
    (line,) = ncclenv.settle({}, TIMEOUTS, made=True)
    assert "torch's 480 s must be above reduce_timeout_s 720" in line and "set it to 1500 where this is started" in line
    assert ncclenv.settle({}, Settings(outage_budget_s=30).timeouts, made=True) == [], "480 s are enough for that"
    assert ncclenv.settle({ncclenv.MONITORING: "0"}, TIMEOUTS, made=True) == []


def test_across_groups_nothing_ends_the_process_and_the_users_values_come_back() -> None:
    environment = {ncclenv.HANDLING: "1", "PATH": "/"}
    with ncclenv.across_groups(environment):
        inside = dict(environment)
    assert inside == {"PATH": "/", ncclenv.HANDLING: "0", ncclenv.MONITORING: "0", ncclenv.BLOCKING: "0"}
    assert environment == {ncclenv.HANDLING: "1", "PATH": "/"}
    with pytest.raises(RuntimeError), ncclenv.across_groups(environment):
        raise RuntimeError
    assert environment == {ncclenv.HANDLING: "1", "PATH": "/"}
