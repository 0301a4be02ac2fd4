"""A snapshot is the state of its boundary, whatever the training thread does afterwards within the contract."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from state_objects import RANGE_BYTES, Training, name_of

from lightkeeper.manager.state import snapshot as snapshot_module
from lightkeeper.manager.state.registry import StateRegistry
from lightkeeper.manager.state.snapshot import SnapshotFailed, Snapshotter

NAME = name_of(2)


@pytest.fixture
def held(monkeypatch):
    """Copies wait until this is set."""
    go = threading.Event()
    copy = snapshot_module.copy_all

    def held_copy(*args):
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(10)
        return copy(*args)

    monkeypatch.setattr(snapshot_module, "copy_all", held_copy)
    yield go
    go.set()


def snapshotter_of(training: Training, **options) -> Snapshotter:
    return Snapshotter(training.registry, range_bytes=RANGE_BYTES, **options)


def test_a_snapshot_has_the_fingerprint_of_the_state():
    training = Training(0, steps=2)
    snapshotter = snapshotter_of(training)
    assert snapshotter.prepare() == training.registry.layout().nbytes
    snapshot = snapshotter.begin(NAME).wait(10)
    assert snapshot.fingerprint == training.fingerprint()
    assert snapshot.name == snapshot.layout.name == NAME
    assert snapshot.range(0).readonly


def test_what_the_training_thread_changes_after_the_wait_is_not_in_it():
    training = Training(0, steps=2)
    before = training.fingerprint()
    snapshot = snapshotter_of(training).begin(NAME).wait(10)
    training.step()
    assert training.fingerprint() != before
    assert snapshot.fingerprint == before


def test_scalars_and_small_tensors_of_users_are_read_at_the_boundary(held):
    training = Training(0, steps=2)
    before = training.fingerprint()
    copy = snapshotter_of(training).begin(NAME)
    assert not copy.done
    training.averages.inner["mean"].zero_()  # a user's object may change at any time
    training.averages.inner["counts"].append(5)
    training.scheduler.last_epoch = 99
    training.optimizer.param_groups[0]["lr"] = 5.0
    training.model.seen = 77
    with pytest.raises(TimeoutError, match="is not copied after"):
        copy.wait(0.01)
    held.set()
    assert copy.wait(10).fingerprint == before


def test_forward_and_backward_run_beside_the_copy(held):
    training = Training(0, steps=2)
    before = training.fingerprint()
    copy = snapshotter_of(training).begin(NAME)
    hidden = training.model.embed(torch.arange(5))
    training.model.head(training.model.body(hidden.bfloat16()).float()).sum().backward()
    held.set()
    assert copy.wait(10).fingerprint == before


def test_state_that_changes_under_the_copy_is_found_and_named(held):
    training = Training(0, steps=2)
    snapshotter = snapshotter_of(training)
    copy = snapshotter.begin(NAME)
    with torch.no_grad():
        training.model.kept.add_(1)
    held.set()
    with pytest.raises(SnapshotFailed, match=r"model\.kept changed while it was copied: .*scope='group'"):
        copy.wait(10)
    with pytest.raises(SnapshotFailed, match="model.kept changed"), snapshotter.serving(None, 1.0):
        pass
    assert snapshotter.begin(name_of(3)).wait(10).fingerprint == training.fingerprint()


def test_one_snapshot_serves_several_and_is_made_once():
    training = Training(0, steps=1)
    snapshotter = snapshotter_of(training)
    first = snapshotter.begin(NAME)
    assert snapshotter.begin(NAME) is first
    with snapshotter.serving(NAME, 10) as one, snapshotter.serving(None, 10) as other:
        assert one is other


def test_memory_is_used_anew_when_nobody_reads_it():
    training = Training(0, steps=1)
    nbytes = training.registry.layout().nbytes
    snapshotter = snapshotter_of(training, bytes_max=nbytes)
    snapshotter.prepare()
    before = training.fingerprint()
    with pytest.raises(SnapshotFailed, match="goes beyond the bound"):
        first = snapshotter.begin(NAME).wait(10)
        snapshotter.begin(name_of(3)).wait(10)
    with snapshotter.serving(NAME, 10) as snapshot:
        snapshotter.release(NAME)
        with pytest.raises(SnapshotFailed, match="goes beyond the bound"):
            snapshotter.begin(name_of(3)).wait(10)
        address = bytes_address(snapshot)
        assert snapshot.fingerprint == before  # still whole for who reads it
    training.step()
    wait_until_free(snapshotter)
    second = snapshotter.begin(name_of(3)).wait(10)
    assert bytes_address(second) == address and second.fingerprint == training.fingerprint()
    with pytest.raises(SnapshotFailed, match="no longer held"), first.reading():
        pass


def bytes_address(snapshot) -> int:
    return np.frombuffer(snapshot.range(0), dtype=np.uint8).ctypes.data


def wait_until_free(snapshotter: Snapshotter) -> None:
    for _ in range(1000):
        if snapshotter._free:
            return
        threading.Event().wait(0.005)
    pytest.fail("the memory was never given back")


def test_a_bound_that_is_too_small_is_a_clear_refusal():
    training = Training(0, steps=1)
    with pytest.raises(
        SnapshotFailed, match=r"a snapshot of \d+ bytes beside 0 that are held goes beyond the bound of 9"
    ):
        snapshotter_of(training, bytes_max=9).prepare()


def test_names_that_are_not_held():
    training = Training(0)
    snapshotter = snapshotter_of(training)
    with pytest.raises(SnapshotFailed, match="no snapshot is held"), snapshotter.serving(None, 1.0):
        pass
    snapshotter.begin(NAME).wait(10)
    with (
        pytest.raises(SnapshotFailed, match="no snapshot of step 2 of e4"),
        snapshotter.serving(name_of(2, epoch=4), 1.0),
    ):
        pass


def test_who_asks_while_it_is_copied_waits_with_a_bound(held):
    training = Training(0)
    snapshotter = snapshotter_of(training)
    snapshotter.begin(NAME)
    with pytest.raises(SnapshotFailed, match="is not copied after"), snapshotter.serving(NAME, 0.01):
        pass
    held.set()
    with snapshotter.serving(NAME, 10) as snapshot:
        assert snapshot.fingerprint == training.fingerprint()


def test_what_lies_between_tensors_is_zero_whatever_was_there_before():
    registry = StateRegistry()
    parameters = nn.ParameterList([nn.Parameter(torch.ones(n)) for n in (40, 3, 5)])
    registry.register("model", parameters)
    snapshotter = Snapshotter(registry, range_bytes=64)
    snapshotter.begin(NAME).wait(10)
    snapshotter.release()
    wait_until_free(snapshotter)
    parameters[0] = nn.Parameter(torch.ones(1))
    second = snapshotter.begin(name_of(3)).wait(10)
    assert second.fingerprint == registry.fingerprint(64)


def test_an_error_in_a_users_state_dict_is_theirs():
    class Broken:
        fine = True

        def state_dict(self):
            if not self.fine:
                raise KeyError("theirs")
            return {}

        def load_state_dict(self, state):
            pass

    registry, broken = StateRegistry(), Broken()
    registry.register("broken", broken)
    broken.fine = False
    with pytest.raises(KeyError, match="theirs"):
        Snapshotter(registry).begin(NAME)


def test_state_dict_is_called_on_the_training_thread():
    class Watching:
        def __init__(self) -> None:
            self.threads: list[threading.Thread] = []

        def state_dict(self):
            self.threads.append(threading.current_thread())
            return {"x": torch.ones(1 << 19)}

        def load_state_dict(self, state):
            pass

    registry, watching = StateRegistry(), Watching()
    registry.register("watching", watching)
    Snapshotter(registry).begin(NAME).wait(10)
    assert set(watching.threads) == {threading.main_thread()}
