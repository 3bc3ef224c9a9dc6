"""Messages between members and the hub (JSON), and between members (msgpack), with the values that they are made of.

In / Out: frozen structs; decoding refuses wrong types and lengths past their bounds, and ignores unknown fields.
Not here: sending them (`client`, `peer.client`), answering them (`app`, `peer.server`); what the members of a sync send
each other (`sync.messages`).

In this order: the identity of weights, whose digest is the key that members exchange under; the version of the
protocol; values; messages of a member and the hub; messages of two members. Within one major version fields are only
added, each with a default: unknown ones are ignored, missing ones take their default, and both sides use the fields
that both have. A change that an older side would misread is a new major version.
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
from penstock.plan.relay_parents import NUM_TREES
from penstock.report import Readable
from penstock.types import DType, TensorTable


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The identity of weights in one rank's memory: two holdings exchange chunks only if all fields are equal.

    A field left empty is equal only to an empty one. A new field is a new major version of the protocol.
    """

    # Unknown fields are refused, unlike in messages: ignoring one would call weights equal that differ in it.

    model: str
    revision: str = ""
    """`w1-...`; or `h1-...` and the files' identities, since headers alone do not say that bodies are equal."""
    layout: str = ""
    """Digest of names, dtypes and shapes: `layout_digest`."""
    dtype: str = ""
    quantization: str = ""
    """Digest of the whole quantisation config."""
    parallel: dict[str, str] = {}
    """Coordinates, e.g. `{"tp": "1/4", "pp": "0/1"}`."""
    role: str = "target"
    """`target`, `draft`, `lora:NAME`, ..."""
    post_processing: str = ""
    """The engine's changes to the weights after loading; empty: none."""
    engine: str = ""
    """Name and version of engine and kernels, where `post_processing` depends on them."""
    device_capability: str = ""

    def key(self) -> str:
        """Return the digest of all fields: 32 hex digits."""
        # Deterministic order: the key must not depend on the order in which a caller filled `parallel`.
        ordered = msgspec.json.encode(self, order="deterministic")
        return str(blake3(ordered).hexdigest(length=16))

    def differences(self, other: Identity) -> dict[str, tuple[str, str]]:
        """Return the differing fields: name -> (this one's, the other's)."""
        # As text: every field but `parallel` is one, and the differences are for people.
        pairs = ((name, str(getattr(self, name)), str(getattr(other, name))) for name in self.__struct_fields__)
        return {name: (mine, theirs) for name, mine, theirs in pairs if mine != theirs}


# The last one is kept: three steps of a first update need the digest of one table, 60 ms for 30,000 tensors. Tables are
# immutable, and compare by identity.
@functools.lru_cache(maxsize=1)
def layout_digest(table: TensorTable) -> str:
    """Return the digest of names, dtypes and shapes, sorted by name, whatever the files are: 32 hex digits."""
    # Sorted: the same weights in other files, or in another order, are the same layout.
    rows = sorted(zip(table.names, map(DType.__str__, table.dtypes), table.shapes, strict=True))
    return str(blake3(msgspec.json.encode(rows)).hexdigest(length=16))


def sync_key(name: str) -> str:
    """Return the key that grants for a sync are for: 32 hex digits, by its name."""
    # With a prefix: no name of a sync can be made to give the key of a holding.
    return str(blake3(b"penstock sync\0" + name.encode()).hexdigest(length=16))


# 1.0 announced no version; 2 replaced grants that expire by the hub's clock by grants of the source's epoch; 2.1 signs
# the digests in logs; 2.2 shows the version in every request to a hub, and reports the phases of a start in beats; 2.3
# has versions that a fleet commits as a whole; 2.4 spreads chunks over two trees of upstreams; 2.5 claims storage in
# a request for upstreams, and has grants that share a signature; 2.6 names the reader's caller in grants.
PROTOCOL = "2.6"
"""The version that this release speaks."""
PROTOCOL_HEADER = "penstock-protocol"
"""The header of requests to a hub with the caller's version; releases before 2.2 send none."""
ProtocolVersion = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}\Z")]
UNANNOUNCED = "1.0"
"""The version of requests that announce none."""


