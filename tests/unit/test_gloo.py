"""Building, reducing over, aborting and losing an epoch's gloo group."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))
from torch_workers import eventually, in_threads, local_groups, reduce_on_command, start_member

from lightkeeper.manager.groups import Alone, GroupFailed, LocalKeys, start_build
from lightkeeper.manager.sockets import Broken, Endpoint, HeldSocket, read_sockaddr, refusing, tcp_sockets
from lightkeeper.manager.store import RendezvousStore


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_member_gets_the_same_bits(size, dtype):
    with local_groups(size) as groups:
        tensors = [torch.randn(10_007, dtype=torch.float64).to(dtype) for _ in groups]
        total = sum(t.double() for t in tensors)
        reductions = [group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)]
        for reduction in reductions:
            reduction.wait(60.0)
            assert reduction.done()
        assert all(torch.equal(tensors[0], tensor) for tensor in tensors)
        torch.testing.assert_close(tensors[0].double(), total, rtol=0.05, atol=0.1)


def test_all_gather_is_in_slot_order():
    with local_groups(3) as groups:
        gathered = in_threads(*(lambda g=g: g.all_gather(torch.tensor([g.slot]), 10.0) for g in groups))
        assert [[int(x) for x in row] for row in gathered] == [[0, 1, 2]] * 3


def test_group_of_one_sums_nothing_and_can_be_aborted():
    group = start_build("gloo", LocalKeys(), 0, 1, 1.0, "alone").wait()
    assert isinstance(group, Alone)
    tensor = torch.arange(3.0)
    reduction = group.all_reduce(tensor)
    assert reduction.done()
    reduction.wait(0.0)
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    group.abort("enough")
    with pytest.raises(GroupFailed, match="enough"):
        group.all_reduce(tensor)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="slot 2 is outside a group of 2"):
        start_build("gloo", LocalKeys(), 2, 2, 1.0, "x")
    with pytest.raises(ValueError, match="'mpi'"):
        start_build("mpi", LocalKeys(), 0, 2, 1.0, "x")


def test_abort_ends_a_pending_reduce_and_every_later_one():
    with local_groups(2) as groups:
        reduction = groups[0].all_reduce(torch.zeros(1000))
        assert not reduction.done()
        groups[0].abort("peer is frozen")
        with pytest.raises(GroupFailed, match="peer is frozen") as failed:
            reduction.wait(60.0)
        assert (failed.value.local, failed.value.suspects, failed.value.aborted) == (False, (), "peer is frozen")
        assert reduction.done()
        with pytest.raises(GroupFailed, match="peer is frozen"):
            groups[0].all_reduce(torch.zeros(1))
        groups[0].abort("again")  # idempotent


def test_abort_ends_a_reduce_also_where_gloo_never_raises(monkeypatch):
    """Seen after a freeze: the sockets are shut, and the pending operation stays pending for ever."""
    monkeypatch.setattr("lightkeeper.manager.sockets.HeldSocket.shut_down", lambda held: None)
    with local_groups(2) as groups:
        reduction = groups[0].all_reduce(torch.zeros(1000))
        groups[0].abort("epoch 2 is being prepared")
        with pytest.raises(GroupFailed, match="epoch 2 is being prepared"):
            reduction.wait(60.0)
        assert not reduction.done(), "who waits must give its buffer up"
        groups[1].all_reduce(torch.zeros(1000)).wait(60.0)  # let both end, so that the groups can be torn down


def test_wait_is_bounded_and_may_be_repeated():
    with local_groups(2) as groups:
        reduction = groups[0].all_reduce(torch.ones(10))
        with pytest.raises(GroupFailed, match=r"unfinished after 0\.0 s") as failed:
            reduction.wait(0.01)
        assert not failed.value.local and failed.value.aborted is None
        groups[1].all_reduce(torch.ones(10)).wait(60.0)
        reduction.wait(60.0)


def test_a_misuse_is_a_local_error():
    with local_groups(2) as groups:
        reductions = [group.all_reduce(torch.zeros(3, dtype=torch.int16)) for group in groups]
        for reduction in reductions:
            with pytest.raises(GroupFailed, match="Invalid scalar type") as failed:
                reduction.wait(60.0)
            assert failed.value.local and not failed.value.suspects


@pytest.fixture
def members(tmp_path: Path):
    started = [start_member(reduce_on_command, tmp_path, slot, 3, 500_000) for slot in range(3)]
    for _, pipe in started:
        assert pipe.poll(120.0) and pipe.recv()[0] == "built"
    yield started
    for process, pipe in started:
        pipe.close()
        process.kill()
        process.join()


def answer(pipe):
    assert pipe.poll(60.0), "no answer from a member"
    return pipe.recv()


def test_a_killed_member_breaks_the_reduce_by_itself_and_is_named(members):
    for _, pipe in members[:2]:
        pipe.send("go")
        assert answer(pipe)[0] == "waiting"
    members[2][0].kill()
    for _, pipe in members[:2]:
        kind, (text, local, suspects, aborted, _seconds) = answer(pipe)
        assert kind == "failed", text
        assert not local and aborted is None
        assert suspects == (2,), text


@pytest.mark.parametrize(("guilty", "victim"), [(2, 1), (1, 2)])
def test_who_aborted_because_of_another_is_not_suspected(members, guilty, victim):
    """Slot 0 looks only after the victim has aborted: by then its connections to both are broken."""
    (_, late), (_, pipe) = members[0], members[victim]
    late.send("go and look later")
    pipe.send("go")
    assert answer(late)[0] == answer(pipe)[0] == "waiting"
    members[guilty][0].kill()
    assert answer(pipe)[1][2] == (guilty,)
    pipe.send("abort first")
    assert answer(pipe)[0] == "aborted"
    late.send("look")
    kind, (text, local, suspects, aborted, _seconds) = answer(late)
    assert (kind, local, aborted) == ("failed", False, None), text
    assert suspects == (guilty,), text


def test_a_broken_connection_is_remembered_though_gloo_closes_it():
    watched, others = zip(*(socket.socketpair(socket.AF_UNIX) for _ in range(3)), strict=True)
    with contextlib.ExitStack() as stack:
        for sock in (*watched, *others):
            stack.enter_context(sock)
        held = [HeldSocket(s.fileno(), os.fstat(s.fileno()).st_ino, Endpoint("", 0), None, False) for s in watched]
        broken = Broken(held)
        stack.callback(broken.close)
        others[2].send(b"alive")
        assert broken.in_order() == ()
        for k in (1, 0):
            others[k].close()
        for sock in watched:
            sock.close()
        assert broken.in_order() == broken.in_order() == (held[1], held[0])
        broken.close()
        assert broken.in_order() == (held[1], held[0])


def test_only_where_nobody_listens_any_more_a_connection_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as ended:
        there, gone = Endpoint(*server.getsockname()), Endpoint(*ended.getsockname())
        ended.close()
        assert refusing([there, gone], b"hello", 5.0) == {gone}
        with server.accept()[0] as met:
            assert met.recv(6, socket.MSG_WAITALL) == b"hello"
        assert refusing([there, gone], b"hello", 0.0) == set()


def test_a_frozen_member_keeps_the_reduce_waiting_until_abort(members):
    os.kill(members[2][0].pid, signal.SIGSTOP)
    for _, pipe in members[:2]:
        pipe.send("go and abort")
        assert answer(pipe)[0] == "waiting"
    assert not any(pipe.poll(0.2) for _, pipe in members[:2])
    for _, pipe in members[:2]:
        pipe.send("abort")
    for _, pipe in members[:2]:
        kind, (text, local, _suspects, aborted, seconds) = answer(pipe)
        assert (kind, local, aborted) == ("failed", False, "test says so"), text
        assert seconds < 15.0  # measured: some milliseconds; the time-out of the reduce is 60 s
    assert all(process.is_alive() for process, _ in members)


def test_200_groups_leave_no_descriptor_and_no_thread_behind():
    with local_groups(2):
        pass
    assert eventually(lambda: not teardowns()), "also what earlier tests left must have ended: it closes descriptors"
    before = open_descriptors()
    for i in range(200):
        with local_groups(2) as groups:
            if i % 2:
                reduction = groups[0].all_reduce(torch.zeros(10))
                groups[0].abort("no more")
                with pytest.raises(GroupFailed):
                    reduction.wait(60.0)
    assert eventually(lambda: open_descriptors() <= before and not teardowns())


def teardowns():
    return {t for t in threading.enumerate() if t.name.startswith(("close", "build", "give up"))}


def test_abort_touches_no_other_socket_even_under_a_reused_descriptor():
    with local_groups(2) as groups:
        held = list(groups[0]._sockets)
        mine, theirs = socket.socketpair()
        copies = {fd.fd: os.dup(fd.fd) for fd in held}
        for fd in copies:  # gloo's descriptor now is somebody else's socket
            os.dup2(mine.fileno(), fd)
        groups[0].abort("test")
        theirs.sendall(b"alive")
        assert mine.recv(5) == b"alive"
        for fd, copy in copies.items():
            os.dup2(copy, fd)
            os.close(copy)
        mine.close()
        theirs.close()


def test_a_build_that_waits_for_a_key_can_be_aborted():
    others = teardowns()  # an earlier test's may not have ended
    build = start_build("gloo", LocalKeys(), 0, 2, 60.0, "epoch 9")
    assert not build.done()
    build.abort("newer epoch")
    with pytest.raises(GroupFailed, match="newer epoch") as failed:
        build.wait()
    assert failed.value.aborted == "newer epoch"
    assert eventually(lambda: teardowns() <= others)


@pytest.mark.parametrize("slot", [0, 1])
def test_a_build_that_waits_for_a_connection_can_be_aborted(slot):
    before, others = open_descriptors(), teardowns()
    keys = LocalKeys()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a member that published its address and froze
        build = start_build("gloo", keys.handle(), slot, 2, 60.0, "epoch 9")
        value = bytearray(keys.get(f"0/{slot}", 10.0))
        at = 8 + int.from_bytes(value[:8], "little") + 8
        assert read_sockaddr(bytes(value[at:])) is not None
        value[at + 2 : at + 4] = silent.getsockname()[1].to_bytes(2, "big")
        keys.set(f"0/{1 - slot}", bytes(value))
        assert not build.done()
        build.abort("newer epoch")
        with pytest.raises(GroupFailed, match="newer epoch"):
            build.wait()
        assert eventually(lambda: teardowns() <= others), "the constructor still waits"
    assert eventually(lambda: open_descriptors() <= before)


def test_a_build_nobody_joins_ends_by_its_time_out():
    build = start_build("gloo", LocalKeys(), 0, 2, 0.1, "epoch 9")
    with pytest.raises(GroupFailed, match="epoch 9 failed") as failed:
        build.wait()
    assert not failed.value.local


def test_the_process_ends_quietly_with_groups_in_every_state():
    script = """
