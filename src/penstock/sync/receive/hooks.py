"""The callbacks of an engine around an update, in the order in which a subscriber calls them.

staged:  before_read, the read, check | before_pause, the flip, at_commit, after_resume
direct:  before_read, before_pause, the read, at_commit, after_resume
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.sync.check import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The callbacks of an engine around an update; each is passed the version."""

    before_read: Callable[[int, Mapping[str, str]], object] | None = None
    """Passed the version and its metadata before a byte of it is read; it refuses the version by raising."""
    before_pause: Callable[[int], object] | None = None
    """After it returns, no request may use the weights."""
    at_commit: Callable[[int], object] | None = None
    """The weights are the version's: drop the prefix cache or change its key."""
    after_resume: Callable[[int], object] | None = None
    """Requests may go on."""
    check: Check | None = None
    """Called with the version and its `StagedVersion` before the version may go live; needs mode `staged`. If it
    raises, or returns False or a text, the version is refused: here, and in the fleet if it is published together."""
