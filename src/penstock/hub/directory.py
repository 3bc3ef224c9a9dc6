"""The hub's logic: live members, the chunks that they hold, claims on storage, and upstreams.

In: the messages of members. Out: their answers. All state is in a `Store`, soft, and told anew by the members' beats;
several directories on one store act as one. Weight bytes never come here.
Not here: HTTP and who may ask (`app`), relays (`plan.relay`), pieces (`claims`), words for people (`explain`).
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable

import msgspec

from penstock.errors import HubUnavailable, PermissionDenied, PlanError, SourceBusy, UnknownMember
from penstock.hub import explain, sync_directory
from penstock.hub.address import parse_peer_url
from penstock.hub.auth import TOKEN_CALLER, Caller
from penstock.hub.claims import PROGRESS_CHECK_S, Claims, assign_piece, check_state, note_progress, update_table
from penstock.hub.grants import GrantSigner
from penstock.hub.messages import (
    Beat,
    ClaimReply,
    ClaimRequest,
    Complaint,
    Hello,
    HoldingState,
    Ranges,
    Status,
    Upstream,
    UpstreamsReply,
    UpstreamsRequest,
    Welcome,
    Why,
    WhyRequest,
)
from penstock.hub.proof import proof_fault
from penstock.hub.rate import RateLimit
from penstock.hub.snapshot import (
    COMPLAINT_DECODER,
    HOLDING_DECODER,
    MEMBER_DECODER,
    ComplaintEntry,
    HoldingEntry,
    HubSnapshot,
    MemberEntry,
    SnapshotCache,
    SnapshotReader,
    keys_of,
    record_key,
    status,
)
from penstock.hub.store import ABSENT, Entry, Store
from penstock.hub.sync_messages import SyncReply, SyncRequest

COMPLAINT_TTL_S = 30.0
"""A holder that could not be read is tried again after this."""
ANNOUNCE_S = 1.0
"""Over a beat: members that found the hub away look again within half of this."""
WRONG_BYTES_TTL_S = 600.0
"""Wrong bytes are a fault of memory or of a link: not soon over."""
REFUSED_TTL_S = 3.0
"""A holder that does not know a new hub's grants does after its next beat."""
COMPLAINTS_PER_S, COMPLAINTS_AT_ONCE = 20.0, 2_000
"""Of one caller: 1,000 members of one token that lose the same two holders complain within a second; no more is honest
for long. A complaint is kept for up to 600 s in some 300 bytes, so one caller has the hub keep at most 4 MB."""
PROOFS_PER_S, PROOFS_AT_ONCE = 1.0, 10
"""Of one caller: the largest takes a hub some 20 ms. The first that holds is enough for all."""
_GONE_TTL_S = 60.0
"""A member that left cannot come back by a request of its own that was on its way: a client gives a question up after
10 s (`client.TIMEOUT_S`), and the hub takes at most 20 s for a body (`hub.BODY_S`). Its id is the digest of a secret
that no other process has, so nobody else can use it later."""
_CLAIMS_TTL_S = 86400.0
"""Since anybody claimed: longer than a piece takes from any storage."""
_ATTEMPTS = 64
_MAX_READINGS = 1024
_CLAIMS = msgspec.msgpack.Decoder(Claims)
_encode = msgspec.msgpack.encode
audit = logging.getLogger("penstock.audit")


