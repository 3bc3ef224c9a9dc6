"""Progress of each subscriber during a live publish.

In: progress reports of receivers. Out: a `Decision`: the version may end.
Not here: fencing the version (`publisher`), receiving the reports (`sync.request_handler`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.hub.sync_messages import Decision, Progress

LOOK_S = 1.0
"""How often silent subscribers are checked, so that a dead process does not delay the trainer until the deadline."""
_KEPT = 8
"""Versions whose decision other ranks may still request."""


@dataclass(slots=True)
class _Listener:
    seen: float
    moved_bytes: int = -1


@dataclass(slots=True)
class _Showing:
    """The state of one version while a publish waits for it."""

    waited: dict[str, _Listener]
    committed: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    is_over: bool = False

    def decision(self) -> Decision:
        return Decision(
            is_over=self.is_over,
            is_begun=True,
            committed=tuple(self.committed),
            late=tuple(self.late),
            failed=dict(self.failed),
        )


class SubscriberProgress:
    """The progress of all subscribers, kept by a publisher's rank 0. Used by any number of threads.

    Attributes:
        absent: subscribers that were late and have not begun another update since; a publish does not wait for them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shown: OrderedDict[int, _Showing] = OrderedDict()
        self.absent: set[str] = set()

    def begin(self, version: int, expected: Iterable[str]) -> None:
        """Start to wait for the expected subscribers of a version."""
        now = time.monotonic()
        with self._changed:
            waited = {member: _Listener(now) for member in expected if member not in self.absent}
            self._shown[version] = _Showing(waited)
            while len(self._shown) > _KEPT:
                self._shown.popitem(last=False)

    def note_request(self, member: str) -> None:
        """Note a receiver's request for its part as a sign of life."""
        with self._changed:
            self.absent.discard(member)
            # The request may ask for "the newest" without a number: it counts for every version.
            for showing in self._shown.values():
                if member in showing.waited:
                    showing.waited[member].seen = time.monotonic()

    def note_progress(self, member: str, progress: Progress) -> None:
        """Note a receiver's progress report."""
        with self._changed:
            self.absent.discard(member)
            # A receiver that failed before it knew the version's number reports -1.
            newest = next(reversed(self._shown), -1)
            showing = self._shown.get(progress.version if progress.version >= 0 else newest)
            if showing is None or showing.is_over:
                return
            listener = showing.waited.get(member)
            if progress.outcome:
                showing.waited.pop(member, None)
                # A receiver may fail and succeed at a second attempt within the same publish: the last word counts.
                showing.failed.pop(member, None)
                if progress.outcome == "failed":
                    showing.failed[member] = progress.why
                elif member not in showing.committed:
                    showing.committed.append(member)
                self._changed.notify_all()
            # A report without new bytes is no progress: else a receiver whose source hangs would be waited for forever.
            elif listener is not None and progress.moved_bytes != listener.moved_bytes:
                listener.moved_bytes, listener.seen = progress.moved_bytes, time.monotonic()

    def wait(self, version: int, *, stall_s: float, is_gone: Callable[[str], bool]) -> Decision:
        """Return once every expected subscriber is done, is gone, or made no progress for `stall_s`."""
        with self._changed:
            showing = self._shown[version]
        while True:
            with self._changed:
                now = time.monotonic()
                for member, listener in list(showing.waited.items()):
                    if now - listener.seen > stall_s:
                        del showing.waited[member]
                        showing.late.append(member)
                        self.absent.add(member)
                if not showing.waited:
                    showing.is_over = True
                    self._changed.notify_all()
                    return showing.decision()
                self._changed.wait(min(LOOK_S, stall_s))
                now = time.monotonic()
                # Only silent ones are probed: a probe opens a connection and can take `ALIVE_S`.
                silent = [name for name, listener in showing.waited.items() if now - listener.seen > LOOK_S]
            # Without the lock, because reports arrive meanwhile; so the member may be done by now.
            for member in silent:
                if is_gone(member):
                    with self._changed:
                        if showing.waited.pop(member, None) is not None:
                            showing.failed[member] = "its process is gone"

    def decision(self, version: int, wait_s: float) -> Decision:
        """Return the decision about a version once it is over, or its state after `wait_s`."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                showing = self._shown.get(version)
                left = deadline - time.monotonic()
                if (showing is not None and showing.is_over) or left <= 0:
                    return Decision(is_over=False) if showing is None else showing.decision()
                self._changed.wait(left)
