"""The hub's logic: live members, their chunks, claims on storage, and upstreams.

All state is in a `Store` and is soft, because every heartbeat reports it again. Several directories on one store act as
one hub.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection

import msgspec

from penstock.errors import HubUnavailable, PermissionDenied, PlanError, SourceBusy, UnknownMember
from penstock.hub import messages
from penstock.hub.address import parse_peer_url
from penstock.hub.auth import TOKEN_CALLER, Caller
from penstock.hub.grants import GrantSigner
from penstock.hub.job_state import JobState
from penstock.logs import log_named
from penstock.waits import jitter
from penstock_hub import snapshot
from penstock_hub.auth import ANYBODY
from penstock_hub.claims import PROGRESS_CHECK_S, Claims, assign_piece, check_state, note_progress, update_table
from penstock_hub.complaints import record_complaint
from penstock_hub.conversions import record_job
from penstock_hub.explain import explain_lines
from penstock_hub.failures import record_failed_calls, record_lost
from penstock_hub.limits import CLAIMS_TTL_S, Capacity, Limits, remove_member
from penstock_hub.store import ABSENT, Store, StoreEntry

# Seconds added to a heartbeat interval, so that members that could not reach the hub have time to retry.
_ANNOUNCE_S = 1.0
# A late request must not register a member that has left. A client gives up after 10 s (`client.TIMEOUT_S`), and a
# request's body arrives within 20 s (`app.BODY_S`).
_GONE_TTL_S = 60.0
# Fleet size that limits the pause of newcomers to 0.5 s, the interval at which a snapshot of 1,000 members is renewed.
_NEWCOMERS = 50
# Fleet size that limits the pause of newcomers with a place in the relay to 2 s, which saves a third of the requests
# from a starting fleet.
_PLACED_NEWCOMERS = 200
# Maximum number of compare-and-set attempts.
_ATTEMPTS = 64
# Maximum number of compare-and-set attempts for a claim inside an `upstreams` request, which must not wait.
_FEW_ATTEMPTS = 4
# Number of locks for the tables of claims, so that claims on different keys rarely wait for each other.
_NUM_CLAIMING = 64
# Number of keys with a cached snapshot.
_MAX_SNAPSHOTS = 1024
_CLAIMS = msgspec.msgpack.Decoder(Claims)
_encode = msgspec.msgpack.encode
audit = log_named("penstock.audit")


class Directory:
    """The hub's logic on one store. Thread-safe.

    Args:
        fresh: whether there were no members before, so that chunks can be claimed immediately. If False, members first
            have one heartbeat interval to report their chunks.
        beat_s: interval between heartbeats.
        ttl_s: a member that is silent for this long is removed.
        clock: returns seconds, the same for all directories on the store, or None to use the store's clock.
        timer: returns monotonic seconds in this process.
        seed: 32 bytes that form the key for signing grants, or None to keep the seed in the store.
        look_share: maximum share of time spent on snapshots of one key.
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
        # Counters of events: grants, claimed_chunks, complaints, hellos, leaves.
        self.counts: Counter[str] = Counter()
        self._limits = Limits(store, self.capacity, ttl_s=ttl_s, timer=timer, look_share=look_share)
        self._fresh = fresh
        # Times on `timer` at which the hub's entry was last renewed and at which each key was last recorded.
        self._marked = float("-inf")
        self._noted: dict[str, float] = {}
        self._clock = clock or store.now
        self._timer = timer
        self._look_share = look_share
        self._lock = threading.Lock()
        self._claiming = tuple(threading.Lock() for _ in range(_NUM_CLAIMING))
        self._snapshots: dict[str, snapshot.SnapshotCache] = {}
        self._has_own_seed = seed is not None
        self._seed = seed or os.urandom(32)
        self._signer = None if seed is None else GrantSigner(seed)

    def begin(self) -> None:
        """Renew the entry that shows that a hub is running.

        A hub that finds no such entry is new, and assigns no chunks until members have had time to report.
        """
        ttl_s = 3 * self.beat_s
        self._limits.count_members()
        self._marked = self._timer()
        is_fresh, self._fresh = self._fresh, False
        if not self.store.write("hub/life", b"1", ttl_s=ttl_s, expected=ABSENT):
            self.store.write("hub/life", b"1", ttl_s=ttl_s)
            return
        # A store that lost the entry may also have lost the keys of all models.
        self._noted = {}
        if not is_fresh:
            quiet_s = max(1.5 * self.beat_s, self.beat_s + _ANNOUNCE_S)
            self.store.write("hub/quiet", b"1", ttl_s=quiet_s)
            # Keep this entry until every live member has reported or has expired.
            self.store.write("hub/recent", b"1", ttl_s=quiet_s + self.ttl_s)

    def hello(self, hello: messages.Hello, caller: Caller = ANYBODY) -> messages.Welcome:
        """Register a process, or confirm that it is still registered.

        Raises:
            PermissionDenied: the id belongs to a different process, or to a member that has left.
            PlanError: an address of the member's server is not valid.
            SourceBusy: the caller has registered as many members as it may.
        """
        if invalid := [url for url in hello.doors if parse_peer_url(url) is None]:
            hint = "use unix:///path or http(s)://host:port"
            raise PlanError(f"{invalid[0]!r} is not a valid address for a member", hint=hint)
        self._mark_life()
        name, now = f"member/{hello.member}", self._clock()
        entry = self.store.read(name)
        known = None if entry is None else snapshot.MEMBER_DECODER.decode(entry.value)
        if self.store.read(f"gone/{hello.member}") is not None or (known is not None and known.hello != hello):
            message = f"member {hello.member} belongs to another process, or has left"
            raise PermissionDenied(message, hint="use a new member id for each process")
        # An identical hello from a known member repeats a request whose response was lost.
        if known is None:
            self._limits.admit(hello.member, caller.name)
            self.counts["hellos"] += 1
            by = caller.name, caller.certificate
            self.store.write(
                name, _encode(snapshot.MemberEntry(hello, now, now, (), *by)), ttl_s=self.ttl_s, expected=ABSENT
            )
        signer = self._grants(reread=True)
        # Members that started together must not send their heartbeats together, so vary the interval.
        beat_s = self.beat_s * jitter(0.75, 1.0)
        return messages.Welcome(ttl_s=self.ttl_s, beat_s=beat_s, grant_key=signer.public_key)

    def check_certificate(self, member: str, certificate: str) -> None:
        """Raise PermissionDenied if a member registered with a different certificate."""
        entry = self.store.read(f"member/{member}")
        if entry is None:
            return
        theirs = snapshot.MEMBER_DECODER.decode(entry.value).certificate
        if theirs != certificate:
            audit.warning("event=impostor member=%s certificate=%r of=%r", member, certificate, theirs)
            message = f"member {member} registered with a different certificate"
            raise PermissionDenied(message, hint="use a new member id for each process")

    def beat(self, member: str, beat: messages.Beat, caller: Caller = ANYBODY) -> messages.BeatReply:
        """Renew a member's lease, and drop the keys that the heartbeat omits. Return the drain order for the member.

        Raises:
            UnknownMember: the member was silent for too long or left, or the hub is new.
            PlanError: a holding contradicts itself.
            SourceBusy: the reports of the caller's members exceed the caller's quota.
        """
        # A refused heartbeat must change nothing.
        for holding in beat.holdings:
            check_state(holding)
        self._mark_life()
        entry, known = self._known(member)
        boot = snapshot.encode_state(beat.boot)
        nbytes = self._limits.admit(member, known.caller, beat)
        now = self._clock()
        # Only a new hub can have lost a drain order. If any other hub has no order, an operator has undone the order.
        is_lost = beat.drain is not None and known.drain is None and self.store.read("hub/quiet") is not None
        if beat.drain is not None and is_lost and self.store.read(f"undrained/{member}") is None:
            known = msgspec.structs.replace(known, drain=beat.drain)
            audit.info("event=drain_restored member=%s caller=%r", member, beat.drain.by)
        keys = tuple(holding.key for holding in beat.holdings)
        absent = (key for key in known.keys if key not in keys)
        still_requested = tuple(key for key in absent if self._still_requested(key, member, now))
        for holding in beat.holdings:
            self._hold(known, holding)
        snapshot.record_sync_states(self.store, known, beat.syncs, now, self.ttl_s)
        # A concurrent request may have changed the entry, so merge with it once. If the merged write fails too, the
        # next heartbeat reports the keys.
        after = msgspec.structs.replace(known, seen=now, keys=keys + still_requested, boot=boot, nbytes=nbytes)
        if not self._renew(member, entry, after):
            entry, latest = self._known(member)
            merged = tuple(dict.fromkeys([*keys, *latest.keys]))
            after = msgspec.structs.replace(latest, seen=now, keys=merged, boot=boot, nbytes=nbytes)
            self._renew(member, entry, after)
        record_failed_calls(self.store, known.hello, beat.failures, now, caller, self.capacity.failing_members)
        return messages.BeatReply(drain=known.drain)

    def drain(self, member: str, drain: messages.Drain | None, caller: Caller) -> None:
        """Drain a member until it leaves. None ends the drain.

        Raises:
            UnknownMember: there is no such member.
            PermissionDenied: the caller may not access all models that the member holds.
            HubUnavailable: too many requests change the member at the same moment.
        """
        order = None if drain is None else messages.Drain(by=caller.name, reason=drain.reason)
        for _ in range(_ATTEMPTS):
            entry, known = self._known(member)
            names = {key: f"hold/{key}/{member}" for key in known.keys}
            stored = {key: held for key, name in names.items() if (held := self.store.read(name)) is not None}
            holders = {key: snapshot.HOLDING_DECODER.decode(held.value) for key, held in stored.items()}
            models = {holder.holding.identity.model for holder in holders.values()}
            if models and not any(caller.may_ask((model,)) for model in models):
                # The caller may see none of the member's holdings, so raise the same error as for a member that does
                # not exist.
                raise _unknown(member)
            if not caller.may_ask(models):
                raise PermissionDenied(
                    f"this token may not access all models of member {member}", hint="use a token for all these models"
                )
            # An older heartbeat must not restore an undone drain order, even while the hub is new.
            self.store.write(f"undrained/{member}", b"1" if drain is None else None, ttl_s=self.ttl_s)
            if self._renew(member, entry, msgspec.structs.replace(known, drain=order)):
                break
        else:
            raise HubUnavailable(f"too many requests change member {member} at once", hint="retry the request")
        # Change the holdings now instead of with the next heartbeat, because new readers must not be sent to the
        # member.
        for key, holder in holders.items():
            marked = msgspec.structs.replace(holder, is_drained=order is not None)
            self.store.write(names[key], _encode(marked), ttl_s=self.ttl_s, expected=stored[key].version)
        event, reason = ("undrain", "") if drain is None else ("drain", drain.reason)
        audit.warning("event=%s member=%s caller=%s reason=%r", event, member, caller.name, reason)

    def leave(self, member: str, caller: Caller = ANYBODY) -> None:
        """Remove a member permanently and free its claims. Do nothing if the member is unknown."""
        entry = self.store.read(f"member/{member}")
        # Record an unknown member too, because its hello may still arrive.
        if entry is not None or self._limits.unknown_leaves.allow(caller.name):
            self.store.write(f"gone/{member}", b"1", ttl_s=_GONE_TTL_S)
        if entry is not None:
            self.counts["leaves"] += 1
            remove_member(self.store, member, snapshot.MEMBER_DECODER.decode(entry.value))
            self._limits.forget(member)

    def upstreams(self, request: messages.UpstreamsRequest, caller: Caller = ANYBODY) -> messages.UpstreamsReply:
        """Return the upstreams from which to read chunks, parents first, with a grant for each.

        Raise the errors of `beat`.

        A request without chunks asks for the layout and does not make the member a holder.
        """
        holding = request.holding
        # The caller's access was checked for the identity's model, so the key must belong to the identity.
        check_state(holding)
        entry = None
        if holding.num_chunks:
            entry = self._record_request(request.member, holding, reads_storage=request.can_read_storage)
        hello = entry.hello if entry is not None else self._known(request.member)[1].hello
        view = self._view(holding.key, newcomer=entry)
        is_placed = holding.num_chunks > 0 and view.is_placed(request.member, holding.num_chunks)
        names: tuple[str, ...] = ()
        orders: tuple[tuple[str, ...], ...] = ()
        if is_placed:
            orders = view.orders(request.member, holding.num_chunks)
            names = snapshot.by_rank(orders)
        elif request.source and not holding.num_chunks:
            names = (request.source,) if request.source in view.held and request.source not in view.drained else ()
        elif view.held:
            # The member requests the layout, or joined after the snapshot. Such a member may use any holders until it
            # has a place in the relay.
            names = view.holders_near(hello, holding)
        holders = {name: view.held[name] for name in names}
        grants = self._grants().sign(
            key=holding.key,
            reader=request.member,
            epochs={name: holder.holding.grant_epoch for name, holder in holders.items()},
            protocols={name: holder.hello.protocol for name, holder in holders.items()},
            caller=caller.name,
        )
        upstreams = tuple(
            messages.Upstream(
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
            claim = self._assign(
                messages.ClaimRequest(member=request.member, holding=holding), caller, attempts=_FEW_ATTEMPTS
            )
        # A large fleet polls less often, so that the load on the hub stays constant. Newcomers poll soon, because their
        # first snapshot has few members or no place for them. A member with nothing to read polls after a quarter of
        # the pause (`fetcher.run`).
        least_s = 1.0 if upstreams and is_placed and view.has_whole else 0.2
        num_asking = len(view.held)
        if not is_placed or request.member in view.newcomers:
            num_asking = min(num_asking, _PLACED_NEWCOMERS if is_placed else _NEWCOMERS)
        return messages.UpstreamsReply(
            upstreams=upstreams,
            orders=tuple(tuple(names.index(name) for name in order) for order in orders) if len(orders) > 1 else (),
            is_placed=is_placed,
            ask_again_s=_pause(least_s, num_asking),
            reader_silent_s=view.reader_silent_s(besides=request.member),
            claim=claim,
        )

    def claim(self, request: messages.ClaimRequest, caller: Caller = ANYBODY) -> messages.ClaimReply:
        """Assign chunks that only this member reads from storage, and free the chunks that it no longer reads.

        Raises:
            HubUnavailable: too many members claimed chunks at the same moment. See `beat` for other errors.
        """
        check_state(request.holding)
        self._mark_life(check_store=True)
        self._record_request(request.member, request.holding, reads_storage=request.ask)
        reply = self._assign(request, caller, attempts=_ATTEMPTS)
        if reply is None:
            raise HubUnavailable("too many members claim chunks of one key at the same moment", hint="retry the claim")
        return reply

    def _assign(self, request: messages.ClaimRequest, caller: Caller, *, attempts: int) -> messages.ClaimReply | None:
        """Change the table of claims for a recorded request. Return None if every attempt lost to another directory."""
        holding = request.holding
        quiet = self.store.read("hub/quiet") is not None
        name = f"claim/{holding.key}/{holding.num_chunks}"
        # Another directory may change the table, so use compare-and-set. The lock serialises this directory's threads,
        # because a claim took seconds when 40 threads raced for one table in Redis.
        with self._claiming[hash(name) % len(self._claiming)]:
            for attempt in range(attempts):
                entry = self.store.read(name)
                view = self._view(holding.key, again=attempt > 0)
                version = ABSENT if entry is None else entry.version
                give_more = request.ask and not quiet
                # In a starting fleet most requests find every chunk claimed, so do not change the table for them.
                only_asks = give_more and not (holding.have or holding.claims or view.out_of_reach(request.member))
                if only_asks and view.is_all_claimed(version, besides=request.member):
                    return self._claim_reply(request, view, (), quiet=quiet)
                before = Claims() if entry is None else _CLAIMS.decode(entry.value)
                after, ranges = self._claimed(request, before, view, give_more=give_more)
                if only_asks and not ranges and after == before:
                    view.note_all_claimed(version, before.members)
                table = _encode(after) if after.members else b""
                if after == before or self.store.write(name, table or None, ttl_s=CLAIMS_TTL_S, expected=version):
                    self._limits.table(name, caller.name, len(table))
                    self.counts["claimed_chunks"] += sum(stop - start for start, stop in ranges)
                    return self._claim_reply(request, view, ranges, quiet=quiet)
                # Without a random pause, the loser of a race could lose to the same winner again.
                time.sleep(jitter(0, 0.002))
        return None

    def complain(self, complaint: messages.FaultReport, caller: Caller = ANYBODY) -> None:
        """Record that a reader could not use a source, and make the source the last choice for that reader.

        Once `DISTRUST` callers complain, the source becomes the last choice for all readers. Complaints about wrong
        bytes affect only the complaining reader, which also reports them to the holder.

        Raises:
            UnknownMember: the complaining member is not known.
            PermissionDenied: the caller may not access the holder's model.
            SourceBusy: the caller complains too often.
        """
        held = {name: self.store.read(f"hold/{complaint.key}/{name}") for name in (complaint.of, complaint.member)}
        models = {
            snapshot.HOLDING_DECODER.decode(entry.value).holding.identity.model for entry in held.values() if entry
        }
        if caller.models is not None and not any(caller.may_ask((model,)) for model in models):
            # A hidden model and a member without holdings raise the same error, so the error reveals no holder.
            audit.warning("event=forbidden operation=complain of=%s key=%s", complaint.of, complaint.key)
            raise PermissionDenied(
                f"this token may not access models with the key {complaint.key}",
                hint="only readers of a model may complain about its holders",
            )
        self._known(complaint.member)
        if held[complaint.of] is None:
            return
        if not self._limits.complaints.allow(caller.name):
            hint = "wait before you send more, because the earlier complaints count"
            raise SourceBusy("too many complaints from this caller", hint=hint)
        self.counts["complaints"] += 1
        record_complaint(self.store, complaint, caller.name)

    def expel(self, callers: Collection[str]) -> int:
        """Remove the members whose tokens are not among the valid `callers`. Return their number."""
        count = 0
        # Callers on a private socket or with only a certificate have no token that could be revoked.
        for member, entry in self.store.scan("member/").items():
            known = snapshot.MEMBER_DECODER.decode(entry.value)
            if known.caller.startswith(TOKEN_CALLER) and known.caller not in callers:
                audit.warning("event=expelled member=%s caller=%s", member, known.caller)
                remove_member(self.store, member, known)
                self._limits.forget(member)
                count += 1
        return count

    def sync(self, request: messages.SyncRequest) -> messages.SyncReply:
        """Return the members of a sync, with the requested grants. Raise UnknownMember if the caller is not known."""
        self._known(request.member)
        self.counts["grants"] += len(request.grants)
        return snapshot.sync_members(self.store, request, self._grants())

    def decide(self, request: messages.DecideRequest, caller: Caller = ANYBODY) -> messages.DecideReply:
        """Return the decision on a version with a two-phase commit. See `snapshot.decide`."""
        # A store that lost its data may have lost a commit, so check the store.
        self._mark_life(check_store=True)
        self._known(request.member)
        reply = snapshot.decide(self.store, request)
        if reply.decision is not None:
            self._limits.decision(snapshot.decision_name(request), caller.name)
        return reply

    def job(self, job: str, state: JobState, caller: Caller = ANYBODY) -> None:
        """Record the state of a conversion.

        Raise SourceBusy for too many reports, or PlanError for a state that is too large.
        """
        if not self._limits.job_reports.allow(caller.name):
            hint = "wait a second, because the next report will be a full one"
            raise SourceBusy("too many conversion reports from this caller", hint=hint)
        now, most = self._clock(), self.capacity.conversions
        record_job(self.store, job, state, caller.name, now, ttl_s=self.ttl_s, max_jobs=most)

    def status(self, model: str | None = None) -> messages.Status:
        """Return the members and their holdings. If `model` is set, include only members that have or fetch it."""
        return snapshot.status(self.store, model, self._clock())

    def record_lost(self, member: messages.MemberStatus) -> None:
        """Record that a member is gone, unless it signed off."""
        by = self._limits.caller_of(member.member)
        record_lost(self.store, member, by, self._clock(), self.capacity.failing_members)

    def why(self, request: messages.WhyRequest) -> messages.Why:
        """Explain the upstreams of one member, of all fetching members, or of an identity."""
        views = {key: self._view(key, again=True) for key in snapshot.keys_of(self.store, request.model)}
        held = {key: view for key, view in views.items() if view.held}
        return messages.Why(lines=explain_lines(request, held, snapshot.sync_entries(self.store, request.model)))

    def _mark_life(self, *, check_store: bool = False) -> None:
        """Renew the hub's entry once per heartbeat interval, or at once if `check_store` finds it missing."""
        if self._timer() - self._marked >= self.beat_s or (check_store and self.store.read("hub/life") is None):
            self.begin()

    def _grants(self, *, reread: bool = False) -> GrantSigner:
        """Return the signer. If `reread` is set, first read the store's seed again."""
        if self._signer is None or (reread and not self._has_own_seed):
            entry = self.store.read("hub/seed")
            if entry is None:
                # If several replicas start together, all must use the same seed.
                self.store.write("hub/seed", self._seed, expected=ABSENT)
                entry = self.store.read("hub/seed")
            if entry is None:
                raise HubUnavailable("the store lost the hub's signing seed right after the hub wrote it")
            if self._signer is None or entry.value != self._seed:
                self._seed = entry.value
                self._signer = GrantSigner(entry.value)
        return self._signer

    def _known(self, member: str) -> tuple[StoreEntry, snapshot.MemberEntry]:
        """Return a member's entry. Raise UnknownMember if the member has no entry."""
        entry = self.store.read(f"member/{member}")
        if entry is None:
            raise _unknown(member)
        return entry, snapshot.MEMBER_DECODER.decode(entry.value)

    def _renew(self, member: str, entry: StoreEntry, known: snapshot.MemberEntry) -> bool:
        """Renew a member's entry. Return False if the entry has changed since it was read."""
        return self.store.write(f"member/{member}", _encode(known), ttl_s=self.ttl_s, expected=entry.version)

    def _still_requested(self, key: str, member: str, now: float) -> bool:
        """Return whether a key that a heartbeat omits was requested after the heartbeat, and drop the key if not."""
        name = f"hold/{key}/{member}"
        entry = self.store.read(name)
        if entry is not None and now - snapshot.HOLDING_DECODER.decode(entry.value).requested_at < self.beat_s:
            return True
        self.store.write(name, None)
        return False

    def _hold(
        self, known: snapshot.MemberEntry, holding: messages.HoldingState, *, reads_storage: bool | None = None
    ) -> snapshot.HoldingEntry:
        """Store a member's state for a key. A heartbeat does not report `reads_storage`, so it is None."""
        name = f"hold/{holding.key}/{known.hello.member}"
        now = self._clock()
        num_have = sum(stop - start for start, stop in holding.have)
        requested_at = now if reads_storage is not None else 0.0
        if reads_storage is None:
            entry = self.store.read(name)
            # A heartbeat must not undo the member's last request.
            if entry is not None:
                before = snapshot.HOLDING_DECODER.decode(entry.value)
                requested_at, reads_storage = before.requested_at, before.reads_storage
        state = holding, num_have, requested_at, bool(reads_storage)
        holder = snapshot.HoldingEntry(known.hello, known.since, *state, known.certificate, known.drain is not None)
        self.store.write(name, _encode(holder), ttl_s=self.ttl_s)
        # Only `why` and `status` read the record of a key, so do not write the record for each request.
        local = self._timer()
        if local - self._noted.get(holding.key, float("-inf")) >= self.ttl_s:
            snapshot.record_key(self.store, holding, ttl_s=3 * self.ttl_s)
            self._noted = {key: when for key, when in self._noted.items() if local - when < self.ttl_s}
            self._noted[holding.key] = local
        return holder

    def _record_request(
        self, member: str, holding: messages.HoldingState, *, reads_storage: bool
    ) -> snapshot.HoldingEntry:
        """Record the checked state from a request, and that the member is alive. Return the entry."""
        for _ in range(_ATTEMPTS):
            entry, known = self._known(member)
            now = self._clock()
            # Writing the entry for each request would double the store's load, so the entry may be one interval old.
            if holding.key in known.keys and now - known.seen < self.beat_s:
                break
            keys = tuple(dict.fromkeys((*known.keys, holding.key)))
            if len(keys) > (limit := self.capacity.member_models):
                raise SourceBusy(f"a member can fetch and hold at most {limit} models", hint="use another member")
            if self._renew(member, entry, msgspec.structs.replace(known, seen=now, keys=keys)):
                break
        return self._hold(known, holding, reads_storage=reads_storage)

    def _claimed(
        self, request: messages.ClaimRequest, before: Claims, view: snapshot.HubSnapshot, *, give_more: bool
    ) -> tuple[Claims, messages.Ranges]:
        """Return the table of claims after a request, and the assigned chunks."""
        holding, now = request.holding, self._clock()
        # The snapshot may be older than a member's first holding, so read absent members from the store.
        listed = frozenset(before.members)
        gone = {name for name in listed.difference(view.held) if self.store.read(f"hold/{holding.key}/{name}") is None}
        if gone:
            view = self._view(holding.key, again=True)
        reported = {name: view.held[name].holding for name in view.reading.difference(listed, (request.member,))}
        after = update_table(before, request, gone=gone, reported=reported, now=now)
        # Note progress rarely, because each change of the table makes every concurrent claim fail and retry.
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
            readable=view.readable_chunks(request.member, holding.num_chunks),
            unreachable=view.out_of_reach(request.member),
            num_sharing=view.num_sharing,
            now=now,
        )

    def _claim_reply(
        self, request: messages.ClaimRequest, view: snapshot.HubSnapshot, ranges: messages.Ranges, *, quiet: bool
    ) -> messages.ClaimReply:
        """Return the assigned chunks, or if no chunk is assigned, a pause before the next request and the reason."""
        if ranges:
            return messages.ClaimReply(ranges=ranges)
        if quiet:
            # Without this pause, a fleet of 1,000 would send 2,000 requests a second until the hub knows all members.
            pause_s = min(self.beat_s, _pause(self.beat_s / 4, view.num_sharing))
            why = "the hub is new and waits one heartbeat for the members' reports"
            return messages.ClaimReply(ask_again_s=pause_s, why=why)
        if not request.ask:
            return messages.ClaimReply(ask_again_s=self.beat_s)
        pause_s = _pause(0.2, view.num_sharing)
        return messages.ClaimReply(ask_again_s=pause_s, why="other members have or read every missing chunk")

    def _view(
        self, key: str, *, again: bool = False, newcomer: snapshot.HoldingEntry | None = None
    ) -> snapshot.HubSnapshot:
        """Return a snapshot of a key that includes the newcomer. If `again` is set, use no cached snapshot."""
        # Pop and insert to keep the dict in order of use, so that the least recently used keys are dropped first.
        with self._lock:
            cache = self._snapshots.pop(key, None)
            if cache is None:
                cache = snapshot.SnapshotCache(self.store, key)
            self._snapshots[key] = cache
            while len(self._snapshots) > _MAX_SNAPSHOTS:
                del self._snapshots[next(iter(self._snapshots))]
        return cache.at(self._timer, self._look_share, again=again, newcomer=newcomer)


def _unknown(member: str) -> UnknownMember:
    return UnknownMember(f"this hub does not know member {member}", hint="register the member again (hello)")


def _pause(least_s: float, num_asking: int) -> float:
    """Return a random pause before the next request, so that all members together send at most 100 a second."""
    return min(5.0, max(least_s, num_asking / 100)) * jitter(0.75, 1.25)
