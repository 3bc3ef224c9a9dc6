"""Track each subscriber's progress during a live publish.

In: what receivers say of their progress. Out: a `Decision`: the version may end.
Not here: fencing it (`publisher`), how they say it (`sync.request_handler`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.hub.sync_messages import Decision, Progress

LOOK_S = 1.0
"""How often those that say nothing are looked at: a process that died is not waited for until the deadline."""
_KEPT = 8
"""Decisions that other ranks may still ask for."""


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
        absent: who was late, and has not begun another update since: not waited for.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shown: OrderedDict[int, _Showing] = OrderedDict()
        self.absent: set[str] = set()

    def begin(self, version: int, expected: Iterable[str]) -> None:
        """A version is shown; these are waited for."""
        now = time.monotonic()
        with self._changed:
            waited = {member: _Listener(now) for member in expected if member not in self.absent}
            self._shown[version] = _Showing(waited)
            while len(self._shown) > _KEPT:
                self._shown.popitem(last=False)

    def asked(self, member: str) -> None:
        """A receiver asked for its part: it is there."""
        with self._changed:
            self.absent.discard(member)
            for showing in self._shown.values():
                if member in showing.waited:
                    showing.waited[member].seen = time.monotonic()

    def heard(self, member: str, progress: Progress) -> None:
        """A receiver said how far it is."""
        with self._changed:
            self.absent.discard(member)
            newest = next(reversed(self._shown), -1)
            showing = self._shown.get(progress.version if progress.version >= 0 else newest)
            if showing is None or showing.is_over:
                return
            listener = showing.waited.get(member)
            if progress.outcome:
                showing.waited.pop(member, None)
                showing.failed.pop(member, None)
                if progress.outcome == "failed":
                    showing.failed[member] = progress.why
                elif member not in showing.committed:
                    showing.committed.append(member)
                self._changed.notify_all()
            elif listener is not None and progress.moved_bytes != listener.moved_bytes:
                listener.moved_bytes, listener.seen = progress.moved_bytes, time.monotonic()

    def wait(self, version: int, *, stall_s: float, is_gone: Callable[[str], bool]) -> Decision:
        """Return once nobody is waited for: who is gone, or made no progress for `stall_s`, is no longer."""
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
                silent = [name for name, one in showing.waited.items() if now - one.seen > LOOK_S]
            for member in silent:
                if is_gone(member):
                    with self._changed:
                        if showing.waited.pop(member, None) is not None:
                            showing.failed[member] = "its process is gone"

    def decision(self, version: int, wait_s: float) -> Decision:
        """Return the decision about a version once there is one, or after `wait_s` that there is none."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                showing = self._shown.get(version)
                left = deadline - time.monotonic()
                if (showing is not None and showing.is_over) or left <= 0:
                    return Decision(is_over=False) if showing is None else showing.decision()
                self._changed.wait(left)