class Directory:
    """See the module.

    Args:
        store: where the state is.
        fresh: nobody can have been a member before, so claims are given at once; else a beat's time is left for members
            to announce what they have.
        beat_s: how often members are to beat.
        ttl_s: a member silent for this long is gone.
        clock: seconds, the same for all directories on the store; None: the store's. The time of day will not do: it
            steps, and replicas on several hosts differ.
        timer: monotonic seconds of this process.
        seed: 32 bytes that grants are signed with; None: the first directory on the store draws them.
        look_share: at most this part of the time goes into costly looks at one key; between them the last one answers.

    Order: every method from any thread.
    """

    def __init__(
        self,
        store: Store,
        *,
        fresh: bool = False,
        beat_s: float = 2.0,
        ttl_s: float = 10.0,
        clock: Callable[[], float] | None = None,
        timer: Callable[[], float] = time.perf_counter,
        seed: bytes | None = None,
        look_share: float = 0.1,
    ) -> None:
        self.store = store
        self.beat_s = beat_s
        self.ttl_s = ttl_s
        self.counts: Counter[str] = Counter()
        """Events since this directory was made: grants, claimed_chunks, complaints, proofs, hellos, leaves."""
        self._complaints = RateLimit(COMPLAINTS_PER_S, COMPLAINTS_AT_ONCE, clock=timer)
        self._proofs = RateLimit(PROOFS_PER_S, PROOFS_AT_ONCE, clock=timer)
        self._fresh = fresh
        self._marked = float("-inf")
        self._noted: dict[str, float] = {}
        self._clock = clock or store.now
        self._timer = timer
        self._look_share = look_share
        self._lock = threading.Lock()
        self._readings: dict[str, SnapshotCache] = {}
        self._has_own_seed, self._seed = seed is not None, seed or os.urandom(32)
        self._signer = None if seed is None else GrantSigner(seed)

    # Members.

    def begin(self) -> None:
        """Keep the hub's own life marked in the store; called once a beat, by a server or by what members say.

        Where there is no mark (a new hub, a store that lost its memory) nothing is claimed until members had the time
        to say what they have.
        """
        ttl_s = 3 * self.beat_s
        self._marked = self._timer()
        is_fresh, self._fresh = self._fresh, False
        if not self.store.write("hub/life", b"1", ttl_s=ttl_s, expected=ABSENT):
            self.store.write("hub/life", b"1", ttl_s=ttl_s)
            return
        self._noted = {}
        if not is_fresh:
            self.store.write("hub/quiet", b"1", ttl_s=max(1.5 * self.beat_s, self.beat_s + ANNOUNCE_S))

    def hello(self, hello: Hello, caller: Caller | None = None) -> Welcome:
        """Register a process life, or confirm that it still lives.

        Raises:
            PermissionDenied: the id is another process's, or of one that left.
            PlanError: a door's address cannot be one.
        """
        for door in hello.doors:
            if parse_peer_url(door) is None:
                raise PlanError(f"{door!r} is no address of a door", hint="unix:///path, or http(s)://host:port")
        self._mark_life()
        name, now = f"member/{hello.member}", self._clock()
        entry = self.store.read(name)
        known = None if entry is None else MEMBER_DECODER.decode(entry.value)
        if self.store.read(f"gone/{hello.member}") is not None or (known is not None and known.hello != hello):
            raise PermissionDenied(f"member {hello.member} is another life's", hint="a new process takes a new id")
        if known is None:
            self.counts["hellos"] += 1
            caller = caller or Caller()
            by = caller.name, caller.certificate
            self.store.write(name, _encode(MemberEntry(hello, now, now, (), *by)), ttl_s=self.ttl_s, expected=ABSENT)
        signer = self._grants(anew=True)
        beat_s = self.beat_s * random.uniform(0.75, 1.0)
        return Welcome(ttl_s=self.ttl_s, beat_s=beat_s, grant_key=signer.public_key)

    def check_certificate(self, member: str, certificate: str) -> None:
        """Check that a member is spoken for by the certificate that it said hello with; nothing if it is not known.

        Raises:
            PermissionDenied: the certificate has other names.
        """
        entry = self.store.read(f"member/{member}")
        if entry is None:
            return
        theirs = MEMBER_DECODER.decode(entry.value).certificate
        if theirs != certificate:
            audit.warning("event=impostor member=%s certificate=%r of=%r", member, certificate, theirs)
            raise PermissionDenied(f"member {member} is another certificate's", hint="a new process takes a new id")

    def beat(self, member: str, beat: Beat) -> None:
        """Renew a member's lease; keys that the beat does not name are no longer held.

        Raises:
            UnknownMember: it was silent for too long, left, or the hub is new.
            PlanError: a holding contradicts itself.
        """
        for holding in beat.holdings:
            check_state(holding)
        self._mark_life()
        entry, known = self._known(member)
        now = self._clock()
        keys = tuple(holding.key for holding in beat.holdings)
        kept = tuple(key for key in known.keys if key not in keys and self._still_asked(key, member, now))
        for holding in beat.holdings:
            self._hold(known, holding)
        sync_directory.record_states(
            self.store, known.hello, known.since, now, self.ttl_s, beat.syncs, certificate=known.certificate
        )
        if not self._renew(member, entry, msgspec.structs.replace(known, seen=now, keys=keys + kept)):
            self._renew(member, *self._seen(member, now, keys))

    def leave(self, member: str) -> None:
        """Remove a member for good and free its claims; do nothing if it is not known."""
        entry = self.store.read(f"member/{member}")
        self.store.write(f"gone/{member}", b"1", ttl_s=_GONE_TTL_S)
        if entry is None:
            return
        self.counts["leaves"] += 1
        self._remove(member, MEMBER_DECODER.decode(entry.value))

    # Keys.

    def upstreams(self, request: UpstreamsRequest) -> UpstreamsReply:
        """Return the upstreams to read chunks from, parent first, with a grant for each.

        Of no chunks: the member does not know the line yet, and is told whom it may ask; it is not entered.

        Raises:
            UnknownMember, PlanError: see `beat`.
        """
        holding = request.holding
        check_state(holding)  # whoever may ask for this model's identity is given grants for its key
        hello = self._known(request.member)[1].hello
        if holding.num_chunks:
            self._ask(request.member, holding, reads_storage=request.can_read_storage)
        view = self._view(holding.key)
        is_placed = holding.num_chunks > 0 and request.member in view.held
        names: tuple[str, ...] = ()
        if is_placed:
            names = view.relay(holding.num_chunks).upstreams(request.member)
        elif request.source and not holding.num_chunks:
            names = (request.source,) if request.source in view.held else ()
        elif view.held:
            # Asks what the line is, or came since the last look: whom it may ask, until it has its place.
            names = view.known_to(hello, holding)
        signer = self._grants()
        upstreams = []
        for name in names:
            held = view.held[name]
            grant = signer.sign(key=holding.key, reader=request.member, source=name, epoch=held.holding.grant_epoch)
            upstreams.append(
                Upstream(
                    member=name,
                    host=held.hello.host,
                    doors=held.hello.doors,
                    device=held.holding.device,
                    state=held.holding.state,
                    num_have=held.num_have,
                    grant=grant,
                    certificate=held.certificate,
                )
            )
        self.counts["grants"] += len(upstreams)
        # A large fleet asks less often, so that asking costs the hub the same; one that has nobody yet soon asks again.
        least_s = 1.0 if upstreams and is_placed else 0.2
        return UpstreamsReply(
            upstreams=tuple(upstreams),
            ask_again_s=_pause(least_s, len(view.held)),
            reader_silent_s=view.reader_silent_s(besides=request.member),
        )

    def claim(self, request: ClaimRequest) -> ClaimReply:
        """Assign chunks that the member alone reads from storage, and take back those that it no longer reads.

        Raises:
            UnknownMember, PlanError: see `beat`.
            HubUnavailable: too many others claimed at the same moment.
        """
        holding = request.holding
        self._mark_life(check_store=True)
        self._ask(request.member, holding, reads_storage=request.ask)
        quiet = self.store.read("hub/quiet") is not None
        name = f"claim/{holding.key}/{holding.num_chunks}"
        for attempt in range(_ATTEMPTS):
            entry = self.store.read(name)
            before = Claims() if entry is None else _CLAIMS.decode(entry.value)
            view = self._view(holding.key, again=attempt > 0)
            after, given = self._claimed(request, before, view, give_more=request.ask and not quiet)
            version = ABSENT if entry is None else entry.version
            if after == before or self.store.write(
                name, _encode(after) if after.members else None, ttl_s=_CLAIMS_TTL_S, expected=version
            ):
                self.counts["claimed_chunks"] += sum(stop - start for start, stop in given)
                return self._claim_reply(request, view, given, quiet=quiet)
            time.sleep(random.uniform(0, 0.002))
        raise HubUnavailable("too many members claim chunks of one key at the same moment", hint="claim again")

    def complain(self, complaint: Complaint, caller: Caller | None = None) -> None:
        """Note that a reader could not use a source, which becomes the last choice for that reader.

        It becomes the last choice for all once `plan.relay.DISTRUST` callers say so, each counted once by what it
        authenticated with: one token speaks for any number of members. Wrong bytes are another thing: without a proof
        they move the reader alone, with one everybody at once. A reader that found wrong bytes says so at the
        holder's door as well; the holder digests the chunk itself, and gives the holding up for all if it is wrong.

        Raises:
            UnknownMember: who complains is not a member.
            PermissionDenied: the caller may not ask about the model that is held there.
            SourceBusy: the caller complains too often.
        """
        caller = caller or Caller()
        self._known(complaint.member)
        entry = self.store.read(f"hold/{complaint.key}/{complaint.of}")
        if entry is None:
            return  # it holds nothing of the key by now: nobody is sent there
        held = HOLDING_DECODER.decode(entry.value)
        model = held.holding.identity.model
        if not caller.may_ask((model,)):
            raise PermissionDenied(
                f"this token is not for {model}", hint="only readers of a model complain of its holders"
            )
        if not self._complaints.allow(caller.name):
            raise SourceBusy("too many complaints at once", hint="the earlier ones count")
        self.counts["complaints"] += 1
        ttl_s = {"wrong bytes": WRONG_BYTES_TTL_S, "refused": REFUSED_TTL_S}.get(complaint.fault, COMPLAINT_TTL_S)
        name = f"complaint/{complaint.key}/{complaint.of}~{complaint.member}"
        before = self.store.read(name)
        is_proven = self._is_proven(complaint, held, caller)
        noted = ComplaintEntry(msgspec.structs.replace(complaint, proof=None), caller.name, is_proven)
        if before is not None and _weight(noted) < _weight(COMPLAINT_DECODER.decode(before.value)):
            return  # what it said before weighs more, and lasts longer
        self.store.write(name, _encode(noted), ttl_s=ttl_s)

    def _is_proven(self, complaint: Complaint, held: HoldingEntry, caller: Caller) -> bool:
        """Return True if a complaint has a valid proof; with an invalid one it counts like any other."""
        if complaint.fault != "wrong bytes" or complaint.proof is None:
            return False
        fault = "too many proofs of one caller"
        if self._proofs.allow(caller.name):
            fault = proof_fault(complaint.proof, complaint.of, held.hello.digest_key, held.holding)
        if fault:
            audit.warning("event=unproven member=%s of=%s why=%r", complaint.member, complaint.of, fault)
            return False
        self.counts["proofs"] += 1
        audit.warning("event=proven member=%s of=%s key=%s", complaint.member, complaint.of, complaint.key)
        return True

    def expel(self, callers: Collection[str]) -> int:
        """Remove the members of callers that are no longer known, as if they had fallen silent; how many there were.

        Args:
            callers: names of all tokens that are good now.
        """
        count = 0
        for member, entry in self.store.scan("member/").items():
            known = MEMBER_DECODER.decode(entry.value)
            if known.caller.startswith(TOKEN_CALLER) and known.caller not in callers:
                audit.warning("event=expelled member=%s caller=%s", member, known.caller)
                self._remove(member, known)
                count += 1
        return count

    def sync(self, request: SyncRequest) -> SyncReply:
        """Return the members of a sync, with the grants requested. Raises UnknownMember if the caller is not known."""
        self._known(request.member)
        self.counts["grants"] += len(request.grants)
        return sync_directory.list_members(self.store, request, self._grants())

    # For people.

    def status(self, model: str | None = None) -> Status:
        """Return the members and what they hold; of one model, those that have or fetch it."""
        return status(self.store, model, self._clock())

    def why(self, request: WhyRequest) -> Why:
        """Explain the upstreams of one member, of all fetching members, or of an identity."""
        views = {key: self._view(key, again=True) for key in keys_of(self.store, request.model)}
        return Why(lines=explain.explain_lines(request, {key: view for key, view in views.items() if view.held}))

    # Inside.

    def _remove(self, member: str, known: MemberEntry) -> None:
        """Remove a member, so that no reader is sent to it."""
        self.store.write(f"member/{member}", None)
        for key in known.keys:
            self.store.write(f"hold/{key}/{member}", None)

    def _mark_life(self, *, check_store: bool = False) -> None:
        """Mark it once a beat; `check_store`: also if the store has lost the mark since."""
        if self._timer() - self._marked >= self.beat_s or (check_store and self.store.read("hub/life") is None):
            self.begin()

    def _grants(self, *, anew: bool = False) -> GrantSigner:
        """Return the signer, of a seed that all directories on the store share.

        Args:
            anew: compare with the store, which may have lost its memory and been given another replica's seed since.
        """
        if self._signer is None or (anew and not self._has_own_seed):
            entry = self.store.read("hub/seed")
            if entry is None:
                self.store.write("hub/seed", self._seed, expected=ABSENT)
                entry = self.store.read("hub/seed")
            if entry is None:
                raise HubUnavailable("the store does not keep what is written")
            if self._signer is None or entry.value != self._seed:
                self._seed, self._signer = entry.value, GrantSigner(entry.value)
        return self._signer

    def _known(self, member: str) -> tuple[Entry, MemberEntry]:
        entry = self.store.read(f"member/{member}")
        if entry is None:
            raise UnknownMember(f"member {member} is not known to this hub", hint="say hello again")
        return entry, MEMBER_DECODER.decode(entry.value)

    def _renew(self, member: str, entry: Entry, known: MemberEntry) -> bool:
        return self.store.write(f"member/{member}", _encode(known), ttl_s=self.ttl_s, expected=entry.version)

    def _seen(self, member: str, now: float, keys: Iterable[str]) -> tuple[Entry, MemberEntry]:
        entry, known = self._known(member)
        merged = tuple(dict.fromkeys([*keys, *known.keys]))
        return entry, msgspec.structs.replace(known, seen=now, keys=merged)

    def _still_asked(self, key: str, member: str, now: float) -> bool:
        """Return True if a key that a beat left out was requested after the beat was made; else drop it."""
        name = f"hold/{key}/{member}"
        entry = self.store.read(name)
        if entry is not None and now - HOLDING_DECODER.decode(entry.value).asked < self.beat_s:
            return True
        self.store.write(name, None)
        return False

    def _hold(self, known: MemberEntry, holding: HoldingState, *, reads_storage: bool | None = None) -> None:
        name = f"hold/{holding.key}/{known.hello.member}"
        now = self._clock()
        num_have = sum(stop - start for start, stop in holding.have)
        asked = now if reads_storage is not None else 0.0
        if reads_storage is None:
            entry = self.store.read(name)
            if entry is not None:
                before = HOLDING_DECODER.decode(entry.value)
                asked, reads_storage = before.asked, before.reads_storage
        held = HoldingEntry(known.hello, known.since, holding, num_have, asked, bool(reads_storage), known.certificate)
        self.store.write(name, _encode(held), ttl_s=self.ttl_s)
        local = self._timer()
        if local - self._noted.get(holding.key, float("-inf")) >= self.ttl_s:
            record_key(self.store, holding, ttl_s=3 * self.ttl_s)
            self._noted = {key: when for key, when in self._noted.items() if local - when < self.ttl_s}
            self._noted[holding.key] = local

    def _ask(self, member: str, holding: HoldingState, *, reads_storage: bool) -> None:
        """Record the state that a request reports, and that its member lives."""
        check_state(holding)
        for _ in range(_ATTEMPTS):
            entry, known = self._known(member)
            now = self._clock()
            if holding.key in known.keys and now - known.seen < self.beat_s:
                break
            keys = tuple(dict.fromkeys((*known.keys, holding.key)))
            if self._renew(member, entry, msgspec.structs.replace(known, seen=now, keys=keys)):
                break
        self._hold(known, holding, reads_storage=reads_storage)

    def _claimed(
        self, request: ClaimRequest, before: Claims, view: HubSnapshot, *, give_more: bool
    ) -> tuple[Claims, Ranges]:
        """Return the table of claims after a request, and the chunks assigned."""
        holding, now = request.holding, self._clock()
        absent = set(before.members).difference(view.held)
        gone = {name for name in absent if self.store.read(f"hold/{holding.key}/{name}") is None}
        if gone:
            view = self._view(holding.key, again=True)
        told = {name: view.held[name].holding for name in view.reading.difference(gone, (request.member,))}
        after = update_table(before, request, gone=gone, told=told, now=now)
        if now - after.looked > PROGRESS_CHECK_S:
            silent_s = {name: held.silent_s for name, held in told.items() if held.silent_s >= 0}
            after = note_progress(
                after, {name: held.num_have for name, held in view.held.items()}, now, silent_s=silent_s
            )
        if not give_more:
            return after, ()
        return assign_piece(
            after,
            request.member,
            holding,
            had=view.had(request.member, holding.num_chunks),
            unheard=view.out_of_reach(request.member),
            num_sharing=view.num_sharing,
            now=now,
        )

    def _claim_reply(self, request: ClaimRequest, view: HubSnapshot, given: Ranges, *, quiet: bool) -> ClaimReply:
        if given:
            return ClaimReply(ranges=given)
        if quiet:
            return ClaimReply(
                ask_again_s=self.beat_s / 4, why="the hub is new: members have a beat to say what they have"
            )
        if not request.ask:
            return ClaimReply(ask_again_s=self.beat_s)
        pause_s = _pause(0.2, view.num_sharing)
        return ClaimReply(ask_again_s=pause_s, why="others have, or read, every chunk that is missing")

    def _view(self, key: str, *, again: bool = False) -> HubSnapshot:
        """Return a snapshot of a key, perhaps a moment old; `again`: read it now."""
        with self._lock:
            cache = self._readings.pop(key, None)
            if cache is None:
                cache = SnapshotCache(SnapshotReader(self.store, key))
            self._readings[key] = cache
            while len(self._readings) > _MAX_READINGS:
                del self._readings[next(iter(self._readings))]
        return cache.at(self._timer, self._look_share, again=again)


def _weight(complained: ComplaintEntry) -> int:
    """Return the weight of a complaint: of one reader's complaints the graver one is kept."""
    return 2 if complained.is_proven else int(complained.complaint.fault == "wrong bytes")


def _pause(least_s: float, num_asking: int) -> float:
    """Return the pause before the next request: at most 100 requests a second from all members, with jitter."""
    return min(5.0, max(least_s, num_asking / 100)) * random.uniform(0.75, 1.25)
