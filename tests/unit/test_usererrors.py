"""Which exceptions say that a connection to another rank broke."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightkeeper.data.making import Failure, Task
from lightkeeper.data.share import SampleError
from lightkeeper.errors import ToldError
from lightkeeper.manager.usererrors import is_broken
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
