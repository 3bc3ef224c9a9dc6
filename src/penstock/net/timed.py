"""Reading one message under a deadline for all of it, so that a byte now and then keeps nobody waiting.

In: a socket. Out: its bytes, until the deadline or the bound. For requests at a server and answers at a reader alike.
Not here: connections without a thread (`admission` cuts those), weight bytes (progress of a fetch is its own deadline).
"""

from __future__ import annotations

import io
import socket
import time
from typing import TYPE_CHECKING

from penstock.net.limits import MIN_BYTES_PER_S

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class MessageDeadline:
    """When a message has to be whole: after some seconds, and one more for each `MIN_BYTES_PER_S` that came.

    A timeout of each read alone is no bound: one byte every five seconds held a fetch for 50 s whose stall was 6 s.
    """

    __slots__ = ("_at",)

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def came(self, nbytes: int) -> None:
        """Bytes of the message came, or went."""
        self._at += nbytes / MIN_BYTES_PER_S

    def left_s(self) -> float:
        """Return the seconds that are left. TimeoutError: there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError("the message did not come to its end in time")
        return left


class TimedReader(io.RawIOBase):
    """What a socket receives, under the deadline and the bound of the message that is expected.

    Ownership: holds the socket's file, as `makefile` does: closing the socket waits for this to be closed.

    Args:
        sock: blocking; its timeout is changed with each read.
        seconds: for the first message, see `expect`.
        max_bytes: of the first message; None: any number.
    """

    def __init__(self, sock: socket.socket, seconds: float, max_bytes: int | None = None) -> None:
        self._sock, self._file = sock, sock.makefile("rb", buffering=0)
        self.expect(seconds, max_bytes)

    def expect(self, seconds: float, max_bytes: int | None = None, *, first_s: float | None = None) -> None:
        """Begin a message: all of it within so many seconds and bytes.

        Args:
            seconds: for the whole message; from its first byte on where `first_s` is given.
            first_s: for its first byte.
        """
        self._deadline = MessageDeadline(seconds if first_s is None else first_s)
        self._then_s, self._left_bytes = (None if first_s is None else seconds), max_bytes

    def allow(self, nbytes: int) -> None:
        """Take so many bytes more: a head has said how long its body is."""
        if self._left_bytes is not None:
            self._left_bytes += nbytes

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        """Read some bytes; see io.

        Raises:
            TimeoutError: the deadline is over. ConnectionAbortedError: the message is longer than allowed.
        """
        view = memoryview(buffer).cast("B")
        if self._left_bytes is not None:
            if not self._left_bytes:
                raise ConnectionAbortedError("the message is longer than allowed")
            view = view[: self._left_bytes]
        self._sock.settimeout(self._deadline.left_s())
        got = self._file.readinto(view) or 0
        if self._then_s is not None:
            self._deadline, self._then_s = MessageDeadline(self._then_s), None
        self._deadline.came(got)
        if self._left_bytes is not None:
            self._left_bytes -= got
        return got

    def close(self) -> None:
        """Let go of the socket's file. Idempotent."""
        self._file.close()
        super().close()
