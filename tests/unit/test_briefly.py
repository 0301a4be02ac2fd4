"""What gloo says, as torch 2.13 hands it on, and what is left of it for people."""

from __future__ import annotations

import pytest

from lightkeeper.manager.briefly import briefly

PAIR = "/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc"
CRASHED = "This is typically caused by a remote worker crashing."
HANGS = "This is typically caused by a remote worker hanging or bugs in the application."
LOGS = "Check the logs of the remote worker before reporting an error. GLHF! 🏖️"


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (
            f"[{PAIR}:553] Connection closed by peer [127.0.0.1]:27532. {CRASHED} {LOGS}",
            "connection closed by peer 127.0.0.1:27532",
        ),
        (
            f"all-reduce of e1r0 failed: [{PAIR}:553] Connection closed by peer [::1]:1234. {CRASHED} {LOGS}",
            "all-reduce of e1r0 failed: connection closed by peer [::1]:1234",
        ),
        (
            f"[{PAIR}:537] Read error [127.0.0.1]:23185: Connection reset by peer. {HANGS} {LOGS}",
            "connection reset by peer 127.0.0.1:23185",
        ),
        (f"[{PAIR}:423] Write error [10.0.0.7]:2: Broken pipe. {HANGS} {LOGS}", "broken pipe 10.0.0.7:2"),
        (
            f"[{PAIR}:537] Read error [10.0.0.7]:23185: No route to host. {HANGS} {LOGS}",
            "read error 10.0.0.7:23185: No route to host",
        ),
        (f"[{PAIR}:988] Application timeout caused pair closure", "application timeout caused pair closure"),
        (f"[{PAIR}:600] Socket closed [10.0.0.7]:9", "socket closed 10.0.0.7:9"),
        (
            "[/a/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation to complete",
            "timed out waiting 1000ms for recv operation to complete",
        ),
        (
            f"[{PAIR}:144] Connect timeout [10.0.0.7]:9\nException raised from connect at x.cpp:12 (most recent first)",
            "connect timeout 10.0.0.7:9",
        ),
    ],
)
def test_only_what_broke_and_where_is_left(said: str, left: str) -> None:
    assert briefly(said) == left
    assert briefly(left) == left


@pytest.mark.parametrize(
    "said",
    [
        "all-reduce of e1r0 aborted: epoch 2 is being prepared",
        "all-reduce of e1r0 unfinished after 5.0 s",
        "",
    ],
)
def test_what_is_no_text_of_gloos_stays_as_it_is(said: str) -> None:
    assert briefly(said) == said


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("\n\nRead the manual \nTraceback (most recent call last):\n  File x", "Read the manual"),
        (
            f"sample 3 failed: OSError: gone\n\nTraceback:\n[{PAIR}:553] Connection closed",
            "sample 3 failed: OSError: gone",
        ),
        ("\n \n", ""),
    ],
)
def test_of_other_texts_the_first_line_is_left(said: str, left: str) -> None:
    assert briefly(said) == left