class AnnouncedVersion(msgspec.Struct, frozen=True):
    """The version in a message whose other fields may be of a version that is not known here, and its sender."""

    protocol: Annotated[str, msgspec.Meta(pattern=r"^([0-9]{1,4}\.[0-9]{1,4})?\Z")] = ""
    """Empty: none is announced. A request without one is of `UNANNOUNCED`; an answer without one is no message."""
    # Of any type: a version that is not known here may call its members otherwise, and is still refused as a version.
    member: Any = ""

    @property
    def sender(self) -> str:
        """Return the sender's name in messages for people."""
        return str(self.member)[:8] or "unknown"


def version_fault(announced: str, them: str, us: str) -> str:
    """Return why a version is not compatible; empty: it is.

    Args:
        announced: the other side's version.
        them: the other side, for the message.
        us: this side, for the message.
    """
    if announced.partition(".")[0] == PROTOCOL.partition(".")[0]:
        return ""
    return f"{them} speaks protocol {announced[:16]}, {us} speaks {PROTOCOL}: their major versions differ"


def follows_trees(announced: str) -> bool:
    """Return whether a member of this version reads the chunks of two trees from two parents."""
    return _is_at_least(announced, 2, 4)


def takes_shared_grants(announced: str) -> bool:
    """Return whether a member of this version knows grants that share a signature."""
    return _is_at_least(announced, 2, 5)


def takes_callers(announced: str) -> bool:
    """Return whether a member of this version knows grants that name the reader's caller."""
    return _is_at_least(announced, 2, 6)


# Of few versions: asked for each member of a fleet.
@functools.lru_cache(maxsize=64)
def _is_at_least(announced: str, major: int, minor: int) -> bool:
    first, _, second = announced.partition(".")
    return (int(first), int(second)) >= (major, minor)


UPGRADE_HINT = "run releases of Penstock that speak the same major version; upgrade the older one"


Word = Annotated[str, Meta(min_length=1, max_length=256)]
# Patterns end in \Z and not in $, which a newline may follow: ids stand in logs, paths and names of the store.
MemberId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}\Z")]
"""Id of one process life; a new life takes a new id. Digest of a secret that only this life knows: `auth.member_of`."""
Key = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
# Bounded, since a caller chooses it and the hub makes arrays of this length.
NumChunks = Annotated[int, Meta(ge=0, le=1 << 22)]
"""64 TiB of 16 MiB chunks; the hub keeps a byte for each."""
Range = tuple[Count, Count]
"""Chunks `[start, stop)`."""
Ranges = Annotated[tuple[Range, ...], Meta(max_length=65536)]
# As long as `auth.MAX_NAMES_LENGTH`.
Certificate = Annotated[str, Meta(max_length=1024)]
"""Names in the certificate that a member showed the hub; its server must show the same. Empty: none was required."""
PeerUrl = Annotated[str, Meta(pattern=PEER_URL_PATTERN, max_length=280)]
"""Address of a member's server: `unix:///path`, `http://host:port` or `https://host:port`, with nothing after it."""
PeerUrls = Annotated[tuple[PeerUrl, ...], Meta(min_length=1, max_length=8)]

State = Literal["filling", "whole", "draining"]
LogState = Literal["filling", "whole", "draining", "damaged"]
"""State of a holding in its log. `damaged`: verified bytes changed in memory; the hub gets `draining` for it."""
MAX_VERSION = 1 << 62
Version = Annotated[int, Meta(ge=-1, le=MAX_VERSION)]
"""Of a publisher's numbering; -1: none yet."""
Side = Literal["publisher", "subscriber"]
SyncStanding = Literal["idle", "open", "updating", "dirty"]
"""`open`: its version can be read now. `dirty`: a direct update failed, so it serves no reader until it is whole."""
FleetOutcome = Literal["", "committed", "withdrawn"]
"""The decision on a version with a two-phase commit; empty: there is none."""


