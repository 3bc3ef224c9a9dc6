"""What members, the hub and each other say: typed values; JSON to the hub, msgpack between members.

In / Out: frozen structs; decoding refuses wrong types and lengths past their bounds, and ignores unknown fields, which
a newer minor version may send (`version_negotiation`).
Not here: who sends them (`client`, `peer.client`), who answers (`app`, `peer.server`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.hub.address import PEER_URL_PATTERN
from penstock.hub.identity import Identity
from penstock.hub.version_negotiation import PROTOCOL, AnnouncedVersion, ProtocolVersion

Word = Annotated[str, Meta(min_length=1, max_length=256)]
MemberId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}\Z")]
"""One process life; a new life takes a new one. The digest of a secret that only this life knows: `auth.member_of`."""
Key = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
NumChunks = Annotated[int, Meta(ge=0, le=1 << 22)]
"""64 TiB of 16 MiB chunks; the hub keeps a byte for each."""
Range = tuple[Count, Count]
"""Chunks `[start, stop)`."""
Ranges = Annotated[tuple[Range, ...], Meta(max_length=65536)]
Certificate = Annotated[str, Meta(max_length=1024)]
"""The names in the certificate that a member showed the hub; its door must show the same. Empty: none was asked for."""
PeerUrl = Annotated[str, Meta(pattern=PEER_URL_PATTERN, max_length=280)]
"""Where a member's door is: `unix:///path`, `http://host:port` or `https://host:port`, without anything behind it."""
PeerUrls = Annotated[tuple[PeerUrl, ...], Meta(min_length=1, max_length=8)]

State = Literal["filling", "whole", "draining"]
LogState = Literal["filling", "whole", "draining", "damaged"]
"""What a log says of its holding. `damaged`: bytes that were verified changed in memory. The hub is told `draining`."""
Version = Annotated[int, Meta(ge=-1, le=(1 << 62))]
"""Of a publisher's numbering; -1: none yet."""
Side = Literal["publisher", "subscriber"]
SyncStanding = Literal["idle", "open", "updating", "dirty"]
"""`open`: its version can be read of it now. `dirty`: a direct update failed; it serves nobody until it is whole."""


# Member -> hub.


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A process life joins. `member` is new for each life: the generation that fences what an earlier one said."""

    member: MemberId
    host: Word
    """The boot id, not a name that may resolve two ways: members of one host can use `shm` and `cuda_ipc`."""
    doors: PeerUrls
    """Where its door is: `unix:///run/.../door.sock`, `http://10.0.0.7:41234`; in order of preference."""
    rack: Annotated[str, Meta(max_length=256)] = ""
    """A word that near hosts share (a rail, a rack); for the order of relays."""
    name: Annotated[str, Meta(max_length=256)] = ""
    """For people: host name, pid, rank."""
    num_links: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Links of its host to others; for the order of relays. 0: not known, each member has its own."""
    digest_key: Annotated[bytes, Meta(max_length=32)] = b""
    """Raw Ed25519 public key of what it says of digests, see `proof`; empty: it signs nothing."""
    protocol: ProtocolVersion = PROTOCOL


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The hub's answer."""

    ttl_s: float
    """A member silent for this long is gone."""
    beat_s: float
    """Beat this often."""
    grant_key: bytes
    """Raw Ed25519 public key; grants of this hub are signed with its other half."""
    protocol: ProtocolVersion = PROTOCOL