import torch, time
from lightkeeper.manager.groups import LocalKeys, start_build
keys = LocalKeys()
groups = [b.wait() for b in [start_build("gloo", keys.handle(), i, 2, 60.0, "a") for i in range(2)]]
pending = groups[0].all_reduce(torch.zeros(9))
stuck = start_build("gloo", LocalKeys(), 0, 2, 60.0, "b")
groups[1].abort("over")
print("end")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_build_that_goes_to_and_fro_between_c_and_python_ends_before_the_process():
    """Each `get` is called from gloo's constructor; Python ends a thread that wakes in it as the interpreter ends."""
    script = """
import threading, time
from lightkeeper.manager.groups import LocalKeys, start_build
called = threading.Event()
class Keys(LocalKeys):
    def get(self, key, timeout_s):
        called.set()
        while self._aborted is None:
            time.sleep(0.001)
        return super().get(key, timeout_s)
build = start_build("gloo", Keys(), 0, 2, 60.0, "a")
called.wait()
print("end")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_own_sockets_are_found_with_both_ends():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        found = {s.fd: s for s in tcp_sockets()}
        assert found[server.fileno()].listening and found[server.fileno()].peer is None
        assert found[client.fileno()].peer == server.getsockname()
        assert found[client.fileno()].shut_down()


def test_store_keeps_values_and_has_no_counters():
    keys = LocalKeys()
    store = RendezvousStore(keys, 0.05)
    store.set("a", b"1")
    assert store.get("a") == b"1" and store.check(["a"]) and not store.check(["a", "b"])
    store.wait(["a"])
    with pytest.raises(TimeoutError):
        store.get("b")
    with pytest.raises(NotImplementedError):
        store.add("n", 1)