# Messages of a member to the hub, and the hub's answers, in JSON.


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a process life. `member` is new for each life, so messages of an earlier one are refused."""

    member: MemberId
    host: Word
    """Equal for members that mount one runtime directory: they can use `shm` and `cuda_ipc`. See `net.unix_sockets`."""
    doors: PeerUrls
    """Addresses of its server: `unix:///run/.../peer.sock`, `http://10.0.0.7:41234`; in order of preference."""
    rack: Annotated[str, Meta(max_length=256)] = ""
    """A word that near hosts share (a rail, a rack); for the order of relays."""
    name: Annotated[str, Meta(max_length=256)] = ""
    """For people: host name, pid, rank."""
    num_links: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Links of its host to others; for the order of relays. 0: not known, each member has its own."""
    digest_key: Annotated[bytes, Meta(max_length=32)] = b""
    """Unused. Members of an earlier release send the key of their signed digests."""
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
    """A member's state of one key; always complete, never a change to an earlier state."""

    key: Key
    identity: Identity
    num_chunks: NumChunks
    nbytes: Count
    have: Ranges = ()
    """Verified chunks."""
    claims: Ranges = ()
    """Chunks it reads from storage now."""
    silent_s: float = -1.0
    """Seconds since it last received bytes of a missing chunk, also of an incomplete one; -1: not reported. While that
    is short, its claims are not assigned to others, and members that wait for it go on waiting: storage may take longer
    for a chunk than the stall deadline."""
    state: State = "filling"
    num_readers: Count = 0
    max_readers: Count = 0
    """0: no cap."""
    parent: Annotated[str, Meta(max_length=128)] = ""
    """The upstream it takes chunks from in the first place now; the relay keeps it while it serves."""
    second_parent: Annotated[str, Meta(max_length=128)] = ""
    """The same for the chunks of the second tree; empty: all chunks are of one."""
    link: Annotated[str, Meta(max_length=64)] = ""
    """The link of its host that its bytes take to others; for the order of relays. Empty: not known."""
    device: Annotated[str, Meta(max_length=256)] = "cpu"
    path: Annotated[str, Meta(max_length=1024)] = ""
    """Sources and transports of its bytes: `75% shm <- MEMBER, 25% storage s3://...`; `offered`."""
    why: Annotated[str, Meta(max_length=1024)] = ""
    """Reason for that: why no nearer transport, why storage."""
    gb_per_s: float = 0.0
    device_id: Annotated[str, Meta(max_length=64)] = ""
    """UUID of its GPU, which does not depend on a process's numbering."""
    kept: bool = False
    """A weight cache's: engines of its host may use the memory itself, which does not change while it is whole."""
    tier: Annotated[str, Meta(max_length=32)] = ""
    """Tier of a cache's bytes that are not on its device: `host`, `disk` or `source`. A request brings them back."""
    revision: Annotated[str, Meta(max_length=256)] = ""
    """Revision for people, whatever the identity has: the `w1-` root of its digests; empty until it is whole."""
    grant_epoch: Count = 0
    """The member's present epoch, which grants to read it must name; see `grants`."""

    def is_of(self, revision: str) -> bool:
        """Return whether its root or its identity's revision begins with `revision`."""
        return self.revision.startswith(revision) or self.identity.revision.startswith(revision)


class FleetDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision on one version with a two-phase commit."""

    epoch: Annotated[str, Meta(max_length=128)] = msgspec.field(name="run")
    version: Version
    outcome: FleetOutcome = ""
    by: Annotated[str, Meta(max_length=128)] = ""
    """The member that refused the version; empty: the version was not refused by one member."""
    why: Annotated[str, Meta(max_length=1024)] = ""


class SyncState(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's state in a sync; complete, and sent with each beat."""

    name: Word
    side: Side
    epoch: Annotated[str, Meta(max_length=128)] = msgspec.field(default="", name="run")
    """Member id of the publishers' rank 0, which is another one after each restart. For a subscriber, the epoch of its
    version."""
    rank: Count = 0
    world_size: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    layout: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""
    """Digest of its layout; empty: not known yet."""
    version: Version = -1
    state: SyncStanding = "idle"
    nbytes: Count = 0
    path: Annotated[str, Meta(max_length=1024)] = ""
    """Sources and transports of its version."""
    took_s: Annotated[float, Meta(ge=0)] = 0.0
    """From the beginning of its last publication or update to its end."""
    pause_s: Annotated[float, Meta(ge=0)] = 0.0
    """Of it: the time in which an engine could not serve."""
    prepared: Version = -1
    """The version that a subscriber has staged for a decision of the fleet; -1: none."""
    decision: FleetDecision | None = None
    """The newest decision that this rank knows. A hub that lost its memory learns it from here."""
    grant_epoch: Count = 0
    """See `HoldingState`."""

    @property
    def fleet(self) -> str:
        """Return for people which version it has prepared, and the newest decision; empty: there is none."""
        parts = [f"prepared {self.prepared}"] if self.prepared >= 0 else []
        decision = self.decision
        if decision is not None:
            by = f" by {decision.by[:8]}" if decision.by else ""
            why = f"{by}: {decision.why}" if decision.why else by
            parts.append(f"{decision.outcome} {decision.version}{why}")
        return ", ".join(parts)


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's order that no reader is sent to a member any more."""

    by: Annotated[str, Meta(max_length=1100)] = ""
    """`Caller.name` of the operator. Whoever sends an order need not fill it."""
    reason: Annotated[str, Meta(max_length=256)] = ""


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a verb that failed in a member's process."""

    age_s: Annotated[float, Meta(ge=0)]
    verb: Annotated[str, Meta(max_length=64)]
    model: Annotated[str, Meta(max_length=256)] = ""
    """Of the model or the sync; empty: it has no name."""
    error: Annotated[str, Meta(max_length=64)]
    """Class of the error."""
    message: Annotated[str, Meta(max_length=1024)]
    blame: Annotated[str, Meta(max_length=32)]
    hint: Annotated[str, Meta(max_length=512)] = ""


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat, which renews a member's lease and lists everything that it holds."""

    holdings: Annotated[tuple[HoldingState, ...], Meta(max_length=1024)] = ()
    syncs: Annotated[tuple[SyncState, ...], Meta(max_length=1024)] = ()
    failures: Annotated[tuple[FailureReport, ...], Meta(max_length=4)] = ()
    """The last ones of the member's process."""
    drain: Drain | None = None
    """Of the hub's last answer: a hub that has lost its memory takes it over."""
    boot: Boot | None = None
    """The start of the member's process, without its phases. None: it has loaded nothing."""


class BeatReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The hub's answer to a heartbeat."""

    drain: Drain | None = None
    """In force for this member."""


class UpstreamsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A member's first or repeated request for upstreams of a key."""

    member: MemberId
    holding: HoldingState
    can_read_storage: bool = False
    source: Annotated[str, Meta(max_length=128)] = ""
    """With a holding of no chunks: only this member, whose memory is to be used itself."""
    claim: bool = False
    """Assign chunks of storage too, as a `ClaimRequest` does: a member that starts sends one request instead of two. It
    can read storage then."""


class Upstream(msgspec.Struct, frozen=True, kw_only=True):
    """A member to read from, with a grant for it."""

    member: MemberId
    host: Word
    doors: PeerUrls
    device: str
    state: State
    num_have: Count
    grant: bytes
    """For this reader, this key and this source, once; see `grants`."""
    certificate: Certificate = ""


