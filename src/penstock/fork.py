"""Release, in a forked child, of the locks, sockets, pages and transports that belong to its parent.

In: a function that releases one object. Out: a set of the live objects, in which each puts itself.
Not here: what they release.
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
        # A copy: a release may drop the last reference to another member, and change the set.
        for member in list(alive):
            let_go(member)

    os.register_at_fork(after_in_child=forked)
    return alive
