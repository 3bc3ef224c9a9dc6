"""The hub's logic: live members, the chunks that they hold, claims on storage, and upstreams.

In: the messages of members. Out: their answers. All state is in a `Store`, soft, and reported again by every beat;
several directories on one store act as one. Weight bytes never come here.
Not here: HTTP and authentication (`app`), relays (`plan.relay`), pieces (`claims`), records of complaints
(`complaints`), of conversions (`conversions`) and of failed calls (`failures`), text for people (`explain`).
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable

import msgspec

from penstock.errors import HubUnavailable, PermissionDenied, PlanError, SourceBusy, UnknownMember
from penstock.hub.address import parse_peer_url
from penstock.hub.auth import TOKEN_CALLER, Caller
from penstock.hub.claims import PROGRESS_CHECK_S, Claims, assign_piece, check_state, note_progress, update_table
from penstock.hub.complaints import Complaints
from penstock.hub.conversions import record_job
from penstock.hub.explain import explain_lines
from penstock.hub.failures import record_failed_calls, record_lost
from penstock.hub.grants import GrantSigner
from penstock.hub.job_state import JobState
from penstock.hub.limits import CLAIMS_TTL_S, Capacity, Limits, remove_member
from penstock.hub.messages import (
    Beat,
    BeatReply,
    ClaimReply,
    ClaimRequest,
    DecideReply,
    DecideRequest,
    Drain,
    FaultReport,
    Hello,
    HoldingState,
    MemberStatus,
    Ranges,
    Status,
    SyncReply,
    SyncRequest,
    Upstream,
    UpstreamsReply,
    UpstreamsRequest,
    Welcome,
    Why,
    WhyRequest,
)
from penstock.hub.snapshot import (
    HOLDING_DECODER,
    MEMBER_DECODER,
    HoldingEntry,
    HubSnapshot,
    MemberEntry,
    SnapshotCache,
    SnapshotReader,
    by_rank,
    decide,
    decision_name,
    encode_state,
    keys_of,
    record_key,
    record_sync_states,
    status,
    sync_entries,
    sync_members,
)
from penstock.hub.store import ABSENT, Store, StoreEntry
from penstock.logs import log_named

# Added to a beat: members that could not reach the hub try again within half of this.
_ANNOUNCE_S = 1.0
# A late request must not bring back a member that left: a client gives a request up after 10 s (`client.TIMEOUT_S`),
# and the hub takes at most 20 s for a body (`app.BODY_S`). The id is the digest of a secret of one process, so no other
# process can use it later.
_GONE_TTL_S = 60.0
# Of a fleet of this size or more, newcomers poll after 0.5 s: by then a snapshot of 1,000 members has been renewed.
_NEWCOMERS = 50
# Those with a place poll after 2 s: a second request of each within the second in which 1,000 members start was a third
# of all requests then.
_PLACED_NEWCOMERS = 200
# Of compare-and-set: as many directories on one store would have to lose in a row.
_ATTEMPTS = 64
# The same for the claim in a request for upstreams, whose answer must not wait: the member claims again by itself.
_FEW_ATTEMPTS = 4
# Locks for the tables of claims: a key has one of them, so that claims of few keys wait for each other.
_NUM_CLAIMING = 64
# Keys whose last snapshot stays, so that unchanged entries are not decoded again.
_MAX_READINGS = 1024
_CLAIMS = msgspec.msgpack.Decoder(Claims)
_encode = msgspec.msgpack.encode
audit = log_named("penstock.audit")


class Directory:
    """The hub's logic on one store: see the module.

    Args:
        store: holds the state.
        fresh: there were no members before, so chunks can be claimed at once; else members first have a beat's time to
            report the chunks that they have.
        beat_s: interval of members' beats.
        ttl_s: a member silent for this long is gone.
        clock: seconds, the same for all directories on the store; None: the store's. The time of day is no substitute:
            it steps, and replicas on several hosts differ.
        timer: monotonic seconds of this process.
        seed: 32 bytes that grants are signed with; None: the first directory on the store draws them.
        look_share: largest share of the time for costly snapshots of one key; between them the last one is used.
        capacity: the most that is kept of each kind; None: the default values.

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
        capacity: Capacity | None = None,
    ) -> None:
        self.store = store
        self.capacity = capacity or Capacity()
        self.beat_s = beat_s
        self.ttl_s = ttl_s
        # Events since this directory was made: grants, claimed_chunks, complaints, hellos, leaves.
        self.counts: Counter[str] = Counter()
        self._complaints = Complaints(store, self.counts, timer=timer)
        self._limits = Limits(store, self.capacity, ttl_s=ttl_s, timer=timer, look_share=look_share)
        self._fresh = fresh
        # When this directory last renewed the hub's mark, and last recorded each key, by `timer`.
        self._marked = float("-inf")
        self._noted: dict[str, float] = {}
        self._clock = clock or store.now
        self._timer = timer
        self._look_share = look_share
        self._lock = threading.Lock()
        self._claiming = tuple(threading.Lock() for _ in range(_NUM_CLAIMING))
        self._readings: dict[str, SnapshotCache] = {}
        self._has_own_seed = seed is not None
        self._seed = seed or os.urandom(32)
        self._signer = None if seed is None else GrantSigner(seed)

    # Members.

    def begin(self) -> None:
        """Renew the hub's life mark in the store; called once a beat, by a server or when a member reports.

        Without a mark (a new hub, a store that lost its memory) no chunk can be claimed until members had the time to
        report the chunks that they have.
        """
        # Three beats: a hub that misses one or two is still the same hub.
        ttl_s = 3 * self.beat_s
        self._limits.look()
        self._marked = self._timer()
        is_fresh, self._fresh = self._fresh, False
        if not self.store.write("hub/life", b"1", ttl_s=ttl_s, expected=ABSENT):
            self.store.write("hub/life", b"1", ttl_s=ttl_s)
            return
        # A store that lost the mark may have lost the keys of all models too.
        self._noted = {}
        if not is_fresh:
            quiet_s = max(1.5 * self.beat_s, self.beat_s + _ANNOUNCE_S)
            self.store.write("hub/quiet", b"1", ttl_s=quiet_s)
            # Until every member that lives has reported, or would be forgotten.
            self.store.write("hub/recent", b"1", ttl_s=quiet_s + self.ttl_s)

    def hello(self, hello: Hello, caller: Caller | None = None) -> Welcome:
        """Register a process life, or confirm that it still lives.

        Raises:
            PermissionDenied: the id is another process's, or of one that left.
            PlanError: an address of the member's server is not valid.
            SourceBusy: the caller has announced its share of members.
        """
        for url in hello.doors:
            if parse_peer_url(url) is None:
                raise PlanError(f"{url!r} is not a member's address", hint="unix:///path, or http(s)://host:port")
        self._mark_life()
        name, now = f"member/{hello.member}", self._clock()
        entry = self.store.read(name)
        known = None if entry is None else MEMBER_DECODER.decode(entry.value)
        if self.store.read(f"gone/{hello.member}") is not None or (known is not None and known.hello != hello):
            message = f"member {hello.member} belongs to another process, or has left"
            raise PermissionDenied(message, hint="a new process takes a new id")
        # An equal hello of a known life is a repeated request, whose answer was lost.
        if known is None:
            caller = caller or Caller()
            self._limits.admit(hello.member, caller.name)
            self.counts["hellos"] += 1
            by = caller.name, caller.certificate
            self.store.write(name, _encode(MemberEntry(hello, now, now, (), *by)), ttl_s=self.ttl_s, expected=ABSENT)
        signer = self._grants(anew=True)
        # Spread: members that started together would otherwise beat together, and queue at the hub every time.
        beat_s = self.beat_s * random.uniform(0.75, 1.0)
        return Welcome(ttl_s=self.ttl_s, beat_s=beat_s, grant_key=signer.public_key)

    def check_certificate(self, member: str, certificate: str) -> None:
        """Check that the caller shows the certificate that the member registered with; ignore an unknown member.

        Raises:
            PermissionDenied: the certificate has other names.
        """
        entry = self.store.read(f"member/{member}")
        if entry is None:
            return
        theirs = MEMBER_DECODER.decode(entry.value).certificate
        if theirs != certificate:
            audit.warning("event=impostor member=%s certificate=%r of=%r", member, certificate, theirs)
            message = f"member {member} registered with another certificate"
            raise PermissionDenied(message, hint="a new process takes a new id")

    def beat(self, member: str, beat: Beat, caller: Caller | None = None) -> BeatReply:
        """Renew a member's lease; keys that the beat does not name are no longer held. Return the order to drain it.

        Raises:
            UnknownMember: it was silent for too long, left, or the hub is new.
            PlanError: a holding contradicts itself.
            SourceBusy: its caller's members report more than the caller's share.
        """
        # All states are checked before any is stored: a refused beat changes nothing.
        for holding in beat.holdings:
            check_state(holding)
        self._mark_life()
        entry, known = self._known(member)
        boot = encode_state(beat.boot)
        nbytes = self._limits.admit(member, known.caller, beat)
        now = self._clock()
        # Only while this hub is new: later a beat may bring an order that has been undone since the last answer.
        is_lost = beat.drain is not None and known.drain is None and self.store.read("hub/quiet") is not None
        if beat.drain is not None and is_lost and self.store.read(f"undrained/{member}") is None:
            known = msgspec.structs.replace(known, drain=beat.drain)
            audit.info("event=drain_restored member=%s caller=%r", member, beat.drain.by)
        keys = tuple(holding.key for holding in beat.holdings)
        still_requested = tuple(
            key for key in known.keys if key not in keys and self._still_requested(key, member, now)
        )
        for holding in beat.holdings:
            self._hold(known, holding)
        record_sync_states(
            self.store, known.hello, known.since, now, self.ttl_s, beat.syncs, certificate=known.certificate
        )
        # A request of the same member may have changed the entry since it was read: then merge with that once more. If
        # the second try loses too, the entry has just been renewed, and the next beat brings the keys.
        after = msgspec.structs.replace(known, seen=now, keys=keys + still_requested, boot=boot, nbytes=nbytes)
        if not self._renew(member, entry, after):
            entry, latest = self._seen(member, now, keys)
            self._renew(member, entry, msgspec.structs.replace(latest, boot=boot, nbytes=nbytes))
        record_failed_calls(self.store, known.hello, beat.failures, now, caller, self.capacity.failing_members)
        return BeatReply(drain=known.drain)

    def drain(self, member: str, drain: Drain | None, caller: Caller) -> None:
        """Send no more readers to a member until it leaves, or with None send them again.

        Raises:
            UnknownMember: no such member.
            PermissionDenied: the caller may not access all models that the member holds.
            HubUnavailable: too many requests change the member at the same moment.
        """
        order = None if drain is None else Drain(by=caller.name, reason=drain.reason)
        for _ in range(_ATTEMPTS):
            entry, known = self._known(member)
            names = {key: f"hold/{key}/{member}" for key in known.keys}
            stored = {key: held for key, name in names.items() if (held := self.store.read(name)) is not None}
            holders = {key: HOLDING_DECODER.decode(held.value) for key, held in stored.items()}
            models = {holder.holding.identity.model for holder in holders.values()}
            if models and not any(caller.may_ask((model,)) for model in models):
                # As for a member that does not exist: this caller sees none of what it holds.
                raise _unknown(member)
            if not caller.may_ask(models):
                raise PermissionDenied(
                    f"this token is not for every model that member {member} holds", hint="use one for all of them"
                )
            # Also while this hub is new: a beat that was made before must not bring the order back.
            self.store.write(f"undrained/{member}", b"1" if drain is None else None, ttl_s=self.ttl_s)
            if self._renew(member, entry, msgspec.structs.replace(known, drain=order)):
                break
        else:
            raise HubUnavailable(f"member {member} is changed by too many requests at once", hint="try again")
        # At once, not with the next beat: a reader that asks now must not be sent there.
        for key, holder in holders.items():
            marked = msgspec.structs.replace(holder, is_drained=order is not None)
            self.store.write(names[key], _encode(marked), ttl_s=self.ttl_s, expected=stored[key].version)
        event, reason = ("undrain", "") if drain is None else ("drain", drain.reason)
        audit.warning("event=%s member=%s caller=%s reason=%r", event, member, caller.name, reason)

    def leave(self, member: str, caller: Caller | None = None) -> None:
        """Remove a member for good and free its claims; do nothing if it is not known."""
        entry = self.store.read(f"member/{member}")
        # Also for an unknown member: its hello may still be on its way.
        if entry is not None or self._limits.may_leave_unknown((caller or Caller()).name):
            self.store.write(f"gone/{member}", b"1", ttl_s=_GONE_TTL_S)
        if entry is None:
            return
        self.counts["leaves"] += 1
        known = MEMBER_DECODER.decode(entry.value)
        remove_member(self.store, member, known)
        self._limits.forget(member)

    # Keys.

    def upstreams(self, request: UpstreamsRequest, caller: Caller | None = None) -> UpstreamsReply:
        """Return the upstreams to read chunks from, parents first, with a grant for each.

        A request without chunks comes from a member that does not know the layout yet: it gets members to request it
        from, and is not registered as a holder. A request that also claims gets chunks to read from storage, unless
        too many members claim at that moment.

        Raises:
            UnknownMember, PlanError: see `beat`.
        """
        holding = request.holding
        # The key must belong to the identity: it is by the identity that the caller's right to the model was checked.
        check_state(holding)
        entry = None
        if holding.num_chunks:
            entry = self._record_request(request.member, holding, reads_storage=request.can_read_storage)
        hello = entry.hello if entry is not None else self._known(request.member)[1].hello
        view = self._view(holding.key, asks=entry)
        is_placed = holding.num_chunks > 0 and view.is_placed(request.member, holding.num_chunks)
        names: tuple[str, ...] = ()
        orders: tuple[tuple[str, ...], ...] = ()
        if is_placed:
            orders = view.orders(request.member, holding.num_chunks)
            names = by_rank(orders)
        elif request.source and not holding.num_chunks:
            names = (request.source,) if request.source in view.held and request.source not in view.drained else ()
        elif view.held:
            # It requests the layout, or came after the snapshot was made, whose relay is no ring: any holders will do
            # until it is placed.
            names = view.known_to(hello, holding)
        holders = {name: view.held[name] for name in names}
        grants = self._grants().sign(
            key=holding.key,
            reader=request.member,
            epochs={name: holder.holding.grant_epoch for name, holder in holders.items()},
            protocols={name: holder.hello.protocol for name, holder in holders.items()},
            caller=(caller or Caller()).name,
        )
        upstreams = tuple(
            Upstream(
                member=name,
                host=holder.hello.host,
                doors=holder.hello.doors,
                device=holder.holding.device,
                state=holder.holding.state,
                num_have=holder.num_have,
                grant=grants[name],
                certificate=holder.certificate,
            )
            for name, holder in holders.items()
        )
        self.counts["grants"] += len(upstreams)
        claim = None
        if request.claim and holding.num_chunks:
            self._mark_life(check_store=True)
            claim = self._assign(ClaimRequest(member=request.member, holding=holding), caller, attempts=_FEW_ATTEMPTS)
        # A large fleet polls less often, so that the hub's load stays the same. Members that start together, cold, poll
        # soon: each was told of those that came before it, and what the others read from storage comes from them alone.
        # One that is not placed yet polls soon in any fleet: it is in the next snapshot, and until then it reads from
        # holders that are named to other newcomers too. One that got a place at once reads from that meanwhile, and
        # asks a quarter of the pause later if there is nothing to read (`fetcher.run`).
        least_s = 1.0 if upstreams and is_placed and view.has_whole else 0.2
        num_asking = len(view.held)
        if not is_placed or request.member in view.newcomers:
            num_asking = min(num_asking, _PLACED_NEWCOMERS if is_placed else _NEWCOMERS)
        return UpstreamsReply(
            upstreams=upstreams,
            orders=tuple(tuple(names.index(name) for name in order) for order in orders) if len(orders) > 1 else (),
            is_placed=is_placed,
            ask_again_s=_pause(least_s, num_asking),
            reader_silent_s=view.reader_silent_s(besides=request.member),
            claim=claim,
        )

    def claim(self, request: ClaimRequest, caller: Caller | None = None) -> ClaimReply:
        """Assign chunks that the member alone reads from storage, and take back those that it no longer reads.

        Raises:
            UnknownMember, PlanError: see `beat`.
            HubUnavailable: too many members claimed at the same moment.
        """
        check_state(request.holding)
        self._mark_life(check_store=True)
        self._record_request(request.member, request.holding, reads_storage=request.ask)
        reply = self._assign(request, caller, attempts=_ATTEMPTS)
        if reply is None:
            raise HubUnavailable("too many members claim chunks of one key at the same moment", hint="claim again")
        return reply

    def _assign(self, request: ClaimRequest, caller: Caller | None, *, attempts: int) -> ClaimReply | None:
        """Change the table of claims for a recorded request; None: other directories were faster each time."""
        holding = request.holding
        quiet = self.store.read("hub/quiet") is not None
        name = f"claim/{holding.key}/{holding.num_chunks}"
        # Compare-and-set: another directory on the store may assign chunks of the same table at the same moment. The
        # threads of this one take turns: on Redis 40 of them raced for one table, and a claim took seconds.
        with self._claiming[hash(name) % len(self._claiming)]:
            for attempt in range(attempts):
                entry = self.store.read(name)
                view = self._view(holding.key, again=attempt > 0)
                version = ABSENT if entry is None else entry.version
                give_more = request.ask and not quiet
                # In a fleet that starts, most find every chunk claimed: looked at once for all that only ask.
                only_asks = give_more and not (holding.have or holding.claims or view.out_of_reach(request.member))
                if only_asks and view.is_all_claimed(version, besides=request.member):
                    return self._claim_reply(request, view, (), quiet=quiet)
                before = Claims() if entry is None else _CLAIMS.decode(entry.value)
                after, ranges = self._claimed(request, before, view, give_more=give_more)
                if only_asks and not ranges and after == before:
                    view.note_all_claimed(version, before.members)
                table = _encode(after) if after.members else b""
                if after == before or self.store.write(name, table or None, ttl_s=CLAIMS_TTL_S, expected=version):
                    self._limits.table(name, (caller or Caller()).name, len(table))
                    self.counts["claimed_chunks"] += sum(stop - start for start, stop in ranges)
                    return self._claim_reply(request, view, ranges, quiet=quiet)
                # Some milliseconds at random: the loser of one race would else meet the same winner again.
                time.sleep(random.uniform(0, 0.002))
        return None

    def complain(self, complaint: FaultReport, caller: Caller | None = None) -> None:
        """Record that a reader could not use a source, which becomes the last choice for that reader.

        It becomes the last choice for all readers once `DISTRUST` callers complain, each counted once by its
        credentials, since one token speaks for any number of members. Wrong bytes differ: only the
        complaining reader is moved. A reader that found wrong bytes also reports them to the holder, which digests the
        chunk itself, and withdraws the holding if it is damaged.

        Raises:
            UnknownMember: the complaining member is not known.
            PermissionDenied: the caller may not access the model that is held there.
            SourceBusy: the caller complains too often.
        """
        caller = caller or Caller()
        self._known(complaint.member)
        entry = self.store.read(f"hold/{complaint.key}/{complaint.of}")
        # It holds nothing of the key any more, so no reader is sent there.
        if entry is None:
            return
        model = HOLDING_DECODER.decode(entry.value).holding.identity.model
        if not caller.may_ask((model,)):
            raise PermissionDenied(
                f"this token is not for {model}", hint="only readers of a model complain of its holders"
            )
        self._complaints.record(complaint, caller)

    def sees_any(self, key: str, members: Iterable[str], caller: Caller) -> bool:
        """Return whether one of these members holds weights of a key whose model the caller may access."""
        if caller.models is None:
            return True
        entries = (self.store.read(f"hold/{key}/{member}") for member in members)
        holders = (HOLDING_DECODER.decode(entry.value) for entry in entries if entry is not None)
        return any(caller.may_ask((holder.holding.identity.model,)) for holder in holders)

    def expel(self, callers: Collection[str]) -> int:
        """Remove the members of callers whose tokens were revoked; return their number.

        Args:
            callers: names of all tokens that are good now.
        """
        count = 0
        # Callers without a token (a private socket, certificates alone) have nothing that could be revoked here.
        for member, entry in self.store.scan("member/").items():
            known = MEMBER_DECODER.decode(entry.value)
            if known.caller.startswith(TOKEN_CALLER) and known.caller not in callers:
                audit.warning("event=expelled member=%s caller=%s", member, known.caller)
                remove_member(self.store, member, known)
                self._limits.forget(member)
                count += 1
        return count

    def sync(self, request: SyncRequest) -> SyncReply:
        """Return the members of a sync, with the grants requested. Raises UnknownMember if the caller is not known."""
        self._known(request.member)
        self.counts["grants"] += len(request.grants)
        return sync_members(self.store, request, self._grants())

    def decide(self, request: DecideRequest, caller: Caller | None = None) -> DecideReply:
        """Return the decision on a version with a two-phase commit; the first proposal stands.

        Raises:
            UnknownMember: the caller is not known.
            PermissionDenied: the caller takes no part in the sync, or proposes to commit and is not its rank 0.
        """
        # A store that lost its memory may have lost a commit.
        self._mark_life(check_store=True)
        self._known(request.member)
        reply = decide(self.store, request)
        if reply.decision is not None:
            self._limits.decision(decision_name(request), (caller or Caller()).name)
        return reply

    # Conversions.

    def job(self, job: str, state: JobState, caller: Caller | None = None) -> None:
        """Record the state of a conversion, in place of its earlier one.

        Raises:
            SourceBusy: the caller reports too often, or too many conversions are running.
            PlanError: the state is too large.
        """
        by = (caller or Caller()).name
        if not self._limits.may_report(by):
            raise SourceBusy("too many reports of conversions at once", hint="the next one has all that this one had")
        record_job(self.store, job, state, by, self._clock(), ttl_s=self.ttl_s, max_jobs=self.capacity.conversions)

    # For people.

    def status(self, model: str | None = None) -> Status:
        """Return the members and what they hold; of one model, those that have or fetch it."""
        return status(self.store, model, self._clock())

    def note_gone(self, member: MemberStatus) -> None:
        """Keep that a member which was there is not any more, unless it signed off."""
        by = self._limits.caller_of(member.member)
        record_lost(self.store, member, by, self._clock(), self.capacity.failing_members)

    def why(self, request: WhyRequest) -> Why:
        """Explain the upstreams of one member, of all fetching members, or of an identity."""
        views = {key: self._view(key, again=True) for key in keys_of(self.store, request.model)}
        held = {key: view for key, view in views.items() if view.held}
        return Why(lines=explain_lines(request, held, sync_entries(self.store, request.model)))

    # Inside.

    def _mark_life(self, *, check_store: bool = False) -> None:
        """Renew the hub's life mark once a beat; `check_store`: also if the store has lost the mark since."""
        if self._timer() - self._marked >= self.beat_s or (check_store and self.store.read("hub/life") is None):
            self.begin()

    def _grants(self, *, anew: bool = False) -> GrantSigner:
        """Return the signer, of a seed that all directories on the store share.

        Args:
            anew: compare with the store, which may have lost its memory and then got another replica's seed.
        """
        if self._signer is None or (anew and not self._has_own_seed):
            entry = self.store.read("hub/seed")
            if entry is None:
                # Written only if absent and read back: of several replicas that start together, one seed wins.
                self.store.write("hub/seed", self._seed, expected=ABSENT)
                entry = self.store.read("hub/seed")
            if entry is None:
                raise HubUnavailable("the store does not keep what is written")
            if self._signer is None or entry.value != self._seed:
                self._seed = entry.value
                self._signer = GrantSigner(entry.value)
        return self._signer

    def _known(self, member: str) -> tuple[StoreEntry, MemberEntry]:
        """Return a member's entry. Raises UnknownMember."""
        entry = self.store.read(f"member/{member}")
        if entry is None:
            raise _unknown(member)
        return entry, MEMBER_DECODER.decode(entry.value)

    def _renew(self, member: str, entry: StoreEntry, known: MemberEntry) -> bool:
        """Renew a member's entry; return False if it has changed since it was read."""
        return self.store.write(f"member/{member}", _encode(known), ttl_s=self.ttl_s, expected=entry.version)

    def _seen(self, member: str, now: float, keys: Iterable[str]) -> tuple[StoreEntry, MemberEntry]:
        """Return a member's entry, and the entry after a sign of life with these keys."""
        entry, known = self._known(member)
        merged = tuple(dict.fromkeys([*keys, *known.keys]))
        return entry, msgspec.structs.replace(known, seen=now, keys=merged)

    def _still_requested(self, key: str, member: str, now: float) -> bool:
        """Return True if a key that a beat left out was requested after the beat was made; else drop it."""
        name = f"hold/{key}/{member}"
        entry = self.store.read(name)
        if entry is not None and now - HOLDING_DECODER.decode(entry.value).requested_at < self.beat_s:
            return True
        self.store.write(name, None)
        return False

    def _hold(self, known: MemberEntry, holding: HoldingState, *, reads_storage: bool | None = None) -> HoldingEntry:
        """Store a member's state of a key; `reads_storage` is None in a beat, which does not say it."""
        name = f"hold/{holding.key}/{known.hello.member}"
        now = self._clock()
        num_have = sum(stop - start for start, stop in holding.have)
        requested_at = now if reads_storage is not None else 0.0
        if reads_storage is None:
            entry = self.store.read(name)
            # A beat must not undo what the member's last request said.
            if entry is not None:
                before = HOLDING_DECODER.decode(entry.value)
                requested_at, reads_storage = before.requested_at, before.reads_storage
        holder = HoldingEntry(
            known.hello,
            known.since,
            holding,
            num_have,
            requested_at,
            bool(reads_storage),
            known.certificate,
            known.drain is not None,
        )
        self.store.write(name, _encode(holder), ttl_s=self.ttl_s)
        # Once in its time to live, not with each beat: the name serves `why` and `status` alone.
        local = self._timer()
        if local - self._noted.get(holding.key, float("-inf")) >= self.ttl_s:
            record_key(self.store, holding, ttl_s=3 * self.ttl_s)
            self._noted = {key: when for key, when in self._noted.items() if local - when < self.ttl_s}
            self._noted[holding.key] = local
        return holder

    def _record_request(self, member: str, holding: HoldingState, *, reads_storage: bool) -> HoldingEntry:
        """Record the checked state that a request reports, and that its member lives; return the entry."""
        for _ in range(_ATTEMPTS):
            entry, known = self._known(member)
            now = self._clock()
            # A write for each request would double the store's load; the entry only has to be fresh to a beat.
            if holding.key in known.keys and now - known.seen < self.beat_s:
                break
            keys = tuple(dict.fromkeys((*known.keys, holding.key)))
            if len(keys) > (limit := self.capacity.member_models):
                raise SourceBusy(f"a member fetches and holds {limit} models at most", hint="use another member")
            if self._renew(member, entry, msgspec.structs.replace(known, seen=now, keys=keys)):
                break
        return self._hold(known, holding, reads_storage=reads_storage)

    def _claimed(
        self, request: ClaimRequest, before: Claims, view: HubSnapshot, *, give_more: bool
    ) -> tuple[Claims, Ranges]:
        """Return the table of claims after a request, and the chunks assigned."""
        holding, now = request.holding, self._clock()
        # The snapshot may be older than a member's first holding: the store decides whether an absent one is gone.
        listed = frozenset(before.members)
        gone = {name for name in listed.difference(view.held) if self.store.read(f"hold/{holding.key}/{name}") is None}
        if gone:
            view = self._view(holding.key, again=True)
        # Those that the table lists report for themselves, with a claim of their own.
        reported = {name: view.held[name].holding for name in view.reading.difference(listed, (request.member,))}
        after = update_table(before, request, gone=gone, reported=reported, now=now)
        # Not with each request: a table that changes every time is a lost race for every other claimant.
        if now - after.looked > PROGRESS_CHECK_S:
            states = ((name, view.held[name].holding) for name in view.reading.difference((request.member,)))
            silent_s = {name: holding.silent_s for name, holding in states if holding.silent_s >= 0}
            num_have = {name: holder.num_have for name, holder in view.held.items()}
            after = note_progress(after, num_have, now, silent_s=silent_s)
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

    def _claim_reply(self, request: ClaimRequest, view: HubSnapshot, ranges: Ranges, *, quiet: bool) -> ClaimReply:
        """Return the chunks assigned, or the time of the next request and why there are none."""
        if ranges:
            return ClaimReply(ranges=ranges)
        if quiet:
            # At most a beat: a fleet of 1,000 would otherwise ask 2,000 times a second until the hub has heard of all.
            pause_s = min(self.beat_s, _pause(self.beat_s / 4, view.num_sharing))
            return ClaimReply(ask_again_s=pause_s, why="the hub is new: members have one beat to report what they have")
        if not request.ask:
            return ClaimReply(ask_again_s=self.beat_s)
        pause_s = _pause(0.2, view.num_sharing)
        return ClaimReply(ask_again_s=pause_s, why="others have, or read, every chunk that is missing")

    def _view(self, key: str, *, again: bool = False, asks: HoldingEntry | None = None) -> HubSnapshot:
        """Return a snapshot of a key, perhaps a moment old, but with the member that asks; `again`: read it now."""
        # Popped and put back: the order of the dict is that of use, so the keys unused longest are dropped first.
        with self._lock:
            cache = self._readings.pop(key, None)
            if cache is None:
                cache = SnapshotCache(SnapshotReader(self.store, key))
            self._readings[key] = cache
            while len(self._readings) > _MAX_READINGS:
                del self._readings[next(iter(self._readings))]
        return cache.at(self._timer, self._look_share, again=again, asks=asks)


def _unknown(member: str) -> UnknownMember:
    """Return the error for a member that the hub does not know."""
    return UnknownMember(f"member {member} is not known to this hub", hint="register it again (hello)")


def _pause(least_s: float, num_asking: int) -> float:
    """Return the pause before the next request: at most 100 requests a second from all members, with jitter."""
    return min(5.0, max(least_s, num_asking / 100)) * random.uniform(0.75, 1.25)
