"""The manager's end of one rank's local socket."""

from __future__ import annotations

import asyncio
import hmac

from lightkeeper.manager import local


class RankSocket:
    """Frames in and out of one rank."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @staticmethod
    def carries(hello: local.Register, token: str) -> bool:
        """Whether the rank knows the job's token; compared in constant time."""
        return hmac.compare_digest(hello.token.encode(), token.encode())

    async def receive(self) -> local.FromRank | None:
        """The next message, or None at the socket's end.

        Raises:
            ValueError: for a frame that is too large or not a message.
        """
        try:
            header = await self._reader.readexactly(local.HEADER.size)
            (size,) = local.HEADER.unpack(header)
            if size > local.FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {size} bytes")
            return local.from_rank.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def send(self, message: local.ToRank) -> None:
        """Queues a message; a rank that is gone does not get it."""
        self.send_frame(local.frame(message))

    def send_frame(self, frame: bytes) -> None:
        """The same, of a message that is a frame already."""
        if not self._writer.is_closing():
            self._writer.write(frame)

    def close(self) -> None:
        """Closes the socket."""
        self._writer.close()
