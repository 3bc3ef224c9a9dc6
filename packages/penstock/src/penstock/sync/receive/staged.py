"""A version that a receiver has read and verified, and the options by which it does so.

Not here: reading it (`update`), making it live (`subscriber`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.plan.sync import WATERMARK_BYTES, ReceiverPlan
from penstock.sync.recording.layout import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version, read and verified."""

    version: int
    epoch: str
    origin: Literal["sync", "restore", "here"] = "sync"
    """`restore`: released weights were filled from elsewhere. `here`: the version is live already, nothing was read."""
    part: ReceiverPlan | None = None
    """The strips that were received from the sync."""
    begun: float
    attempts: int
    nbytes: int = 0
    """Bytes read: fewer than the version has, where the receiver had some of them already."""
    version_bytes: int = 0
    delta: str = ""
    packed_bytes: int = 0
    """Bytes of short runs that were packed at their sources."""
    staging_bytes: int = 0
    """Memory in addition to the target's own."""
    install_s: float = 0.0
    """Restore: the time after its bytes were there."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Member that was left out -> the reason."""
    plan_s: float = 0.0
    wire_s: float = 0.0
    path: str = ""
    """The share of bytes per transport and source, as text."""
    sources: Mapping[str, int]
    nbytes_by_path: Mapping[str, int] = field(default_factory=dict)
    """Path (`shm <- MEMBER`) -> bytes."""
    why: tuple[str, ...] = ()
    decide_by: float | None = None
    """The time of the decision at the latest, for a version with a two-phase commit. None: it may go live
    at once."""
    check: bytes = b""
    """The trainer's values for a check, encoded."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The texts that were published with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """The options for filling a target; see `subscriber`."""

    staged: bool
    load: Load | None
    strict: bool
    transforms: str | Sequence[str] | None
    serve: bool
    memory_bytes: int | None
    has_check: bool = False
    """Whether versions are checked before they go live; the caller then reports the outcome."""
    accept: Callable[[int, Mapping[str, str]], object] | None = None
    """Passed a version and its metadata before a byte of it is read; it refuses the version by raising."""

    @property
    def watermark_bytes(self) -> int:
        """Return the most bytes read and not yet verified."""
        # Staged, `memory_bytes` bounds the staging copy itself, which is checked when it is allocated.
        return WATERMARK_BYTES if self.staged or self.memory_bytes is None else self.memory_bytes


def nothing_read(version: int, epoch: str, begun: float, attempt: int) -> Staged:
    """Return the live version, of which nothing was read."""
    return Staged(version=version, epoch=epoch, origin="here", begun=begun, attempts=attempt, sources={})
