"""Which exceptions say that a connection to another rank broke, and how the others are told."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest
import torch
import torch.distributed as dist

import lightkeeper
from lightkeeper.data.making import Failure, Task
from lightkeeper.data.share import SampleError
from lightkeeper.errors import ToldError, UsageError
from lightkeeper.manager import local
from lightkeeper.manager.extras import Contributions, ExtrasLayout
from lightkeeper.manager.rank import JobStopped
from lightkeeper.manager.usererrors import is_broken, report_exceptions, tell_in_one_line
from lightkeeper.manager.within import Apart

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12345"


def of_the_data(message: str) -> SampleError:
    trace = f"Traceback (most recent call last):\nConnectionResetError: {message}\n"
    return SampleError(Failure(3, "ConnectionResetError", message, trace), Task(2, 1, 0, (3,)))


def raised_from(cause: BaseException) -> BaseException:
    try:
        try:
            raise cause
        except type(cause):
            raise ValueError("while it was handled")  # noqa: B904
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        dist.DistBackendError("NCCL error in: x.cpp, remote process exited or there was a network error"),
        dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed"),
        Apart("the ranks of this group are apart"),
        raised_from(RuntimeError(GLOO)),
    ],
)
def test_a_broken_connection(error: BaseException) -> None:
    assert is_broken(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 16x1)"),
        ValueError("Connection closed by peer"),
        ConnectionResetError("Connection reset by peer"),
        RuntimeError("Caught ConnectionResetError in worker 0: [Errno 104] Connection reset by peer"),
        of_the_data("[Errno 104] Connection reset by peer"),
        of_the_data(GLOO),
        ToldError(GLOO),
        raised_from(of_the_data("NCCL error")),
        KeyboardInterrupt(),
    ],
)
def test_a_bug_of_the_users(error: BaseException) -> None:
    assert not is_broken(error)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back after the test


def told(error: type[Exception], do: object, capsys: pytest.CaptureFixture[str], ends_with: int | None = None) -> str:
    """What the hook prints for the exception that `do` raises; with which code it ends the process, if it does."""
    code = None
    with pytest.raises(error) as raised:
        do()  # type: ignore[operator]
    try:
        sys.excepthook(raised.type, raised.value, raised.tb)
    except SystemExit as end:
        assert issubclass(error, ToldError) and end.code == error.exit_code == 2
        code = end.code
    assert code == ends_with
    return capsys.readouterr().err


def wrong_extras() -> dict[str, object]:
    layout = ExtrasLayout()
    layout.declare("loss")
    late = ExtrasLayout()
    late.freeze(1)
    return {
        "extra 'los' was not declared before the first step (declared: loss)": lambda: Contributions(layout).add(
            "los", 1.0
        ),
        "extra 'loss' was declared (), given (2,)": lambda: Contributions(layout).add("loss", torch.ones(2)),
        "extra 'loss' is declared twice": lambda: layout.declare("loss"),
        "extra 'n' is declared after the first step began: declare it before": lambda: late.declare("n"),
    }


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize("line", list(wrong_extras()))
def test_a_wrong_extra_is_told_in_one_line_with_its_place(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    sent: list[local.RankError] = []
    report_exceptions(sent.append, lambda: 3, quiet=(JobStopped,))
    said = told(UsageError, wrong_extras()[line], capsys, ends_with=2)
    assert said.startswith(f"lightkeeper: {line} (test_usererrors.py:") and said.count("\n") == 1
    assert (sent[0].step, sent[0].message) == (3, line) and "Traceback" in sent[0].traceback


@pytest.mark.usefixtures("hook")
def test_why_the_job_stops_has_no_place_and_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def stop() -> None:
        raise JobStopped("the job stops: enough")

    def bug() -> None:
        raise ValueError("a bug")

    sent: list[local.RankError] = []
    report_exceptions(sent.append, lambda: 3, quiet=(JobStopped,))
    assert told(JobStopped, stop, capsys) == "lightkeeper: the job stops: enough\n"
    assert not sent
    assert "Traceback" in told(ValueError, bug, capsys) and sent[0].type == "ValueError"


@pytest.mark.usefixtures("hook")
def test_what_is_wrong_before_there_is_a_manager_is_told_in_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    monkeypatch.setenv("LIGHTKEEPER_TOKEN", "t")
    make = lambda: lightkeeper.Manager(model, torch.optim.SGD(other.parameters(), lr=1))  # noqa: E731
    foreign = told(UsageError, make, capsys, ends_with=2)
    assert "SGD updates 2 parameters (of 2) that are not the model's" in foreign and "Traceback" not in foreign
    assert "(test_usererrors.py:" in foreign and foreign.count("\n") == 1
    tell_in_one_line()
    with pytest.raises(TypeError, match=r"^Manager.__init__\(\) got an unexpected keyword argument 'spede'"):
        lightkeeper.Manager(model, torch.optim.SGD(model.parameters(), lr=1), spede=1)  # type: ignore[call-arg]


def test_the_line_is_printed_also_inside_torchs_own_hook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`init_process_group` wraps the hook: what is printed in it is kept until it returns, and this one does not."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    tell_in_one_line()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(io.StringIO()):
        sys.excepthook(UsageError, UsageError("no such thing"), None)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "lightkeeper: no such thing\n"
