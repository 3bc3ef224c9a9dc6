"""Deadlines for whole messages, so that a peer that sends single bytes cannot hold a thread."""

from __future__ import annotations

import time

from penstock.net.admission import MIN_BYTES_PER_S


class MessageDeadline:
    """The deadline of a message: some seconds, plus one for each `MIN_BYTES_PER_S` received or sent.

    A timeout for each read is not enough. One byte every five seconds held a fetch for 50 s with a `stall_s` of 6 s.
    """

    __slots__ = ("_at",)

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def add_bytes(self, nbytes: int) -> None:
        """Extend the deadline for bytes that were received or sent."""
        self._at += nbytes / MIN_BYTES_PER_S

    def left_s(self) -> float:
        """Return the remaining seconds. Raises TimeoutError after the deadline."""
        left = self._at - time.monotonic()
        # A timeout of 0 would make a socket non-blocking and SO_RCVTIMEO endless.
        if left <= 0:
            raise TimeoutError("the message was not complete before its deadline")
        return left
