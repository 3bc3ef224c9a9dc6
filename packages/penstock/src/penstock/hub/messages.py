"""Messages between members and the hub (JSON) and between members (msgpack), with the values inside them.

Decoding rejects wrong types and excessive lengths. Within one major version fields are only added, each with a default.
Unknown fields are ignored and missing fields get their default. A change that an older side would misread requires a
new major version. `sync.messages` contains the messages between the members of a sync.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

from penstock.hub.address import PEER_URL_PATTERN
from penstock.hub.job_state import JobState
from penstock.hub.summary import summary_of
from penstock.phases import Boot
from penstock.report import Readable
from penstock.types import DType, TensorTable


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The identity of weights in one rank's memory. Members exchange chunks only if all fields are equal.

    An empty field equals only an empty field. A new field requires a new major version of the protocol.
    """

    # Unlike messages, an identity refuses unknown fields, because weights that differ in an ignored field would compare
    # equal.

    model: str
    revision: str = ""
    """`w1-...`, or `h1-...` followed by the files' identities, because equal headers do not prove equal bodies."""
    layout: str = ""
    """From `layout_digest`."""
    dtype: str = ""
    quantization: str = ""
    """Digest of the complete quantisation config."""
    parallel: dict[str, str] = {}
    """Coordinates of the rank, such as `{"tp": "1/4", "pp": "0/1"}`."""
    role: str = "target"
    """`target`, `draft`, `lora:NAME`, ..."""
    post_processing: str = ""
    """The engine's changes to the weights after loading. Empty if it makes no changes."""
    engine: str = ""
    """Name and version of the engine and its kernels, if `post_processing` depends on them."""
    device_capability: str = ""

    def key(self) -> str:
        """Return the digest of all fields: 32 hex digits."""
        # The key must not depend on the order in which a caller filled `parallel`.
        ordered = msgspec.json.encode(self, order="deterministic")
        return str(blake3(ordered).hexdigest(length=16))

    def differences(self, other: Identity) -> dict[str, tuple[str, str]]:
        """Return, for each field that differs, the values in both identities as text."""
        pairs = ((name, str(getattr(self, name)), str(getattr(other, name))) for name in self.__struct_fields__)
        return {name: (mine, theirs) for name, mine, theirs in pairs if mine != theirs}


# Cache the last digest, because three steps of a first update use it (60 ms for 30,000 tensors). Tables are immutable
# and compare by identity.
@functools.lru_cache(maxsize=1)
def layout_digest(table: TensorTable) -> str:
    """Return the digest of names, dtypes and shapes, independent of the files, as 32 hex digits."""
    # The layout does not depend on the order of the rows.
    rows = sorted(zip(table.names, map(DType.__str__, table.dtypes), table.shapes, strict=True))
    return str(blake3(msgspec.json.encode(rows)).hexdigest(length=16))


def sync_key(name: str) -> str:
    """Return the key for grants of a sync: 32 hex digits that depend on its name."""
    # The prefix separates the keys of syncs from the keys of holdings.
    return str(blake3(b"penstock sync\0" + name.encode()).hexdigest(length=16))


NUM_TREES = 2
"""Number of trees that a relay may have. Chunk c is sent in tree c % 2, so a member with two children sends one copy in
total."""

# 1.0 announced no version. 2 replaced grants that expire on the hub's clock with grants for the source's epoch. 2.1
# signs the digests in logs. 2.2 sends the version in every request to a hub, and reports the phases of a start in
# heartbeats. 2.3 adds versions with a two-phase commit. 2.4 spreads chunks over two trees of upstreams. 2.5 lets a
# request for upstreams claim chunks, and adds grants that share a signature. 2.6 adds the reader's caller to grants.
PROTOCOL = "2.6"
"""The protocol version of this release."""
PROTOCOL_HEADER = "penstock-protocol"
"""Header in requests to a hub with the caller's protocol version. Releases before 2.2 do not send it."""
ProtocolVersion = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}\Z")]
UNANNOUNCED = "1.0"
"""The version of requests without a version."""


