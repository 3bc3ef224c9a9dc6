"""Messages between the members of a sync, in msgpack: parts of the plan, digests, packed ranges, progress, decisions.

In / Out: frozen structs; decoding refuses wrong types and lengths past their bounds, and ignores unknown fields.
Not here: sessions, and messages of a member and the hub (`hub.messages`, which also has the version of the protocol and
its rules); sending them (`membership`) and answering them (`request_handler`).

Layouts and parts are bytes here, as `plan.layout` encodes them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.hub.messages import Count, FleetDecision, Key, MemberId, Version, prepare, structs_among


class PartRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver's request to a planner for its part of the transfer plan."""

    version: Version
    """-1: the newest there is."""
    digest: Key
    """Of its layout."""
    layout: bytes | None = None
    """The layout itself, if the planner does not know it."""
    have_key: str = ""
    """Key of the part that it has already."""
    without: tuple[MemberId, ...] = ()
    """Sources that it could not read."""
    can_wait: bool = False
    """Whether it can keep a version staged until the fleet's decision."""
    wants_check: bool = False
    """Whether it checks the version, and needs the values that the trainer gave for it."""
    refused: tuple[Version, ...] = ()
    """Versions of the planner's epoch that it knows to be withdrawn, the newest ones."""
    is_ahead: bool = False
    """Whether it asks before it reads a version: the part is of the publishers' next one."""
    is_outdated: bool = False
    """Whether its part was planned for memory that a source has registered again since."""


class PartReply(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the transfer plan; or a request for the layout; or the reason why there is no part yet."""

    version: Version = -1
    epoch: str = msgspec.field(default="", name="run")
    needs_layout: bool = False
    not_yet: str = ""
    key: str = ""
    part: bytes | None = None
    """None: the part that the receiver has already."""
    decide_s: Annotated[float, Meta(ge=0)] | None = None
    """Seconds until the decision at the latest, for a version with a two-phase commit. None: it may go live at once."""
    refused: FleetDecision | None = None
    """The version was withdrawn, and must not go live."""
    withdrawn: FleetDecision | None = None
    """A later version was withdrawn, so that this one is the newest."""
    check: bytes = b""
    """Values for a check of the version, as the trainer gave them; see `sync.check`."""


class TableReply(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that all publishers hold together."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tags: tuple[str, ...] = ()
    """Transformation of each tensor's values; empty: none of any tensor."""


class NewsReply(msgspec.Struct, frozen=True, kw_only=True):
    """A publisher's progress."""

    epoch: str = msgspec.field(name="run")
    version: Version
    """The newest that it began."""
    is_open: bool
    """Whether that version can be read of it now."""
    withdrawn: FleetDecision | None = None
    """The decision by which a version above that one was withdrawn."""


class DigestRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Byte ranges that the caller will read, as columns of little-endian int64; by their digest if sent before."""

    version: Version
    generation: Count
    strips: bytes
    """BLAKE3 of the columns."""
    at: bytes = b""
    run_bytes: bytes = b""
    num_rows: bytes = b""
    pitch: bytes = b""
    wait_s: Annotated[float, Meta(ge=0)] = 0.0


class DigestReply(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of the byte ranges, little-endian uint64; None while their bytes are not ready."""

    digests: bytes | None
    num_ready: Count
    is_unknown: bool = False
    """The ranges of that digest are not known, and must be sent."""


class PackRequest(DigestRequest, frozen=True, kw_only=True):
    """Byte ranges that the caller wants to read in one piece."""

    release: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=1024)] = ()
    """Leases of buffers that the caller has read, and does not need any more."""


class PackReply(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptors of the buffer that has the ranges, by transport; None while there is no buffer, or no bytes."""

    regions: dict[str, bytes] | None = None
    lease: str = ""
    progress: Count = 0
    """Rows ready and requests filled so far; while it grows, the source makes progress."""
    is_full: bool = False
    """The ranges are ready, and other callers have all buffers."""
    why: str = ""
    """The reason why this member cannot pack at all."""
    is_unknown: bool = False
    """The ranges of that digest are not known, and must be sent."""


class PackLeases(msgspec.Struct, frozen=True, kw_only=True):
    """Leases of buffers that the caller still reads, and of those that it has read."""

    keep: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=1024)] = ()
    release: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=1024)] = ()


class BeginsAfter(msgspec.Struct, frozen=True, kw_only=True):
    """The version above which a rank of the trainer begins."""

    version: Version


class RankProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver's progress, sent to the planner of its part."""

    version: Version
    """-1: the present one; the receiver failed before it knew a version."""
    moved_bytes: Count = 0
    outcome: Literal["", "committed", "failed", "prepared", "refused"] = ""
    """`prepared`: it is staged, and its checks passed. `refused`: a check did not pass."""
    why: Annotated[str, Meta(max_length=1024)] = ""
    is_checked: bool = False
    """Whether a check ran on the prepared version."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's decision on the end of a live version, or on a version with a two-phase commit."""

    is_over: bool
    is_begun: bool = False
    """Whether rank 0 has begun it."""
    committed: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    failed: dict[str, str] = {}
    fleet: FleetDecision | None = None
    """Of a version with a two-phase commit, once it is over."""


# All of this module, once, before there are threads.
prepare(*structs_among(list(globals().values())))
