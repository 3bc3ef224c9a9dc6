"""What of this process a forked child must let go of: locks, sockets, pages and transports that are its parent's.

In: how each lets go. Out: a set of those alive, in which each puts itself.
Not here: what they let go of.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet

T = TypeVar("T")


def let_go_in_children(let_go: Callable[[T], object]) -> WeakSet[T]:
    """Return a set; `let_go` is called for its members in every child that is forked from now on."""
    alive: WeakSet[T] = WeakSet()

    def forked() -> None:
        for one in list(alive):
            let_go(one)

    os.register_at_fork(after_in_child=forked)
    return alive
