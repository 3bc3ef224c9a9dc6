"""Messages of a sync, between members and the hub (JSON) and between members (msgpack): typed values.

In / Out: frozen structs, as in `messages`. Layouts and parts are sent as `plan.columns` encodes them.
Not here: sending them (`sync`), answering them (`sync_directory`, `sync.routes`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

from penstock.hub.messages import Certificate, Count, Key, MemberId, PeerUrls, SyncState, Version, Word, prepare
from penstock.hub.version_negotiation import PROTOCOL, ProtocolVersion


def sync_key(name: str) -> str:
    """Return the key that grants for a sync name: 32 hex digits of its name."""
    return str(blake3(b"penstock sync\0" + name.encode()).hexdigest(length=16))


# Member -> hub.


class SyncRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the members of a sync, with grants for some of them."""

    member: MemberId
    name: Word
    grants: Annotated[tuple[MemberId, ...], Meta(max_length=65536)] = ()


class SyncMember(msgspec.Struct, frozen=True, kw_only=True):
    """One member of a sync."""

    member: MemberId
    host: Word
    doors: PeerUrls
    called: str
    """For people."""
    since: float
    """Time at which it joined, by the hub's clock."""
    seen: float
    """Time of its last beat."""
    state: SyncState
    grant: bytes = b""
    """For the caller, if it requested one."""
    certificate: Certificate = ""


class SyncReply(msgspec.Struct, frozen=True, kw_only=True):
    """All members of a sync, the earliest first."""

    members: tuple[SyncMember, ...] = ()
    is_new: bool = False
    """Whether the hub is new, so that members may be missing."""


# Member -> member, msgpack.


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A member's request for a session, with its grant."""

    member: MemberId
    key: Key
    grant: bytes
    protocol: ProtocolVersion = PROTOCOL


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The right to send requests, until the member is silent for `ttl_s`."""

    session: Word
    ttl_s: float
    protocol: ProtocolVersion = PROTOCOL


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


class PartReply(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the transfer plan; or a request for the layout; or the reason why there is no part yet."""

    version: Version = -1
    run: str = ""
    needs_layout: bool = False
    not_yet: str = ""
    key: str = ""
    part: bytes | None = None
    """None: the part that the receiver has already."""


class TableReply(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that all publishers hold together."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tags: tuple[str, ...] = ()
    """Transformation of each tensor's values; empty: none of any tensor."""


class NewsReply(msgspec.Struct, frozen=True, kw_only=True):
    """A publisher's progress."""

    run: str
    version: Version
    """The newest that it began."""
    is_open: bool
    """Whether that version can be read of it now."""


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


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver's progress, sent to the planner of its part."""

    version: Version
    """-1: the present one; the receiver failed before it knew a version."""
    moved_bytes: Count = 0
    outcome: Literal["", "committed", "failed"] = ""
    why: Annotated[str, Meta(max_length=1024)] = ""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's decision on the end of a live version."""

    is_over: bool
    is_begun: bool = False
    """Whether rank 0 has begun it."""
    committed: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    failed: dict[str, str] = {}


prepare(*(kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, msgspec.Struct)))
