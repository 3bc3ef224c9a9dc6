"""Deadlines for whole messages, so that a peer that sends one byte now and then cannot hold a reader.

In: a socket. Out: its bytes, until the deadline or the limit. For requests at a server and answers at a client alike.
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
        if left <= 0:
            raise TimeoutError("the message was not complete before its deadline")
        return left


class TimedReader(io.RawIOBase):
    """A raw stream over a socket that enforces a deadline and a size limit on each message.

    Ownership: keeps the socket's file open, as `makefile` does; the socket closes only once this is closed, too.

    Args:
        sock: blocking; each read changes its timeout.
        seconds: for the first message, see `expect`.
        max_bytes: limit of the first message; None: no limit.
    """

    def __init__(self, sock: socket.socket, seconds: float, max_bytes: int | None = None) -> None:
        self._sock, self._file = sock, sock.makefile("rb", buffering=0)
        self.expect(seconds, max_bytes)

    def expect(self, seconds: float, max_bytes: int | None = None, *, first_s: float | None = None) -> None:
        """Start a new message with its own deadline and size limit.

        Args:
            seconds: for the whole message; counted from its first byte if `first_s` is given.
            max_bytes: size limit; None: no limit.
            first_s: seconds for the first byte to arrive.
        """
        self._deadline = MessageDeadline(seconds if first_s is None else first_s)
        self._then_s, self._left_bytes = (None if first_s is None else seconds), max_bytes

    def allow(self, nbytes: int) -> None:
        """Raise the size limit by the length of a body that the head announced."""
        if self._left_bytes is not None:
            self._left_bytes += nbytes

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        """Read some bytes into `buffer`; see `io.RawIOBase`.

        Raises:
            TimeoutError: the deadline has passed. ConnectionAbortedError: the message is longer than allowed.
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
        self._deadline.add_bytes(got)
        if self._left_bytes is not None:
            self._left_bytes -= got
        return got

    def close(self) -> None:
        """Close the socket's file. Idempotent."""
        self._file.close()
        super().close()
