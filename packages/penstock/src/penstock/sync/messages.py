"""Messages between the members of a sync, encoded with msgpack. Unknown fields are ignored.

`plan.layout` encodes the layouts and the parts of a plan. `hub.messages` defines the protocol version.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.hub.messages import Count, FleetDecision, Key, MemberId, Version, prepare, structs_among

MAX_REASON_CHARS = 1024


class PartRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver's request to a planner for its part of the transfer plan."""

    version: Version
    """Version number, or -1 for the newest version."""
    digest: Key
    """Digest of the receiver's layout."""
    layout: bytes | None = None
    """The layout itself, if the planner does not know it."""
    have_key: str = ""
    without: tuple[MemberId, ...] = ()
    can_wait: bool = False
    """Whether the receiver can keep a version staged until the fleet's decision."""
    wants_check: bool = False
    """Whether the receiver needs the trainer's values for a check."""
    refused: tuple[Version, ...] = ()
    """Recent versions of the planner's epoch that the receiver knows to be withdrawn."""
    is_ahead: bool = False
    """Whether the request is for the publishers' next version, before it is published."""
    is_outdated: bool = False
    """Whether the receiver's part was planned for memory that a source has since registered again."""


class PartReply(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver's part of the transfer plan, a request for the layout, or the reason why there is no part yet."""

    version: Version = -1
    epoch: str = msgspec.field(default="", name="run")
    needs_layout: bool = False
    not_yet: str = ""
    key: str = ""
    part: bytes | None = None
    """None if the receiver has the part already."""
    decide_s: Annotated[float, Meta(ge=0)] | None = None
    """Maximum number of seconds until the fleet's decision. None means that the version may go live at once."""
    refused: FleetDecision | None = None
    withdrawn: FleetDecision | None = None
    """The decision that withdrew a later version. If it is set, this version is the newest."""
    check: bytes = b""
    """The trainer's values for a check of the version. See `sync.check`."""


class TableReply(msgspec.Struct, frozen=True, kw_only=True):
    """The table of the tensors that all publishers offer."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tags: tuple[str, ...] = ()
    """Transformation of each tensor's values. Empty if no tensor is transformed."""


class NewsReply(msgspec.Struct, frozen=True, kw_only=True):
    """A publisher's progress."""

    epoch: str = msgspec.field(name="run")
    version: Version
    is_open: bool
    withdrawn: FleetDecision | None = None
    """The decision that withdrew a later version."""


class DigestRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Byte ranges that the caller will read, as columns of little-endian int64.

    The columns may be empty if the member already knows their digest.
    """

    version: Version
    generation: Count
    strips: bytes
    """BLAKE3 digest of the columns."""
    at: bytes = b""
    run_bytes: bytes = b""
    num_rows: bytes = b""
    pitch: bytes = b""
    wait_s: Annotated[float, Meta(ge=0)] = 0.0


class DigestReply(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of byte ranges, as little-endian uint64. `digests` is None while some bytes are not ready."""

    digests: bytes | None
    num_ready: Count
    is_unknown: bool = False
    """Whether the caller must send the columns, because the member does not know their digest."""


class PackRequest(DigestRequest, frozen=True, kw_only=True):
    """Byte ranges that the member packs, so that the caller can read them as one contiguous piece."""

    release: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=1024)] = ()
    """Leases of buffers that the caller has finished reading."""


class PackReply(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptors of the buffer that contains the ranges, by transport. `regions` is None until a buffer is filled."""

    regions: dict[str, bytes] | None = None
    lease: str = ""
    progress: Count = 0
    """Number of ready rows plus filled requests, which grows while the source makes progress."""
    is_full: bool = False
    """Whether the ranges are ready but all buffers are in use."""
    why: str = ""
    """Why this member cannot pack at all."""
    is_unknown: bool = False
    """Whether the caller must send the columns, because the member does not know their digest."""


class PackLeases(msgspec.Struct, frozen=True, kw_only=True):
    """Leases of the buffers that the caller is reading, and of those that it has finished reading."""

    keep: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=1024)] = ()
    release: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=1024)] = ()


class BeginsAfter(msgspec.Struct, frozen=True, kw_only=True):
    """The version that all versions from a trainer's rank must exceed."""

    version: Version


class RankProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver's progress, sent to the member that planned the receiver's part."""

    version: Version
    """Version number, or -1 if the receiver failed before it knew a version."""
    moved_bytes: Count = 0
    outcome: Literal["", "committed", "failed", "prepared", "refused"] = ""
    """Outcome of the receiver. `prepared` means staged and checked. `refused` means that a check failed."""
    why: Annotated[str, Meta(max_length=MAX_REASON_CHARS)] = ""
    is_checked: bool = False
    """Whether a check ran on the prepared version."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's decision about a live version, or about a version with a two-phase commit."""

    is_over: bool
    is_begun: bool = False
    committed: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    failed: dict[str, str] = {}
    fleet: FleetDecision | None = None


# Prepare all messages before threads start.
prepare(*structs_among(list(globals().values())))