class AnnouncedVersion(msgspec.Struct, frozen=True):
    """The protocol version and sender of a message, whose other fields may be unknown to this release."""

    protocol: Annotated[str, msgspec.Meta(pattern=r"^([0-9]{1,4}\.[0-9]{1,4})?\Z")] = ""
    """Empty if no version is announced."""
    # The type may differ in an unknown version, and the error must still name that version.
    member: Any = ""

    @property
    def sender(self) -> str:
        """Return a readable name of the sender."""
        return str(self.member)[:8] or "unknown"


def version_fault(announced: str, them: str, us: str) -> str:
    """Return why a version is not compatible, or an empty string otherwise. `them` and `us` name the two sides."""
    if announced.partition(".")[0] == PROTOCOL.partition(".")[0]:
        return ""
    return f"{them} speaks protocol {announced[:16]}, {us} speaks {PROTOCOL}: their major versions differ"


def follows_trees(announced: str) -> bool:
    """Return whether a member with this version reads the chunks of two trees from two parents."""
    return _is_at_least(announced, 2, 4)


def accepts_shared_grants(announced: str) -> bool:
    """Return whether a member with this version accepts grants that share a signature."""
    return _is_at_least(announced, 2, 5)


def accepts_callers(announced: str) -> bool:
    """Return whether a member with this version accepts grants with the reader's caller."""
    return _is_at_least(announced, 2, 6)


# Cache the result, because each request checks every member of a fleet and there are few versions.
@functools.lru_cache(maxsize=64)
def _is_at_least(announced: str, major: int, minor: int) -> bool:
    first, _, second = announced.partition(".")
    return (int(first), int(second)) >= (major, minor)


UPGRADE_HINT = "run releases of Penstock with the same major version of the protocol. Upgrade the older release."


Word = Annotated[str, Meta(min_length=1, max_length=256)]
# Patterns end with \Z, because $ also matches before a newline, and ids are used in logs, paths and store names.
MemberId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}\Z")]
"""Id of one run of a process: the digest of a secret that only this process knows. See `auth.member_of`."""
Key = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
# The number is limited, because a caller chooses it and the hub creates arrays of this length.
NumChunks = Annotated[int, Meta(ge=0, le=1 << 22)]
"""Number of chunks. The limit is 64 TiB in chunks of 16 MiB. The hub uses a byte for each chunk."""
Range = tuple[Count, Count]
"""Chunks `[start, stop)`."""
Ranges = Annotated[tuple[Range, ...], Meta(max_length=65536)]
# The limit equals `auth.MAX_NAMES_LENGTH`.
Certificate = Annotated[str, Meta(max_length=1024)]
"""Names in the certificate that a member presented to the hub. Its server must present the same certificate. Empty if
the hub requires no certificates."""
PeerUrl = Annotated[str, Meta(pattern=PEER_URL_PATTERN, max_length=280)]
"""Address of a member's server. See `address.PEER_URL_PATTERN`."""
PeerUrls = Annotated[tuple[PeerUrl, ...], Meta(min_length=1, max_length=8)]

