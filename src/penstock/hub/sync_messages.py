"""What members of a sync, the hub and each other say: typed values; JSON to the hub, msgpack between members.

In / Out: frozen structs, as in `messages`. Layouts and parts cross as `plan.columns` encodes them.
Not here: who sends them (`sync`), who answers (`sync_directory`, `sync.routes`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

from penstock.hub.messages import Certificate, Count, Key, MemberId, PeerUrls, SyncState, Version, Word, prepare
from penstock.hub.version_negotiation import PROTOCOL, ProtocolVersion


def sync_key(name: str) -> str:
    """What grants for a sync are for: 32 hex digits of its name."""
    return str(blake3(b"penstock sync\0" + name.encode()).hexdigest(length=16))


# Member -> hub.


class SyncRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Who takes part in a sync, and grants for some of them."""

    member: MemberId
    name: Word
    grants: Annotated[tuple[MemberId, ...], Meta(max_length=65536)] = ()


class SyncMember(msgspec.Struct, frozen=True, kw_only=True):
    """One of them."""

    member: MemberId
    host: Word
    doors: PeerUrls
    called: str
    """For people."""
    since: float
    """When it came, by the hub's clock."""
    seen: float
    """When the hub last heard of it."""
    state: SyncState
    grant: bytes = b""
    """For the asker, if it asked for one."""
    certificate: Certificate = ""


class SyncReply(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, the earlier first."""

    members: tuple[SyncMember, ...] = ()
    is_new: bool = False
    """The hub is, and has not heard of all yet."""


# Member -> member, msgpack.


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A member shows its grant, and is listened to until it is silent for the session's time."""

    member: MemberId
    key: Key
    grant: bytes
    protocol: ProtocolVersion = PROTOCOL


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The right to ask."""

    session: Word
    ttl_s: float
    protocol: ProtocolVersion = PROTOCOL


class PartRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver asks a planner what to take from whom."""

    version: Version
    """-1: the newest there is."""
    digest: Key
    """Of its layout."""
    layout: bytes | None = None
    """The layout itself, where the planner said that it does not know it."""
    have_key: str = ""
    """Of the part that it still has."""
    without: tuple[MemberId, ...] = ()
    """Sources that it could not read."""


class PartReply(msgspec.Struct, frozen=True, kw_only=True):
    """What to take; or that the layout must be told first, or why there is nothing to take yet."""

    version: Version = -1
    run: str = ""
    needs_layout: bool = False
    not_yet: str = ""
    key: str = ""
    part: bytes | None = None
    """None: the one it has."""


class TableReply(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that the publishers hold together."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tags: tuple[str, ...] = ()
    """Of each tensor what was done to its values; empty: nothing to any."""


class NewsReply(msgspec.Struct, frozen=True, kw_only=True):
    """How far a publisher is."""

    run: str
    version: Version
    """The newest that it began."""
    is_open: bool
    """Whether that version can be read of it now."""


class DigestRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Strips that the asker will read, as columns of little-endian int64; by name, where it told them before."""

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
    """Their digests, little-endian uint64; None while their bytes are not ready."""

    digests: bytes | None
    num_ready: Count
    is_unknown: bool = False
    """The strips of that name must be told."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a receiver is, told to the planner of its part."""

    version: Version
    """-1: whichever is shown; it failed before it was told one."""
    moved_bytes: Count = 0
    outcome: Literal["", "committed", "failed"] = ""
    why: Annotated[str, Meta(max_length=1024)] = ""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a live version may end, as rank 0 sees it."""

    is_over: bool
    is_begun: bool = False
    """Whether rank 0 has begun it."""
    committed: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    failed: dict[str, str] = {}


prepare(*(kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, msgspec.Struct)))
