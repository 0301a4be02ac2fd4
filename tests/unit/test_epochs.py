"""The process groups of planned epochs: what the manager is told of their builds."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from lightkeeper.manager import epochs as under_test
from lightkeeper.manager import local
from lightkeeper.manager.groups import Build, GroupFailed

PLAN = local.Plan(
    epoch=3, term=1, lighthouse="lh", members=("g0", "g1"), slot=0, step=-1, share=(), total=0, planned=True
)  # fmt: skip


class Client:
    def __init__(self) -> None:
        self.sent: queue.Queue[Any] = queue.Queue()

    def send(self, message: Any) -> None:
        self.sent.put(message)


class Forming:
    """Forms by script: fails, or waits until it is interrupted."""

    def __init__(self, error: str | None) -> None:
        self._error, self._interrupted = error, queue.Queue[str]()

    def form(self) -> Any:
        if self._error is not None:
            raise GroupFailed(self._error)
        raise GroupFailed(self._interrupted.get(timeout=10))

    def interrupt(self, reason: str) -> None:
        self._interrupted.put(reason)


def building(monkeypatch: pytest.MonkeyPatch, error: str | None) -> tuple[under_test.Epochs, Client]:
    monkeypatch.setattr(under_test, "start_build", lambda *_, **__: Build(Forming(error), "e3r0"))
    client = Client()
    epochs = under_test.Epochs(client, 0, "gloo", "127.0.0.1", 10.0)  # type: ignore[arg-type]
    epochs.build(PLAN)
    return epochs, client


def test_a_build_that_fails_is_told_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _, client = building(monkeypatch, "no connection to g1 " + "x" * 10_000)
    told = client.sent.get(timeout=10)
    assert isinstance(told, local.BuildFailed) and told.epoch == 3
    assert told.error.startswith("no connection to g1") and len(told.error) == under_test.ERROR_CHARS_MAX


def test_a_build_that_was_given_up_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs, client = building(monkeypatch, None)
    epochs.abort(4, "epoch 4 is being prepared")
    with pytest.raises(GroupFailed):
        epochs.take(3)
    with pytest.raises(queue.Empty):
        client.sent.get(timeout=0.2)
