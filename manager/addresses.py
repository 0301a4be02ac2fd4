"""Where the lighthouse may be: one address, several in the order in which they are tried, or a file that says so.

The file is read again for every connection, so a lighthouse may move while the job runs. What cannot be used of it is
said once, and the last content that could be used counts.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from lightkeeper.errors import UsageError
from lightkeeper.manager.regular import open_regular
from lightkeeper.wire import own_address_towards, split_address

FILE = "file:"
ADDRESSES_MAX = 5  # each is tried within seconds, so that all members meet at the same one
FILE_BYTES_MAX = 4096
READ_S_MAX = 2.0


def parse_addresses(text: str) -> tuple[str, ...]:
    """``HOST:PORT[,HOST:PORT...]`` in its parts.

    Raises:
        ValueError: with one line that names the address that is none.
    """
    addresses = tuple(part.strip() for part in text.split(","))
    for address in addresses:
        if split_address(address)[1] == 0:
            raise ValueError(f"{address!r} has no port")
    if len(set(addresses)) < len(addresses):
        raise ValueError(f"{text!r} names an address twice")
    if len(addresses) > ADDRESSES_MAX:
        raise ValueError(f"{text!r} names {len(addresses)} addresses; give at most {ADDRESSES_MAX}")
    return addresses


def check_lighthouse(text: str) -> None:
    """Whether this may be a `lighthouse` setting; a file is not read.

    Raises:
        ValueError: with one line that says what is wrong.
    """
    if not text.startswith(FILE):
        parse_addresses(text)
    elif not text.removeprefix(FILE):
        raise ValueError(f"{text!r} names no file: give {FILE}PATH")


def has_alternatives(text: str) -> bool:
    """Whether the group may come to another lighthouse than it started with."""
    return text.startswith(FILE) or "," in text


def _read_file(text: str) -> tuple[str, ...]:
    """The addresses in the file.

    Raises:
        ValueError: if the file cannot be read, is empty or too long, or an address in it is none.
    """
    check_lighthouse(text)
    path = Path(text.removeprefix(FILE))
    try:
        content = _content(path)
        words = content.decode().split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"cannot read {path}: {reason}") from error
    if len(content) > FILE_BYTES_MAX:
        raise ValueError(f"{path} is longer than {FILE_BYTES_MAX} bytes")
    if not words:
        raise ValueError(f"{path} is empty")
    try:
        return parse_addresses(",".join(word.strip(",") for word in words))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _content(path: Path) -> bytes:
    """The file's first bytes, one more than it may have.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    descriptor = open_regular(path)
    try:
        return os.read(descriptor, FILE_BYTES_MAX + 1)
    finally:
        os.close(descriptor)


class Reader:
    """Reads the addresses anew, and waits no longer than `READ_S_MAX`: a mount may hang, and its reader with it.

    Who hangs in the system cannot be ended. It is left alone, and no second one is sent after it.

    Args:
        text: the `lighthouse` setting.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._answers: queue.SimpleQueue[tuple[str, ...] | ValueError] | None = None

    def read(self) -> tuple[str, ...]:
        """The addresses as they stand now.

        Raises:
            ValueError: if the file cannot be read in time, is empty or too long, or an address in it is none.
        """
        if not self._text.startswith(FILE):
            return parse_addresses(self._text)
        if self._answers is None:
            self._answers = queue.SimpleQueue()
            arguments = (self._text, self._answers)
            threading.Thread(target=_answer, args=arguments, name="addresses", daemon=True).start()
        try:
            answer = self._answers.get(timeout=READ_S_MAX)
        except queue.Empty:
            path = self._text.removeprefix(FILE)
            raise ValueError(f"cannot read {path}: it has not answered for {READ_S_MAX:.0f} s") from None
        self._answers = None
        if isinstance(answer, ValueError):
            raise answer
        return answer


def _answer(text: str, answers: queue.SimpleQueue[tuple[str, ...] | ValueError]) -> None:
    try:
        answers.put(_read_file(text))
    except ValueError as error:
        answers.put(error)


def read_addresses(text: str) -> tuple[str, ...]:
    """As `Reader.read`, once."""
    return Reader(text).read()


def addresses_at_start(text: str) -> tuple[str, ...]:
    """As `read_addresses`.

    Raises:
        UsageError: for what cannot be used: at the start there is no earlier content to go on with.
    """
    try:
        return read_addresses(text)
    except ValueError as error:
        raise UsageError(f"lighthouse: {error}") from error


def own_host(host: str, lighthouse: str) -> str:
    """Address at which others reach this node: as it was told, or of the interface that routes to the lighthouse.

    Raises:
        UsageError: as `addresses_at_start`.
    """
    return host or own_address_towards(addresses_at_start(lighthouse))


class Addresses:
    """The addresses, and which of them is tried next.

    Args:
        text: the `lighthouse` setting.
        say: prints a line for the operator.
    """

    def __init__(self, text: str, say: Callable[[str], None]) -> None:
        self._reader, self._say = Reader(text), say
        self.all = addresses_at_start(text)
        self.at = self.all[0]
        self._told = ""

    def read(self) -> None:
        """Reads the file again; goes on at the address it was at, or at the first if that is no more there.

        It may take `READ_S_MAX` seconds, so an event loop has a thread do it.
        """
        try:
            self.all = self._reader.read()
            self._told = ""
        except ValueError as error:
            if str(error) != self._told:
                self._say(f"lighthouse: {error}; going on with {', '.join(self.all)}")
            self._told = str(error)
        if self.at not in self.all:
            self.at = self.all[0]

    def next(self) -> None:
        """The one after this, in a circle."""
        self.at = self.all[(self.all.index(self.at) + 1) % len(self.all)]

    @property
    def place(self) -> int:
        """From 1; 0 if there is no other."""
        return self.all.index(self.at) + 1 if len(self.all) > 1 else 0