class ClaimReply(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks to read from storage, the member's alone while it lives; none: see `why`, and repeat the request later."""

    ranges: Ranges = ()
    ask_again_s: float = 0.05
    why: str = ""


class UpstreamsReply(msgspec.Struct, frozen=True, kw_only=True):
    """Members to read from, in order of preference: the first is the parent in the relay."""

    upstreams: tuple[Upstream, ...] = ()
    orders: Annotated[tuple[tuple[Count, ...], ...], Meta(max_length=NUM_TREES)] = ()
    """With two trees of upstreams: of each, those to read its chunks from, as positions in `upstreams`, the parent
    first. Chunk c is of tree c % 2. Empty: one order for all chunks, that of `upstreams`."""
    is_placed: bool = True
    """False: they are any holders, until the relay has a place for the member; it must not report one as its parent."""
    ask_again_s: float = 1.0
    reader_silent_s: float = -1.0
    """Smallest `HoldingState.silent_s` of the other members that read storage; -1: no other member reads."""
    claim: ClaimReply | None = None
    """Chunks to read from storage; None: send a `ClaimRequest`. The request asked for none, too many members claimed at
    that moment, or the hub is older than 2.5."""


class ClaimRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A member's request for chunks to read from storage.

    `holding.claims` lists all assigned chunks that it still reads: the others, if not in `holding.have`, become free.
    So a request whose answer was lost may be sent again. A member sends one at a time for each key.
    """

    member: MemberId
    holding: HoldingState
    ask: bool = True
    """False: it only returns chunks."""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """A signed statement of wrong digests, from a reader of an earlier release. The hub ignores it."""

    epoch: Count
    signature: Annotated[bytes, Meta(max_length=64)]
    leaf_bytes: Count
    spans: bytes
    at: bytes
    said: bytes
    table: bytes
    leaves: bytes


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's report that it could not use a source.

    The reader gets others at once. All readers do once several callers complain, unless the fault is wrong bytes.
    """

    member: MemberId
    """The complaining member."""
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


class DecideRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A proposal for the decision on a version with a two-phase commit. The first proposal stands."""

    member: MemberId
    name: Word
    decision: FleetDecision
    """`committed` may be proposed by the publishers' rank 0 alone; an empty outcome only asks."""


class DecideReply(msgspec.Struct, frozen=True, kw_only=True):
    """The decision that stands."""

    decision: FleetDecision | None = None
    """None: there is none yet."""
    is_past: bool = False
    """Whether a later version was decided, and nothing is known of this one."""


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
    """In force: its holdings are then shown as `draining`."""
    boot: str = ""
    """Its start: `starting: move`, `ready`, `failed: commit`; empty: it has loaded nothing. """


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A conversion as `status` shows it; an ended one for an hour."""

    job: MemberId
    age_s: float
    silent_s: float
    """Since its last report. A running conversion reports once a second: one that is silent for long may be gone."""
    state: JobState


class FleetFailure(FailureReport, frozen=True, kw_only=True):
    """A failure as `status` shows it, for an hour, also if its member has left."""

    member: str
    name: str
    host: str


class Status(Readable, msgspec.Struct, frozen=True, kw_only=True):
    """The fleet, or one model of it."""

    members: tuple[MemberStatus, ...] = ()
    jobs: tuple[JobStatus, ...] = ()
    """Conversions that report to the hub, the newest first."""
    failures: tuple[FleetFailure, ...] = ()
    """The newest first."""
    may_drain: bool = False
    """Whether the caller is an operator, who may drain members."""

    def summary(self) -> str:
        """Return the members, models, syncs, conversions and failures in a few lines."""
        return summary_of(self.to_dict())


class Replica(Boot, frozen=True, kw_only=True):
    """The start of a member's process, as its own server shows it."""

    member: str
    name: str
    host: str
    silent_s: float = 0.0
    """Always 0. Hubs of an earlier release showed the seconds since the last beat."""
    has_left: bool = False
    """Always false. Hubs of an earlier release showed members that had left."""


class WhyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A question about a model: for all fetching members, for one member, or for an identity that no member has yet."""

    model: Word
    member: MemberId | None = None
    identity: Identity | None = None


class Why(Readable, msgspec.Struct, frozen=True, kw_only=True):
    """Reasons why a member does or does not read a model from peers: one line for each holder, and the differences."""

    lines: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return the lines as one text."""
        return "\n".join(self.lines)


MEMBER_PREFIX = "penstock:"
"""Before a member's id in the `uri` of an error."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is not 2xx, of the hub and of members."""

    error: str
    hint: str = ""
    alternatives: tuple[MemberId, ...] = ()
    """Of a refusal: other members that may accept."""
    kind: str | msgspec.UnsetType = msgspec.UNSET
    """Name of the error's class, where the status alone does not say it."""


class MemberFault(Fault, frozen=True, kw_only=True):
    """A fault about another member than the one that answers. Readers that know only `Fault` ignore the name."""

    member: MemberId | msgspec.UnsetType = msgspec.UNSET


# Messages between two members, in msgpack.


class HoldingMap(msgspec.Struct, frozen=True, kw_only=True):
    """The map of a holding: descriptors of its regions, and the position of each tensor in them."""

    key: Key
    generation: Count
    leaf_bytes: Count
    chunk_bytes: Count
    num_chunks: Count
    regions: tuple[dict[str, bytes], ...]
    """Per region: transport name -> encoded `Descriptor`."""
    row_region: bytes
    """int32, little endian, one for each row of the layout; -1 for a row of no bytes."""
    row_offset: bytes
    """int64, little endian: where the row starts in its region."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's request for a lease, with its grant."""

    member: MemberId
    key: Key
    grant: bytes
    attach: bool = False
    """To use the memory itself instead of reading it; it stays for as long, and does not count as a reader."""
    protocol: ProtocolVersion = PROTOCOL


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to read until it is released, or not used for `ttl_s`."""

    lease: Key
    ttl_s: float
    max_bytes_per_s: Count = 0
    """The share of the source's cap this reader keeps to; 0: no cap."""
    protocol: ProtocolVersion = PROTOCOL


class LogReply(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks that the holder got since `after`, in that order."""

    generation: Count
    serial: Count
    """Value of `after` in the next request."""
    state: LogState
    chunks: bytes = b""
    """uint32, little endian."""
    leaves: bytes = b""
    """uint64, little endian: the leaf digests of those chunks, chunk after chunk."""
    max_bytes_per_s: Count = 0
    """See `Lease`: the share now, which shrinks and grows with the number of readers."""
    epoch: Count = 0
    signature: bytes = b""
    """Unused, like `epoch`. Holders of an earlier release sign the digests."""


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A member's request for a session, with its grant."""

    member: MemberId
    key: Key
    grant: bytes
    protocol: ProtocolVersion = PROTOCOL


class MemberSession(msgspec.Struct, frozen=True, kw_only=True):
    """The right to send requests, until the member is silent for `ttl_s`."""

    session: Key
    ttl_s: float
    protocol: ProtocolVersion = PROTOCOL


def prepare(*kinds: Any) -> None:
    """Let msgspec prepare these types now."""
    # It crashes if two threads decode a type for the first time at the same moment (0.21).
    for kind in kinds:
        msgspec.msgpack.Decoder(kind)


def structs_among(values: Iterable[object]) -> list[type[msgspec.Struct]]:
    """Return the struct types among the values of a module."""
    return [value for value in values if isinstance(value, type) and issubclass(value, msgspec.Struct)]


# All of this module, once, before there are threads.
prepare(*structs_among(list(globals().values())))
