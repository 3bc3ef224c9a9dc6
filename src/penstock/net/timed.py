"""Deadlines for whole messages, so that a peer that sends one byte now and then cannot hold a thread.

In: seconds, bytes as they move; a socket. Out: the seconds that are left; the socket's bytes, until the deadline.
Not here: connections without a thread (`admission` cuts those), weight bytes (a fetch has a deadline by progress).
"""

from __future__ import annotations

import io
import socket
import time
from typing import TYPE_CHECKING

from penstock.net.admission import MIN_BYTES_PER_S

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class MessageDeadline:
    """The deadline of one message: some seconds, and one more for each `MIN_BYTES_PER_S` received or sent.

    A timeout for each read is not enough: one byte every five seconds held a fetch for 50 s with a `stall_s` of 6 s.
    """

    __slots__ = ("_at",)

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def add_bytes(self, nbytes: int) -> None:
        """Extend the deadline for bytes of the message that were received or sent."""
        self._at += nbytes / MIN_BYTES_PER_S

    def left_s(self) -> float:
        """Return the seconds left. Raises TimeoutError after the deadline."""
        left = self._at - time.monotonic()
        # Also at exactly 0: it would make a socket non-blocking, and SO_RCVTIMEO endless.
        if left <= 0:
            raise TimeoutError("the message was not complete before its deadline")
        return left


class TimedReader(io.RawIOBase):
    """A raw stream over a socket that enforces the deadline of one message.

    Ownership: keeps the socket's file open, as `makefile` does; the socket closes only once this is closed, too.

    Args:
        sock: blocking; each read changes its timeout.
        seconds: for the message, and one more for each `MIN_BYTES_PER_S` of it.
    """

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock = sock
        self._file = sock.makefile("rb", buffering=0)
        self._deadline = MessageDeadline(seconds)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        """Read some bytes into `buffer`; see `io.RawIOBase`.

        Raises:
            TimeoutError: the deadline has passed.
        """
        self._sock.settimeout(self._deadline.left_s())
        received = self._file.readinto(buffer) or 0
        self._deadline.add_bytes(received)
        return received

    def close(self) -> None:
        """Close the socket's file. Idempotent."""
        self._file.close()
        super().close()