State = Literal["filling", "whole", "draining"]
LogState = Literal["filling", "whole", "draining", "damaged"]
"""`damaged` means that verified bytes changed in memory, which the hub receives as `draining`."""
MAX_VERSION = 1 << 62
Version = Annotated[int, Meta(ge=-1, le=MAX_VERSION)]
"""A version number from the publisher, or -1 before the first one."""
Side = Literal["publisher", "subscriber"]
SyncStanding = Literal["idle", "open", "updating", "dirty"]
"""`open` means that the rank's version can be read. `dirty` means that a direct update failed."""
FleetOutcome = Literal["", "committed", "withdrawn"]
"""The decision on a version with a two-phase commit. Empty if there is no decision."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message from a process. The `member` id is new, so messages from an earlier process are refused."""

    member: MemberId
    host: Word
    """Id of the host, equal for members that share a runtime directory and can therefore use `shm` and `cuda_ipc`."""
    doors: PeerUrls
    """Addresses of its server in order of preference: `unix:///run/.../peer.sock`, `http://10.0.0.7:41234`."""
    rack: Annotated[str, Meta(max_length=256)] = ""
    """A label that nearby hosts share, which affects the order in relays."""
    name: Annotated[str, Meta(max_length=256)] = ""
    """Host name, PID and rank, for display."""
    num_links: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Number of network links of the member's host. If 0 (unknown), each member counts as having its own link."""
    digest_key: Annotated[bytes, Meta(max_length=32)] = b""
    """Unused. Members of an earlier release send the key of their signed digests here."""
    protocol: ProtocolVersion = PROTOCOL


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The hub's response to a hello."""

    ttl_s: float
    """A member that is silent for this many seconds is removed."""
    beat_s: float
    grant_key: bytes
    """Raw Ed25519 public key for checking this hub's grants."""
    protocol: ProtocolVersion = PROTOCOL


class HoldingState(msgspec.Struct, frozen=True, kw_only=True):
    """A member's complete state for one key."""

    key: Key
    identity: Identity
    num_chunks: NumChunks
    nbytes: Count
    have: Ranges = ()
    """Ranges of verified chunks."""
    claims: Ranges = ()
    """Ranges of chunks that it reads from storage now."""
    silent_s: float = -1.0
    """Seconds since it last received bytes of a missing chunk, or -1 if not reported. While this time is short, its
    claims are not reassigned, because storage may take longer for a chunk than the stall deadline."""
    state: State = "filling"
    num_readers: Count = 0
    max_readers: Count = 0
    """Maximum number of readers. 0 means no limit."""
    parent: Annotated[str, Meta(max_length=128)] = ""
    """The upstream from which it currently reads most chunks. The relay keeps this parent while the parent serves."""
    second_parent: Annotated[str, Meta(max_length=128)] = ""
    """The parent for the chunks of the second tree. Empty if all chunks have one parent."""
    link: Annotated[str, Meta(max_length=64)] = ""
    """The network link of its host that its bytes use. Empty if unknown."""
    device: Annotated[str, Meta(max_length=256)] = "cpu"
    path: Annotated[str, Meta(max_length=1024)] = ""
    """Sources and transports of its bytes, such as `75% shm <- MEMBER, 25% storage s3://...`, or `offered`."""
    why: Annotated[str, Meta(max_length=1024)] = ""
    """Why the member used this path instead of a nearer transport or a peer."""
    gb_per_s: float = 0.0
    device_id: Annotated[str, Meta(max_length=64)] = ""
    """UUID of its GPU."""
    kept: bool = False
    """Whether a weight cache holds the weights. Engines on its host may use the memory directly while the holding is
    whole."""
    tier: Annotated[str, Meta(max_length=32)] = ""
    """Tier of a cache's bytes if they are not on its device: `host`, `disk` or `source`."""
    revision: Annotated[str, Meta(max_length=256)] = ""
    """Revision for display, the `w1-` root of the digests. Empty until the holding is complete."""
    grant_epoch: Count = 0
    """The epoch that grants for reading from the member must name. See `grants`."""

    def is_of(self, revision: str) -> bool:
        """Return whether the holding's root or the revision in its identity begins with `revision`."""
        return self.revision.startswith(revision) or self.identity.revision.startswith(revision)


class FleetDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision on one version with a two-phase commit."""

    epoch: Annotated[str, Meta(max_length=128)] = msgspec.field(name="run")
    version: Version
    outcome: FleetOutcome = ""
    by: Annotated[str, Meta(max_length=128)] = ""
    """The member that refused the version. Empty if no single member refused it."""
    why: Annotated[str, Meta(max_length=1024)] = ""


class SyncState(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's complete state in a sync, which each heartbeat contains."""

    name: Word
    side: Side
    epoch: Annotated[str, Meta(max_length=128)] = msgspec.field(default="", name="run")
    """Member id of the publishers' rank 0. For a subscriber, the epoch of its version."""
    rank: Count = 0
    world_size: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    layout: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""
    """Digest of its layout. Empty if unknown."""
    version: Version = -1
    state: SyncStanding = "idle"
    nbytes: Count = 0
    path: Annotated[str, Meta(max_length=1024)] = ""
    took_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds of its last publication or update."""
    pause_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds of `took_s` during which an engine could not serve requests."""
    prepared: Version = -1
    """The version that a subscriber has staged and for which it awaits the fleet's decision, or -1."""
    decision: FleetDecision | None = None
    """The newest decision that this rank knows, for a hub that lost its state."""
    grant_epoch: Count = 0

    @property
    def fleet(self) -> str:
        """Describe the prepared version and the newest decision in a text, which is empty if there is neither."""
        parts = [f"prepared {self.prepared}"] if self.prepared >= 0 else []
        decision = self.decision
        if decision is not None:
            by = f" by {decision.by[:8]}" if decision.by else ""
            why = f"{by}: {decision.why}" if decision.why else by
            parts.append(f"{decision.outcome} {decision.version}{why}")
        return ", ".join(parts)


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's order to send no more readers to a member."""

    by: Annotated[str, Meta(max_length=1100)] = ""
    """`Caller.name` of the operator. The hub sets it."""
    reason: Annotated[str, Meta(max_length=256)] = ""


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """A failed call of a verb in a member's process."""

    age_s: Annotated[float, Meta(ge=0)]
    verb: Annotated[str, Meta(max_length=64)]
    model: Annotated[str, Meta(max_length=256)] = ""
    """Name of the model or the sync. Empty if it has no name."""
    error: Annotated[str, Meta(max_length=64)]
    """Class of the error."""
    message: Annotated[str, Meta(max_length=1024)]
    blame: Annotated[str, Meta(max_length=32)]
    hint: Annotated[str, Meta(max_length=512)] = ""


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat, which renews a member's lease and lists all its holdings and syncs."""

    holdings: Annotated[tuple[HoldingState, ...], Meta(max_length=1024)] = ()
    syncs: Annotated[tuple[SyncState, ...], Meta(max_length=1024)] = ()
    failures: Annotated[tuple[FailureReport, ...], Meta(max_length=4)] = ()
    drain: Drain | None = None
    """The order in the hub's last response, for a hub that lost its state."""
    boot: Boot | None = None
    """The start of the member's process, without its phases. None if it has loaded nothing."""


class BeatReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The hub's response to a heartbeat."""

    drain: Drain | None = None


class UpstreamsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A member's first or repeated request for upstreams of a key."""

    member: MemberId
    holding: HoldingState
    can_read_storage: bool = False
    source: Annotated[str, Meta(max_length=128)] = ""
    """For a holding without chunks, the only member to return, whose memory the reader wants to use directly."""
    claim: bool = False
    """Whether to also assign chunks to read from storage, which saves a starting member a request."""


class Upstream(msgspec.Struct, frozen=True, kw_only=True):
    """A member to read from, with a grant."""

    member: MemberId
    host: Word
    doors: PeerUrls
    device: str
    state: State
    num_have: Count
    grant: bytes
    """The grant, which is valid once for this reader, key and source. See `grants`."""
    certificate: Certificate = ""


