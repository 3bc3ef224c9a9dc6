"""The callbacks of an engine around an update, in the order in which a subscriber calls them.

staged:  before_read, the read, check | before_pause, the flip, at_commit, after_resume
direct:  before_read, before_pause, the read, at_commit, after_resume
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.sync.check import Check

Around = Literal["before_pause", "at_commit", "after_resume"]
"""The callbacks around the moment in which a version becomes live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The callbacks of an engine around an update. Each receives the version."""

    before_read: Callable[[int, Mapping[str, str]], object] | None = None
    """Called with the version and its metadata before a byte of it is read. It raises to refuse the version."""
    before_pause: Callable[[int], object] | None = None
    """Called before the weights change. After it returns, no request may use the weights."""
    at_commit: Callable[[int], object] | None = None
    """Called when the target has the version. Drop the prefix cache, or change its key."""
    after_resume: Callable[[int], object] | None = None
    """Called at the end. Requests may continue."""
    check: Check | None = None
    """Called with the version and its `StagedVersion` before the version may go live. It needs mode `staged`. If it
    raises, or returns False or a text, the version is refused: here, and with a two-phase commit in the whole fleet."""

    def call(self, name: Around, version: int, *, live: int, is_dirty: bool) -> None:
        """Call a callback, if there is one. Its errors get a note, as in `noted`.

        Args:
            name: name of the callback.
            version: version to pass to it.
            live: the version in the target, or -1.
            is_dirty: whether the target has parts of several versions.
        """
        hook: Callable[[int], object] | None = getattr(self, name)
        if hook is not None:
            whole = f"the target has all of version {live}" if live >= 0 else "the target was not touched"
            with noted(name, version, "the target has parts of several versions" if is_dirty else whole):
                hook(version)


@contextlib.contextmanager
def noted(name: str, version: int, state: str) -> Iterator[None]:
    """Add a note to an error that a callback raises in the block. It names the callback and the state of the target.

    The error keeps its class, because an engine catches its own errors around an update.
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"Hooks.{name} raised this for version {version}: {state}")
        raise