class HoldingState(msgspec.Struct, frozen=True, kw_only=True):
    """What one member has of one key, and does about it; the whole truth, not a change."""

    key: Key
    identity: Identity
    num_chunks: NumChunks
    nbytes: Count
    have: Ranges = ()
    """Verified chunks."""
    claims: Ranges = ()
    """Chunks it reads from storage now."""
    silent_s: float = -1.0
    """Since it last received bytes of chunks it lacks, of one not yet whole too; -1: it does not say. While that
    is short, what it claims is not given to others, and who waits for it waits: storage may take longer for a chunk
    than a stall."""
    state: State = "filling"
    num_readers: Count = 0
    max_readers: Count = 0
    """0: no cap."""
    parent: Annotated[str, Meta(max_length=128)] = ""
    """The upstream it takes chunks from in the first place now; the relay keeps it while it serves."""
    device: Annotated[str, Meta(max_length=256)] = "cpu"
    path: Annotated[str, Meta(max_length=1024)] = ""
    """Where its bytes came from and how: `75% shm <- MEMBER, 25% storage s3://...`; `offered`."""
    why: Annotated[str, Meta(max_length=1024)] = ""
    """Why so: why no nearer transport, why storage."""
    gb_per_s: float = 0.0
    device_id: Annotated[str, Meta(max_length=64)] = ""
    """What a GPU is called whatever a process's numbering: its UUID."""
    kept: bool = False
    """A keeper's: engines of its host may use the memory itself, which does not change while it is whole."""
    tier: Annotated[str, Meta(max_length=32)] = ""
    """Where a keeper's bytes rest, off its device: `host`, `disk`, `source`; they come back when they are asked for."""
    revision: Annotated[str, Meta(max_length=256)] = ""
    """What people call it, whatever the identity says: the `w1-` root of its digests; empty until it is whole."""
    grant_epoch: Count = 0
    """The member's present epoch, which grants to read it must name; see `grants`."""

    def is_of(self, asked: str) -> bool:
        """Whether it is of a revision that is asked for: by its root, by its identity, or as either begins."""
        return self.revision.startswith(asked) or self.identity.revision.startswith(asked)


