"""Serving and fetching an entry, and every way in which that may go wrong."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightkeeper.lighthouse.names import Entry, Epoch, Term
from lightkeeper.manager.transfer import server as server_module
from lightkeeper.manager.transfer.client import TransferFailed, connect, fetch_entry
from lightkeeper.manager.transfer.server import STRANGERS_MAX, EntryServer, Refused
from lightkeeper.manager.transfer.wire import HEADER_MAX, HELLO_MAX, MAGIC

NAME = Entry(Epoch(3, Term(1, "lh-a")), 7)
OTHERS = [
    Entry(Epoch(3, Term(1, "lh-a")), 8),
    Entry(Epoch(4, Term(1, "lh-a")), 7),
    Entry(Epoch(3, Term(2, "lh-a")), 7),
    Entry(Epoch(3, Term(1, "lh-b")), 7),
]


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(300_000), torch.randn(1000).to(torch.bfloat16), torch.randn(9, dtype=torch.float64)]


class Donor:
    def __init__(self, **options) -> None:
        self.held = tensors()
        self.refusals: list[str] = []
        self.told = threading.Event()
        self.server = EntryServer("secret", self.provide, self.refused, **options)

    @contextlib.contextmanager
    def provide(self, entry: Entry) -> Iterator[list[torch.Tensor]]:
        if entry != NAME:
            raise Refused(f"holds {NAME}, not {entry}")
        yield self.held

    def refused(self, line: str) -> None:
        self.refusals.append(line)
        self.told.set()


@pytest.fixture
def donor():
    made = Donor()
    yield made
    made.server.close()


def into() -> list[torch.Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors()]


def test_an_entry_arrives_whole(donor):
    target = into()
    addresses = [tensor.data_ptr() for tensor in target]
    fetch_entry(donor.server.address, "secret", NAME, target, 10.0)
    assert all(torch.equal(a, b) for a, b in zip(target, donor.held, strict=True))
    assert [tensor.data_ptr() for tensor in target] == addresses
    assert donor.refusals == []


def test_ipv6():
    made = Donor(host="::1")
    try:
        target = into()
        fetch_entry(made.server.address, "secret", NAME, target, 10.0)
        assert torch.equal(target[0], made.held[0])
    finally:
        made.server.close()


@pytest.mark.parametrize("token", ["", "wrong", "secret ", "s\u00e9cret"])
def test_a_wrong_token_is_refused_and_reported(donor, token):
    with pytest.raises(TransferFailed, match="job token is missing or wrong"):
        fetch_entry(donor.server.address, token, NAME, into(), 10.0)
    assert "a wrong job token" in donor.refusals[0]


def test_a_missing_token_is_refused_and_reported(donor):
    reply = talk(donor, frame({"entry": {}}))
    assert b"refused" in reply and b"parts" not in reply
    assert "no job token" in donor.refusals[0]


@pytest.mark.parametrize("name", OTHERS)
def test_another_entry_is_refused_by_its_full_name(donor, name):
    with pytest.raises(TransferFailed, match="refused: holds step 7 of e3/1@lh-a"):
        fetch_entry(donor.server.address, "secret", name, into(), 10.0)


def frame(header: object) -> bytes:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return MAGIC + struct.pack("<I", len(data)) + data


def talk(donor: Donor, *data: bytes) -> bytes:
    """Send bytes to the server as they are; all that it answers."""
    host, _, port = donor.server.address.rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=10.0) as sock, contextlib.suppress(OSError):
        for piece in data:
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)  # may find that the server has already turned away
        while piece := sock.recv(65536):
            answer += piece
    return answer


@pytest.mark.parametrize(
    "hello",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        MAGIC + struct.pack("<I", HELLO_MAX + 1),
        MAGIC + struct.pack("<I", HEADER_MAX + 1),
        frame(b"not json"),
        frame(b"[" * 4000),
        frame([1, 2]),
        b"",
        MAGIC,
    ],
)
def test_a_malformed_hello_gets_no_answer(donor, hello):
    assert talk(donor, hello) == b""
    assert donor.told.wait(60.0) and "broke off" in donor.refusals[0]


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"entry": 3},
        {"entry": {"epoch": True, "term": 1, "lighthouse": "a", "step": 0}},
        {"entry": {"epoch": -1, "term": 1, "lighthouse": "a", "step": 0}},
        {"entry": {"epoch": 1, "term": 1, "lighthouse": 5, "step": 0}},
    ],
)
def test_a_malformed_request_gets_nothing(donor, request_):
    answer = talk(donor, frame({"token": "secret"}), frame(request_))
    assert b"parts" not in answer
    assert donor.told.wait(60.0) and "does not name an entry" in donor.refusals[0]


def test_an_oversized_header_is_refused_before_it_is_read(donor):
    talk(donor, frame({"token": "secret"}), MAGIC + struct.pack("<I", HEADER_MAX + 1))
    assert donor.told.wait(60.0) and "too long" in donor.refusals[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t[:2], "2 parts, not 3|has 3 parts, not 2"),
        (lambda t: [t[0].double(), *t[1:]], "float32"),
        (lambda t: [t[0][:-1].clone(), *t[1:]], "300000"),
        (lambda t: [t[0].reshape(2, -1), *t[1:]], "300000"),
    ],
)
def test_tensors_of_another_kind_are_refused_before_anything_is_read(donor, change, says):
    target = change(into())
    with pytest.raises(TransferFailed, match=says):
        fetch_entry(donor.server.address, "secret", NAME, target, 10.0)
    assert not target[0].any()


class Relay:
    """Stands between client and server, and damages what the server sends."""

    def __init__(self, donor: Donor, at: int, cut: bool) -> None:
        self._donor, self._at, self._cut = donor, at, cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, port = self._listener.getsockname()
        self.address = f"{host}:{port}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the client leaves as soon as it sees the damage
            self._relay()

    def _relay(self) -> None:
        client, _ = self._listener.accept()
        host, _, port = self._donor.server.address.rpartition(":")
        server = socket.create_connection((host, int(port)))
        forward = threading.Thread(target=self._forward, args=(client, server), daemon=True)
        forward.start()
        passed = 0
        while data := bytearray(server.recv(65536)):
            if passed <= self._at < passed + len(data):
                if self._cut:
                    client.sendall(data[: self._at - passed])
                    break
                data[self._at - passed] ^= 1
            client.sendall(data)
            passed += len(data)
        client.shutdown(socket.SHUT_RDWR)
        client.close()
        server.close()

    @staticmethod
    def _forward(client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)


def test_a_flipped_bit_is_found_by_the_checksum(donor):
    relay = Relay(donor, at=900_000, cut=False)
    with pytest.raises(TransferFailed, match=r"bucket\.0 arrived with another checksum"):
        fetch_entry(relay.address, "secret", NAME, into(), 10.0)


def test_a_transfer_that_breaks_off_is_one_line(donor):
    relay = Relay(donor, at=900_000, cut=True)
    with pytest.raises(TransferFailed, match="ended early|reset"):
        fetch_entry(relay.address, "secret", NAME, into(), 10.0)


def test_a_donor_that_says_nothing_is_bounded_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        with pytest.raises(TransferFailed, match="timed out|time for this transfer is up"):
            fetch_entry(f"{host}:{port}", "secret", NAME, into(), 0.2)


def test_a_donor_that_is_gone_is_one_line(donor):
    donor.server.close()
    with pytest.raises(TransferFailed, match="refused"):
        fetch_entry(donor_address_after_close(donor), "secret", NAME, into(), 1.0)


def donor_address_after_close(donor: Donor) -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        host, port = free.getsockname()
    return f"{host}:{port}"


def test_a_peer_that_stalls_is_cut_off_and_too_many_are_turned_away():
    made = Donor(timeout_s=3.0, connections_max=1)
    try:
        with connect(made.server.address, "secret", 60.0) as stalled:
            with pytest.raises(TransferFailed, match="too many transfers"):
                fetch_entry(made.server.address, "secret", NAME, into(), 5.0)
            assert any("too many transfers" in line for line in made.refusals)
            assert stalled.ended()
        made.told.clear()
        target = into()
        fetch_until_free(made, target)
        assert torch.equal(target[0], made.held[0])
    finally:
        made.server.close()


def test_connections_that_show_no_token_keep_nobody_out():
    made = Donor(timeout_s=30.0, connections_max=1)
    host, _, port = made.server.address.rpartition(":")
    with contextlib.ExitStack() as held:
        silent = [held.enter_context(socket.create_connection((host, int(port)))) for _ in range(STRANGERS_MAX + 8)]
        held.callback(made.server.close)
        target = into()
        fetch_entry(made.server.address, "secret", NAME, target, 5.0)
        assert torch.equal(target[0], made.held[0])
        silent[0].settimeout(5.0)
        assert silent[0].recv(1) == b"", "the oldest made room"


def test_a_flood_of_refusals_is_told_of_seldom():
    made = Donor(timeout_s=5.0)
    try:
        for _ in range(60):
            with pytest.raises(TransferFailed):
                fetch_entry(made.server.address, "\ud800", NAME, into(), 5.0)
    finally:
        made.server.close()
    assert 1 <= len(made.refusals) < 60


def fetch_until_free(made: Donor, target: list[torch.Tensor]) -> None:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        with contextlib.suppress(TransferFailed):
            fetch_entry(made.server.address, "secret", NAME, target, 5.0)
            return
        threading.Event().wait(0.01)
    pytest.fail("the slot was never freed")


def test_nothing_is_unpickled():
    source = Path(server_module.__file__).read_text()
    assert "pickle" not in source
