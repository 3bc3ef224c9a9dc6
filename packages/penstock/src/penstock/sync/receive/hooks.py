"""The callbacks of an engine around an update.

A staged update calls before_read, reads, calls check and before_pause, flips, and calls at_commit and after_resume. A
direct update calls before_read and before_pause before it reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.sync.check import Check

Around = Literal["before_pause", "at_commit", "after_resume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The callbacks of an engine around an update. Each callback receives the version."""

    before_read: Callable[[int, Mapping[str, str]], object] | None = None
    """Called with the version and its metadata before a byte is read. It raises an error to refuse the version."""
    before_pause: Callable[[int], object] | None = None
    """Called before the weights change. After it returns, no request may use the weights."""
    at_commit: Callable[[int], object] | None = None
    """Called when the target contains the version. Drop the prefix cache, or change its key."""
    after_resume: Callable[[int], object] | None = None
    """Called after the flip. Requests may continue."""
    check: Check | None = None
    """Called with the version and its `StagedVersion` before the version may go live, in staged mode only. If it raises
    an error, or returns False or a reason, the version is refused. With a two-phase commit, the whole fleet refuses
    it."""

    def call(self, name: Around, version: int, *, live: int, is_dirty: bool) -> None:
        """Call a callback, if it is set. If it raises an error, add a note, see `noted`.

        `live` is the version in the target, or -1. `is_dirty` means that the target has parts of several versions.
        """
        hook: Callable[[int], object] | None = getattr(self, name)
        if hook is not None:
            state = f"the target has all of version {live}" if live >= 0 else "the target was not touched"
            with noted(name, version, "the target has parts of several versions" if is_dirty else state):
                hook(version)


@contextlib.contextmanager
def noted(name: str, version: int, state: str) -> Iterator[None]:
    """Add a note with the callback's name and the target's state to an error, without changing its class."""
    try:
        yield
    except Exception as error:
        error.add_note(f"Hooks.{name} raised this for version {version}: {state}")
        raise
