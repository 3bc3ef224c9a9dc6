"""The states of a publisher, and the transitions between them."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class PublisherState(enum.Enum):
    """The state of a publisher, and of the version that can be read at this rank."""

    OPENING = "opening"
    """The rank is claiming the name or joining rank 0's epoch."""
    IDLE = "idle"
    """No version can be read here."""
    SHOWING = "showing"
    """A version is being copied or announced."""
    WAITING = "waiting"
    """Receivers read the live parameters, and `publish` waits for them."""
    DECIDING = "deciding"
    """Receivers read a copy whose version is not decided yet."""
    SERVING = "serving"
    """Receivers read a copy of the newest version."""
    WITHDRAWN = "withdrawn"
    """The newest version was withdrawn. The previous version is announced but cannot be read here."""
    CLOSED = "closed"


_S = PublisherState

NEXT: Mapping[PublisherState, frozenset[PublisherState]] = {
    _S.OPENING: frozenset({_S.IDLE, _S.CLOSED}),
    _S.IDLE: frozenset({_S.SHOWING, _S.CLOSED}),
    _S.SHOWING: frozenset({_S.WAITING, _S.DECIDING, _S.SERVING, _S.IDLE, _S.WITHDRAWN, _S.CLOSED}),
    _S.WAITING: frozenset({_S.IDLE, _S.WITHDRAWN, _S.CLOSED}),
    _S.DECIDING: frozenset({_S.SERVING, _S.WITHDRAWN, _S.CLOSED}),
    # If the parameters moved, the copy must be made again, so the publisher returns to `IDLE`.
    _S.SERVING: frozenset({_S.SHOWING, _S.IDLE, _S.CLOSED}),
    _S.WITHDRAWN: frozenset({_S.SHOWING, _S.IDLE, _S.CLOSED}),
    _S.CLOSED: frozenset(),
}