class SyncState(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part in a sync; the whole truth, told with each beat."""

    name: Word
    side: Side
    run: Annotated[str, Meta(max_length=128)] = ""
    """One life of a group of publishers: the member id of its rank 0. Of a subscriber: whose version it has."""
    rank: Count = 0
    world_size: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    layout: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""
    """Digest of its layout; empty: not known yet."""
    version: Version = -1
    state: SyncStanding = "idle"
    nbytes: Count = 0
    path: Annotated[str, Meta(max_length=1024)] = ""
    """Where its version came from and how."""
    grant_epoch: Count = 0
    """See `HoldingState`."""


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """Renews a member's lease and says all it holds."""

    holdings: Annotated[tuple[HoldingState, ...], Meta(max_length=1024)] = ()
    syncs: Annotated[tuple[SyncState, ...], Meta(max_length=1024)] = ()


class UpstreamsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A member wants (or goes on wanting) a key."""

    member: MemberId
    holding: HoldingState
    can_read_storage: bool = False
    source: Annotated[str, Meta(max_length=128)] = ""
    """Only this member, of a holding of no chunks: the one whose memory is wanted itself."""


class Upstream(msgspec.Struct, frozen=True, kw_only=True):
    """A member to read from, with the right to."""

    member: MemberId
    host: Word
    doors: PeerUrls
    device: str
    state: State
    num_have: Count
    grant: bytes
    """For this reader, this key and this source, once; see `grants`."""
    certificate: Certificate = ""


class UpstreamsReply(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to read from, in order of preference: the first is the parent in the relay."""

    upstreams: tuple[Upstream, ...] = ()
    ask_again_s: float = 1.0
    reader_silent_s: float = -1.0
    """`HoldingState.silent_s` of the other member that reads storage and is the least silent; -1: nobody else reads."""


class ClaimRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A member has room to read from storage.

    `holding.claims` is all that it still reads of what it was given: the rest, if it is not in `holding.have`, goes
    back. So a request whose answer was lost may be sent again. A member asks one at a time of each key.
    """

    member: MemberId
    holding: HoldingState
    ask: bool = True
    """False: only gives back."""


class ClaimReply(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks to read from storage, the member's alone while it lives; none: see `why` and ask again later."""

    ranges: Ranges = ()
    ask_again_s: float = 0.05
    why: str = ""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What shows that a holder said other digests than the revision's; see `proof`. Columns are little endian."""

    epoch: Count
    """Of the holder, when it signed."""
    signature: Annotated[bytes, Meta(max_length=64)]
    leaf_bytes: Count
    spans: bytes
    """int64 pairs: leaves `[begin, stop)` of the chunks it spoke of, in its order."""
    at: bytes
    """int64: which of those leaves differ, counted in that order."""
    said: bytes
    """uint64: their digests, as it said."""
    table: bytes
    """`digest.leaf.canonical` of the line."""
    leaves: bytes
    """uint64: every leaf's digest, of which the revision is the root."""


class Complaint(msgspec.Struct, frozen=True, kw_only=True):
    """A reader could not use a source, and is sent elsewhere at once; others are once several complain.

    Of wrong bytes the others are only with a proof, and then at once.
    """

    member: MemberId
    """Who complains."""
    of: MemberId
    key: Key
    fault: Literal["unreachable", "stalled", "wrong bytes", "stale", "refused"]
    detail: Annotated[str, Meta(max_length=1024)] = ""
    proof: Proof | None = None


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One member, for `status`."""

    member: str
    name: str
    host: str
    rack: str
    doors: tuple[str, ...]
    age_s: float
    silent_s: float
    holdings: tuple[HoldingState, ...]
    syncs: tuple[SyncState, ...] = ()
    complaints: int = 0


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet, or one model of it."""

    members: tuple[MemberStatus, ...] = ()


class WhyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks about a model, for all who fill, one member, or an identity that nobody has yet."""

    model: Word
    member: MemberId | None = None
    identity: Identity | None = None


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Why a member does, or does not, take a model from peers: one line a holder, and what differs."""

    lines: tuple[str, ...] = ()


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is not 2xx, of hub and door."""

    error: str
    hint: str = ""
    alternatives: tuple[MemberId, ...] = ()
    """Members that may be asked instead, of a refusal."""


# Member -> member, msgpack.


class HoldingMap(msgspec.Struct, frozen=True, kw_only=True):
    """How to read a holding: descriptors of its regions, and where each tensor of the line lies in them."""

    key: Key
    generation: Count
    leaf_bytes: Count
    chunk_bytes: Count
    num_chunks: Count
    regions: tuple[dict[str, bytes], ...]
    """Per region: transport name -> encoded `Descriptor`."""
    row_region: bytes
    """int32, little endian, a row of the line each; -1 for a row of no bytes."""
    row_offset: bytes
    """int64, little endian: where the row starts in its region."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A reader shows its grant."""

    member: MemberId
    key: Key
    grant: bytes
    attach: bool = False
    """Not to read, but to use the memory itself, which is kept for as long: takes no reader's place."""
    protocol: ProtocolVersion = PROTOCOL


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to read until released, or silent for `ttl_s`."""

    lease: Word
    ttl_s: float
    max_bytes_per_s: Count = 0
    """The share of the source's cap this reader keeps to; 0: no cap."""
    protocol: ProtocolVersion = PROTOCOL


class LogReply(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks gained since `after`, in the order they were gained."""

    generation: Count
    serial: Count
    """Ask for what comes after this next time."""
    state: LogState
    chunks: bytes = b""
    """uint32, little endian."""
    leaves: bytes = b""
    """uint64, little endian: the leaf digests of those chunks, chunk after chunk."""
    max_bytes_per_s: Count = 0
    """See `Lease`: the share now, which shrinks and grows with the number of readers."""
    epoch: Count = 0
    """The holder's, when it signed."""
    signature: bytes = b""
    """Of chunks and leaves, see `proof`; empty: no hub could check it."""


def prepare(*kinds: type[msgspec.Struct]) -> None:
    """Have msgspec look at these types now: it crashes where two threads decode a type that is new to it (0.21)."""
    for kind in kinds:
        msgspec.msgpack.Decoder(kind)


prepare(AnnouncedVersion)
prepare(*(kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, msgspec.Struct)))
