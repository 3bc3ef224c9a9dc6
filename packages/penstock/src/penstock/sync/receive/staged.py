"""A version that a receiver has read and verified, and the options for reading it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.plan.sync import WATERMARK_BYTES, ReceiverPlan
from penstock.sync.recording.layout import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version that was read and verified."""

    version: int
    epoch: str
    origin: Literal["sync", "restore", "here"] = "sync"
    """`sync`: read from members. `restore`: released weights were filled from elsewhere. `here`: the version is already
    live, and nothing was read."""
    part: ReceiverPlan | None = None
    """The strips that were received from the sync."""
    begun: float
    attempts: int
    nbytes: int = 0
    """Number of bytes read. It is smaller than the version if the receiver had some of them already."""
    version_bytes: int = 0
    delta: str = ""
    packed_bytes: int = 0
    """Bytes in short runs that were packed at their sources."""
    staging_bytes: int = 0
    """Memory in bytes, in addition to the target."""
    install_s: float = 0.0
    """For a restore, the seconds after its bytes arrived."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Members that were left out, with the reason."""
    plan_s: float = 0.0
    wire_s: float = 0.0
    path: str = ""
    """The share of bytes for each transport and source, as text."""
    sources: Mapping[str, int]
    nbytes_by_path: Mapping[str, int] = field(default_factory=dict)
    """Number of bytes for each path, such as `shm <- MEMBER`."""
    why: tuple[str, ...] = ()
    decide_by: float | None = None
    """Time at which the decision is due, for a version with a two-phase commit. None means that it may go live at
    once."""
    check: bytes = b""
    """The trainer's values for a check, encoded."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata that was published with the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """The options for filling a target. See `subscriber`."""

    staged: bool
    load: Load | None
    strict: bool
    transforms: str | Sequence[str] | None
    serve: bool
    memory_bytes: int | None
    has_check: bool = False
    """Whether versions are checked before they go live. The caller then reports the outcome."""
    accept: Callable[[int, Mapping[str, str]], object] | None = None
    """Called with a version and its metadata before a byte of it is read. It raises to refuse the version."""

    @property
    def watermark_bytes(self) -> int:
        """Return the maximum number of bytes that are read and not yet verified."""
        # In staged mode, `memory_bytes` limits the staging copy, which is checked when it is allocated.
        return WATERMARK_BYTES if self.staged or self.memory_bytes is None else self.memory_bytes


def nothing_read(version: int, epoch: str, begun: float, attempt: int) -> Staged:
    """Return the live version, from which nothing was read."""
    return Staged(version=version, epoch=epoch, origin="here", begun=begun, attempts=attempt, sources={})