class ClaimReply(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks that only this member reads from storage while it is alive. If `ranges` is empty, `why` is the reason."""

    ranges: Ranges = ()
    ask_again_s: float = 0.05
    why: str = ""


class UpstreamsReply(msgspec.Struct, frozen=True, kw_only=True):
    """Members to read from in order of preference. The first member is the parent in the relay."""

    upstreams: tuple[Upstream, ...] = ()
    orders: Annotated[tuple[tuple[Count, ...], ...], Meta(max_length=NUM_TREES)] = ()
    """With two trees of upstreams, the members for each tree as positions in `upstreams`, the parent first. Chunk c
    belongs to tree c % 2. Empty means that the order of `upstreams` applies to all chunks."""
    is_placed: bool = True
    """Whether the member has a place in the relay. A member without a place must report no upstream as its parent."""
    ask_again_s: float = 1.0
    reader_silent_s: float = -1.0
    """Smallest `HoldingState.silent_s` of the other members that read from storage, or -1."""
    claim: ClaimReply | None = None
    """Chunks to read from storage, or None if the member must send a `ClaimRequest`."""


class ClaimRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A member's request for chunks to read from storage. A member sends one request at a time for each key.

    `holding.claims` lists all assigned chunks that the member still reads. Assigned chunks that are in neither
    `holding.claims` nor `holding.have` become free, so that a request whose response was lost may be repeated.
    """

    member: MemberId
    holding: HoldingState
    ask: bool = True
    """If False, the request only returns chunks."""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """A signed statement about wrong digests, sent by readers of earlier releases and ignored by the hub."""

    epoch: Count
    signature: Annotated[bytes, Meta(max_length=64)]
    leaf_bytes: Count
    spans: bytes
    at: bytes
    said: bytes
    table: bytes
    leaves: bytes


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's report that it could not use a source. See `Directory.complain`."""

    member: MemberId
    of: MemberId
    key: Key
    fault: Literal["unreachable", "stalled", "wrong bytes", "stale", "refused"]
    detail: Annotated[str, Meta(max_length=1024)] = ""
    proof: Proof | None = None


class SyncRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the members of a sync, with grants for some of them."""

    member: MemberId
    name: Word
    grants: Annotated[tuple[MemberId, ...], Meta(max_length=65536)] = ()


class SyncMember(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a sync."""

    member: MemberId
    host: Word
    doors: PeerUrls
    called: str
    since: float
    """Time at which the member joined, on the hub's clock."""
    seen: float
    """Time of the member's last heartbeat, on the hub's clock."""
    state: SyncState
    grant: bytes = b""
    certificate: Certificate = ""


class SyncReply(msgspec.Struct, frozen=True, kw_only=True):
    """All members of a sync, the earliest first."""

    members: tuple[SyncMember, ...] = ()
    is_new: bool = False
    """Whether the hub is new, so that members may be missing from the list."""


class DecideRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A proposal for the decision on a version with a two-phase commit. The first proposal wins."""

    member: MemberId
    name: Word
    decision: FleetDecision
    """Only the publishers' rank 0 may propose `committed`. An empty outcome only requests the decision."""


class DecideReply(msgspec.Struct, frozen=True, kw_only=True):
    """The decision on a version."""

    decision: FleetDecision | None = None
    """The decision, or None if there is none yet."""
    is_past: bool = False
    """Whether a later version was decided and the decision on this version is unknown."""


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A member as `status` shows it."""

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
    drain: Drain | None = None
    """The current order to drain the member, whose holdings are shown as `draining`."""
    boot: str = ""
    """State of the start, such as `starting: move`, `ready` or `failed: commit`. Empty if it has loaded nothing."""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A conversion as `status` shows it. A finished conversion is shown for an hour."""

    job: MemberId
    age_s: float
    silent_s: float
    """Seconds since its last report. A running conversion reports once a second."""
    state: JobState


class FleetFailure(FailureReport, frozen=True, kw_only=True):
    """A failure as `status` shows it for an hour, even if its member has left."""

    member: str
    name: str
    host: str


class Status(Readable, msgspec.Struct, frozen=True, kw_only=True):
    """The state of the fleet or of one model in it."""

    members: tuple[MemberStatus, ...] = ()
    jobs: tuple[JobStatus, ...] = ()
    failures: tuple[FleetFailure, ...] = ()
    may_drain: bool = False
    """Whether the caller is an operator, who may drain members."""

    def summary(self) -> str:
        """Describe the members, models, syncs, conversions and failures in a few lines."""
        return summary_of(self.to_dict())


class Replica(Boot, frozen=True, kw_only=True):
    """The start of a member's process, as its server reports it."""

    member: str
    name: str
    host: str
    silent_s: float = 0.0
    """Always 0, for hubs of an earlier release."""
    has_left: bool = False
    """Always false, for hubs of an earlier release."""


class WhyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to explain a model's sources, for all fetching members, one member, or an identity."""

    model: Word
    member: MemberId | None = None
    identity: Identity | None = None


class Why(Readable, msgspec.Struct, frozen=True, kw_only=True):
    """Reasons why members read or do not read a model from peers, with a line for each holder."""

    lines: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return the lines, joined to one text."""
        return "\n".join(self.lines)


MEMBER_PREFIX = "penstock:"
"""Prefix of a member's id in the `uri` of an error."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error response from the hub and from members."""

    error: str
    hint: str = ""
    alternatives: tuple[MemberId, ...] = ()
    """Other members that may accept the refused reader."""
    kind: str | msgspec.UnsetType = msgspec.UNSET
    """Name of the error's class, if the status does not determine it."""


class MemberFault(Fault, frozen=True, kw_only=True):
    """A fault about a member other than the responding member. Readers that only know `Fault` ignore the name."""

    member: MemberId | msgspec.UnsetType = msgspec.UNSET


class HoldingMap(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a holding: descriptors for its regions, and the position of each tensor in them."""

    key: Key
    generation: Count
    leaf_bytes: Count
    chunk_bytes: Count
    num_chunks: Count
    regions: tuple[dict[str, bytes], ...]
    """For each region, an encoded `Descriptor` for each transport."""
    row_region: bytes
    """The region of each row in the layout, as little-endian int32, or -1 for a row without bytes."""
    row_offset: bytes
    """The offset of each row in its region, as little-endian int64."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's request for a lease, with its grant."""

    member: MemberId
    key: Key
    grant: bytes
    attach: bool = False
    """Whether to use the memory directly instead of reading it. The lease then keeps the memory allocated."""
    protocol: ProtocolVersion = PROTOCOL


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to read until the lease is released or not used for `ttl_s`."""

    lease: Key
    ttl_s: float
    max_bytes_per_s: Count = 0
    """This reader's share of the source's limit. 0 means no limit."""
    protocol: ProtocolVersion = PROTOCOL


class LogReply(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks that the holder received since the serial number `after` in the request, in the order of arrival."""

    generation: Count
    serial: Count
    """The value for `after` in the next request."""
    state: LogState
    chunks: bytes = b""
    """Chunk numbers as little-endian uint32."""
    leaves: bytes = b""
    """Leaf digests of these chunks as little-endian uint64."""
    max_bytes_per_s: Count = 0
    """The reader's current share, which changes with the number of readers."""
    epoch: Count = 0
    signature: bytes = b""
    """Unused, like `epoch`. Holders in an earlier release sign the digests."""


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A member's request for a session, with its grant."""

    member: MemberId
    key: Key
    grant: bytes
    protocol: ProtocolVersion = PROTOCOL


class MemberSession(msgspec.Struct, frozen=True, kw_only=True):
    """The right to send requests until the member is silent for `ttl_s`."""

    session: Key
    ttl_s: float
    protocol: ProtocolVersion = PROTOCOL


def prepare(*kinds: Any) -> None:
    """Prepare decoders for these types."""
    # msgspec 0.21 crashes if two threads decode a new type at the same moment.
    for kind in kinds:
        msgspec.msgpack.Decoder(kind)


def structs_among(values: Iterable[object]) -> list[type[msgspec.Struct]]:
    """Return the struct types among the values of a module."""
    return [value for value in values if isinstance(value, type) and issubclass(value, msgspec.Struct)]


# Prepare all types in this module before there are threads.
prepare(*structs_among(list(globals().values())))
