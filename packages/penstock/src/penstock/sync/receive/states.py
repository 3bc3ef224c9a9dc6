"""The states of a subscriber, and the only function that changes the state.

If a busy subscriber gives up before `writing`, it returns to its last state at rest. After `writing` has begun, only a
complete version makes the target usable again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from enum import Enum

import msgspec


class SubscriberState(Enum):
    """The states of a subscriber."""

    IDLE = "idle"
    LIVE = "live"
    MOVED = "moved"
    """The tensors moved after the version became live, and may have arbitrary values at their new places."""
    DIRTY = "dirty"
    """An update failed after it wrote to the target, which has parts of several versions."""
    RELEASED = "released"
    """The weights were released, and no version is live until a restore."""
    RECEIVING = "receiving"
    """A version is being found, read and verified."""
    STAGED = "staged"
    """A verified version is in the staging copy and may go live at once."""
    PREPARED = "prepared"
    """A verified version is in the staging copy and waits for the decision of the fleet."""
    FLIPPING = "flipping"
    """The engine is paused. The target is unchanged."""
    WRITING = "writing"
    """The engine is paused, and the target may have bytes of the new version."""
    CLOSED = "closed"


S = SubscriberState
AT_REST = frozenset({S.IDLE, S.LIVE, S.MOVED, S.DIRTY, S.RELEASED})
NEXT: Mapping[SubscriberState, frozenset[SubscriberState]] = {
    S.IDLE: frozenset({S.RECEIVING, S.RELEASED}),
    S.LIVE: frozenset({S.RECEIVING, S.RELEASED, S.MOVED}),
    S.MOVED: frozenset({S.RECEIVING, S.RELEASED}),
    S.DIRTY: frozenset({S.RECEIVING, S.RELEASED}),
    # A restore from storage needs no pause, because the engine sleeps.
    S.RELEASED: frozenset({S.RECEIVING, S.WRITING}),
    S.RECEIVING: frozenset({S.STAGED, S.PREPARED, S.FLIPPING}),
    S.STAGED: frozenset({S.RECEIVING, S.FLIPPING, S.RELEASED}),
    S.PREPARED: frozenset({S.RECEIVING, S.FLIPPING, S.RELEASED}),
    S.FLIPPING: frozenset({S.WRITING, S.STAGED, S.PREPARED}),
    # A restore may end in IDLE, because an engine may restore weights that belong to no version.
    S.WRITING: frozenset({S.LIVE, S.IDLE, S.DIRTY}),
    S.CLOSED: frozenset(),
}
"""The transitions. In addition, every state leads to CLOSED, and every busy state except WRITING leads back to the last
state at rest. WRITING leads back only to RELEASED, because released memory belongs to no version."""


class InvalidTransition(RuntimeError):
    """The subscriber cannot change from its current state to the requested state. This is a bug in Penstock."""


class LiveVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The version that a target contains."""

    epoch: str = ""
    version: int = -1
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    path: str = ""
    took_s: float = 0.0
    pause_s: float = 0.0


class SubscriberStates:
    """The state of one subscriber. Any thread may read it, and only `enter` changes it."""

    def __init__(self) -> None:
        self.now = S.IDLE
        self.at_rest = S.IDLE
        self.live = LiveVersion()
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """Return the live version, or -1. For a dirty target, this is the version before the failed update."""
        return -1 if self.at_rest in (S.IDLE, S.RELEASED) else self.live.version

    @property
    def is_current(self) -> bool:
        """Return whether the target contains exactly the live version."""
        return self.at_rest is S.LIVE and self.now is not S.WRITING

    @property
    def damaged(self) -> SubscriberState:
        """Return the state after a failure that left the target with arbitrary bytes."""
        return S.RELEASED if self.at_rest is S.RELEASED else S.DIRTY

    def enter(self, state: SubscriberState, live: LiveVersion | None = None) -> None:
        """Change the state, and the live version if `live` is set. Raise InvalidTransition without a change."""
        with self._lock:
            previous = self.now
            if state is previous and live is None:
                return
            if previous is not S.CLOSED and not self._leads_to(state):
                raise InvalidTransition(f"a subscriber cannot change its state from {previous.value} to {state.value}")
            # A busy subscriber that detects moved tensors stays busy, and only its state at rest changes.
            is_found = state is S.MOVED and self.at_rest is S.LIVE and previous not in AT_REST
            if state in AT_REST:
                self.at_rest = state
            if live is not None:
                self.live = live
            if previous is not S.CLOSED and not is_found:
                self.now = state

    def _leads_to(self, state: SubscriberState) -> bool:
        if state is S.CLOSED or state in NEXT[self.now]:
            return not (state is S.DIRTY and self.at_rest is S.RELEASED)
        if state is S.MOVED and self.at_rest is S.LIVE:
            return True
        return state is self.at_rest and (self.now is not S.WRITING or state is S.RELEASED)
