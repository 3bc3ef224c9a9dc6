"""A member is one run of a process in a fleet, with its registration at the hub, its server, transports and weights.

Every heartbeat reports the member's whole state, so a restarted hub is complete after one heartbeat.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from penstock.config import ConnectionSettings
from penstock.errors import (
    ConfigError,
    HubUnavailable,
    IntegrityError,
    PenstockError,
    PermissionDenied,
    SourceStalled,
    StaleDescriptor,
    UnknownMember,
)
from penstock.http.phases import PhasesHandler
from penstock.hub import messages
from penstock.hub.auth import MemberTls
from penstock.hub.client import HubClient
from penstock.lifecycle import is_ending, paused_gc
from penstock.logs import log_named
from penstock.net.unix_sockets import RuntimeDir, host_id
from penstock.peer.client import PeerClient
from penstock.peer.heartbeats import Heartbeats
from penstock.peer.host_links import host_links
from penstock.peer.local_weights import LocalWeights
from penstock.peer.registration import Registration
from penstock.peer.server import SOCKET_NAME, PeerServer
from penstock.phases import Boot, boot_record
from penstock.telemetry.endpoint import start_configured
from penstock.telemetry.journey import JourneyFailure, recent_failures
from penstock.telemetry.metrics import Sample, recording, watch
from penstock.transport.choose import PeerLinks, open_links
from penstock.transport.http import LOOPBACK, host_and_port

log = log_named("penstock.fleet")
T = TypeVar("T")
LEAVE_S = 2.0
REGISTRATIONS = 3  # for one request, because a full hub forgets some members at once


class Member:
    """A run of a process in the fleet, created by `join`. The member leaves the fleet at the end of a `with` block.

    Attributes:
        on_damaged: called with corrupt weights that are no longer served, and the error.
    """

    def __init__(
        self,
        hub: HubClient,
        links: PeerLinks,
        server: PeerServer,
        *,
        host: str,
        rack: str,
        trust: ssl.SSLContext | None,
        num_links: int,
        min_bytes_per_s: int,
        stall_s: float,
    ) -> None:
        self.id = hub.member
        self.host = host
        self.links = links
        self.server = server
        self.trust = trust
        self._opened = contextlib.ExitStack()
        self._pid = os.getpid()
        self.hub = hub
        self._stall_s = stall_s
        self.min_bytes_per_s = min_bytes_per_s
        self._weights: dict[str, LocalWeights] = {}
        self.syncs: list[Callable[[], messages.SyncState]] = []
        self._drain: messages.Drain | None = None
        self.on_damaged: Callable[[LocalWeights, IntegrityError], None] = lambda weights, error: None
        self._lock = threading.Lock()
        self._chance = random.Random(self.id)
        # A heartbeat may have to register this member again, which sends a heartbeat, so the lock is re-entrant.
        self._reporting = threading.RLock()
        self._record = boot_record()
        self._heartbeats = Heartbeats(self._beat, self._interval_s)
        hello = messages.Hello(
            member=self.id,
            host=self.host,
            doors=tuple(server.addresses),
            rack=rack,
            name=f"{socket.gethostname()}:{os.getpid()}",
            num_links=num_links,
        )
        self.registration = Registration(hub, hello)

    @classmethod
    @paused_gc()  # a full collection takes 95 ms in a process with torch, and nothing here is garbage
    def join(
        cls,
        hub: HubClient,
        connection: ConnectionSettings,
        *,
        max_bytes_per_s: int = 0,
        min_bytes_per_s: int = 0,
        stall_s: float = 30.0,
        join_s: float | None = None,
        needs_hub: bool = True,
    ) -> Member:
        """Open the transports and the server, register at the hub, and start sending heartbeats.

        Args:
            hub: client of the hub. The member or a failed `join` closes the client.
            max_bytes_per_s: limit for all readers of this member together. 0 means no limit.
            join_s: timeout for the hub in seconds. None means the client's timeout.
            needs_hub: if False, an unresponsive remote hub is not an error. A later heartbeat registers the member.

        Raises:
            ConfigError: the address or the port cannot be used.
            HubUnavailable: the hub does not respond.
        """
        listen = connection.listen
        with contextlib.ExitStack() as opened:
            opened.callback(hub.close)
            runtime_dir = opened.enter_context(contextlib.closing(RuntimeDir.open()))
            start_configured()
            tls = MemberTls.read()
            trust = None if tls is None else tls.client
            if listen is not None and not hub.has_token and tls is None and host_and_port(listen)[0] not in LOOPBACK:
                message = f"cannot listen on {listen} without a token, because other hosts could read from the member"
                raise ConfigError(message, hint="set a token or certificates, or listen on 127.0.0.1")
            data_address = None if listen is None else f"{listen.rpartition(':')[0]}:{connection.data_port}"
            serving = None if tls is None or listen is None else tls.server
            opening = open_links(only=connection.transports, listen=data_address, tls=serving, trust=trust)
            links = opened.enter_context(opening)
            # The data port was opened for `http`. Without `http`, readers would silently use a different transport.
            if connection.data_port and "http" in (connection.transports or ("http",)) and "http" in links.refused:
                raise ConfigError(links.refused["http"], hint="set a different data_port, or 0 for any free port")
            server = PeerServer.start(
                runtime_dir.path / SOCKET_NAME,
                # `member` is created below. No reader knows the address before the registration.
                lambda request: member.registration.check_grant(request),
                listen=listen,
                tls=None if tls is None else tls.server,
                max_bytes_per_s=max_bytes_per_s,
            )
            opened.callback(server.close)
            member = cls(
                hub,
                links,
                server,
                host=host_id(),
                rack=connection.rack,
                trust=trust,
                num_links=host_links(),
                min_bytes_per_s=min_bytes_per_s,
                stall_s=stall_s,
            )
            member._begin(opened, join_s, needs_hub=needs_hub)
        return member

    def _begin(self, opened: contextlib.ExitStack, join_s: float | None, *, needs_hub: bool) -> None:
        self.server.recheck = self.recheck
        self.server.phases = PhasesHandler(self._replica)
        # Register last, because readers may connect as soon as the hub knows the addresses.
        self.registration.open(join_s, stall_s=self._stall_s, needs_hub=needs_hub)
        self._heartbeats.start()
        self._opened = opened.pop_all()
        watch(self)

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of this member. The metrics endpoint's thread calls this method."""
        if self._heartbeats.are_stopped:
            return
        yield "penstock_members", ("away",), self.registration.hub_is_away
        yield "penstock_members", ("reachable",), not self.registration.hub_is_away
        for weights in self.weights:
            model, on_device = weights.identity.model, "gpu" if weights.device.type == "cuda" else "host"
            state = weights.state if weights.damage is None else "damaged"
            yield "penstock_held_bytes", (model, weights.tier or on_device, state), weights.verified.nbytes
            yield "penstock_readers", (model,), weights.num_readers
        for synced in [sync() for sync in self.syncs]:
            yield "penstock_sync_version", (synced.name, synced.side), synced.version
            yield "penstock_sync_dirty", (synced.name,), synced.state == "dirty"

    def show(self, weights: LocalWeights, *, report: bool = True) -> None:
        """Register weights with the transports and serve them. With `report=True`, also report the weights now."""
        weights.regions.register(self.links)
        with self._lock:
            before = self._weights.get(weights.key)
            self._weights[weights.key] = weights
        self.server.show(weights)
        if before is not None and before is not weights:
            before.close()
        # Readers are looking for sources now, and the next regular heartbeat may be a second away.
        if report:
            self.beat_now()

    def announce(self, weights: LocalWeights) -> None:
        """Report weights in a lower tier to the hub. The server restores the weights when a reader requests a lease."""
        with self._lock:
            self._weights[weights.key] = weights
        self.beat_now()

    def hide(self, weights: LocalWeights, drain_s: float) -> None:
        """Refuse new readers, wait at most `drain_s` seconds for current readers, and end the registrations."""
        # Report first, so that the hub directs no more readers to this member while the current readers finish.
        weights.set_state("draining")
        self.beat_now()
        self.server.drain(weights.key, drain_s)
        with self._lock:
            if self._weights.get(weights.key) is weights:
                del self._weights[weights.key]
        weights.close()

    @property
    def weights(self) -> list[LocalWeights]:
        """Return all weights that this member reports."""
        with self._lock:
            return list(self._weights.values())

    def beat_now(self) -> None:
        """Trigger the next heartbeat now, without waiting for its response."""
        self._heartbeats.trigger()

    def report_now(self) -> None:
        """Send a heartbeat and wait for the response. If the heartbeat fails, the next one reports the change."""
        with contextlib.suppress(PenstockError):
            self._report()

    def _report(self, within_s: float | None = None) -> None:
        # Send one heartbeat at a time, so that an older state cannot replace a newer one.
        if not self._reporting.acquire(timeout=-1 if within_s is None else within_s):
            raise HubUnavailable("the hub has not responded to the previous heartbeat")
        try:
            reply = self._call_hub(lambda: self.hub.beat(self.id, self._state(), within_s=within_s))
            # Remember an operator's drain order, because a restarted hub does not know it.
            self._drain = reply.drain
        finally:
            self._reporting.release()

    def _interval_s(self) -> float:
        # A slow hub gets fewer heartbeats, but at least two within the time after which it would forget this member.
        welcome = self.registration.welcome
        return max(welcome.beat_s, min(self.hub.rest_s, welcome.ttl_s / 4))

    def _beat(self) -> None:
        # Check before the heartbeat, so that the heartbeat reports corruption.
        self._spot_check()
        self.links.sweep()
        self.server.expire()
        try:
            self._report()
            self.registration.hub_is_away = False
        except PenstockError as error:
            if not self.registration.hub_is_away and isinstance(error, ConfigError):
                # The hub responds but does not accept this member, for example because of its protocol version.
                log.error("the hub refuses member %s: %s", self.id, error)
            self.registration.hub_is_away = True
            # Known upstreams stay usable without the hub. The next heartbeat reports the whole state.
            self._heartbeats.pause(min(1.0, self.registration.welcome.beat_s))

    def _spot_check(self) -> None:
        for weights in self.weights:
            if (chunk := weights.spot_check(self._chance)) is not None:
                self._stop_serving(weights, chunk)

    def recheck(self, weights: LocalWeights, chunk: int) -> bool:
        """Digest a chunk that a reader reported as wrong. If the chunk is corrupt, stop serving and return True."""
        # The reader may lie or have defective memory. Waiting for the spot checks could take two hours for 60 GB.
        if weights.damage is None and 0 <= chunk < weights.layout.chunks.num_chunks and weights.has_changed(chunk):
            self._stop_serving(weights, chunk)
        return weights.damage is not None

    def _stop_serving(self, weights: LocalWeights, chunk: int) -> None:
        with self._lock:
            if self._weights.get(weights.key) is not weights or weights.damage is not None:
                return
            error = weights.mark_damaged(chunk)
        if (registry := recording()) is not None:
            registry.add("penstock_verification_failures", ("serve",))
        self.server.hide(weights.key)
        if weights.state != "filling":
            # Do not close weights that a fetch is still filling, because that fetch closes them when it fails.
            weights.close()
        log.error("member %s no longer serves %s: %s", self.id, weights.identity.model, error)
        self.on_damaged(weights, error)
        self.beat_now()

    def check(self) -> None:
        """Raise IntegrityError if verified bytes of served weights changed in memory."""
        for weights in self.weights:
            if weights.damage is not None:
                raise weights.damage

    def _state(self) -> messages.Beat:
        epoch = self.registration.epoch
        syncs = (msgspec.structs.replace(state(), grant_epoch=epoch) for state in self.syncs)
        boot = self._record.snapshot()
        return messages.Beat(
            holdings=tuple(map(self._status, self.weights)),
            syncs=tuple(syncs),
            failures=tuple(map(_report_of, recent_failures())),
            drain=self._drain,
            boot=None if boot is None else msgspec.structs.replace(boot, phases=(), error=None),
        )

    def _replica(self, boot: Boot) -> messages.Replica:
        fields = msgspec.structs.asdict(boot)
        return messages.Replica(**fields, member=self.id, name=self.registration.hello.name, host=self.host)

    def _status(self, weights: LocalWeights) -> messages.HoldingState:
        return msgspec.structs.replace(weights.status(), grant_epoch=self.registration.epoch)

    def _call_hub(self, call: Callable[[], T]) -> T:
        # Processes that host this host's hub for a moment may replace each other faster than a member registers.
        for _ in range(REGISTRATIONS):
            with contextlib.suppress(UnknownMember):
                return call()
            with contextlib.suppress(UnknownMember):
                self.registration.renew()
                with self._reporting:
                    self.hub.beat(self.id, self._state())
        return call()

    def upstreams(
        self, weights: LocalWeights, *, can_read_storage: bool, is_first: bool = False
    ) -> messages.UpstreamsReply:
        """Return the upstreams to read from. The first response may also contain chunks to read from storage."""
        request = messages.UpstreamsRequest(
            member=self.id,
            holding=self._status(weights),
            can_read_storage=can_read_storage,
            claim=is_first and can_read_storage,
        )
        reply = self._call_hub(lambda: self.hub.upstreams(request))
        if is_first:
            # Postpone the next heartbeat, because this request has already reported the weights.
            self._heartbeats.postpone()
        return reply

    def find_holders(self, wanted: messages.HoldingState, *, within_s: float) -> messages.UpstreamsReply:
        """Return members that know a key's layout. Raise HubUnavailable if the hub does not respond in `within_s`."""
        request = messages.UpstreamsRequest(member=self.id, holding=wanted)
        return self._call_hub(lambda: self.hub.upstreams(request, within_s=within_s))

    def claim(self, weights: LocalWeights, *, ask: bool = True) -> messages.ClaimReply:
        """Claim chunks to read from storage. With `ask=False`, only give up claims. Raise HubUnavailable."""
        request = messages.ClaimRequest(member=self.id, holding=self._status(weights), ask=ask)
        return self._call_hub(lambda: self.hub.claim(request))

    def sync(self, name: str, grants: Sequence[str] = ()) -> messages.SyncReply:
        """Return the members of a sync, with grants for `grants`. Raise HubUnavailable if the hub does not respond."""
        request = messages.SyncRequest(member=self.id, name=name, grants=tuple(grants))
        return self._call_hub(lambda: self.hub.sync(request))

    def decide(self, name: str, decision: messages.FleetDecision) -> messages.DecideReply:
        """Propose a decision on a version, and return the recorded decision. An empty outcome proposes nothing."""
        request = messages.DecideRequest(member=self.id, name=name, decision=decision)
        return self._call_hub(lambda: self.hub.decide(request))

    def complain(self, of: str, key: str, error: PenstockError) -> bool:
        """Report an unusable source, but not a source that is only busy. Return False if the hub rejects the report."""
        fault = next((word for kind, word in _FAULTS if isinstance(error, kind)), "unreachable")
        detail = error.message[:1024]
        complaint = messages.FaultReport(member=self.id, of=of, key=key, fault=fault, detail=detail)  # type: ignore[arg-type]
        with contextlib.suppress(PenstockError):
            self._call_hub(lambda: self.hub.complain(complaint))
            return True
        return False

    def peer(self, upstream: messages.Upstream, key: str, *, stall_s: float | None = None) -> PeerClient:
        """Return a client for another member and a key. `stall_s` replaces this member's deadline."""
        return PeerClient(
            upstream,
            member=self.id,
            key=key,
            same_host=upstream.host == self.host,
            stall_s=self._stall_s if stall_s is None else stall_s,
            trust=self.trust,
        )

    def leave(self, drain_s: float = 10.0) -> None:
        """Refuse new leases, wait at most `drain_s` seconds for readers, and leave the hub. Idempotent."""
        if self._pid != os.getpid() or is_ending() or self._heartbeats.are_stopped:
            return
        # Refuse leases for all weights first, so that no reader starts while readers of other weights finish.
        for weights in self.weights:
            weights.set_state("draining")
        self.beat_now()
        deadline = time.monotonic() + drain_s
        for weights in self.weights:
            self.hide(weights, max(0.0, deadline - time.monotonic()))
        if recent_failures() and not self.registration.hub_is_away:
            with contextlib.suppress(PenstockError):
                self._report(LEAVE_S)
        # A heartbeat after the last message would register this member again.
        if self._heartbeats.stop(LEAVE_S) and self.registration.away is None:
            with contextlib.suppress(PenstockError):
                self.hub.leave(self.id, within_s=LEAVE_S)
        self._opened.close()
        self._heartbeats.stop()

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def _report_of(failure: JourneyFailure) -> messages.FailureReport:
    return messages.FailureReport(
        age_s=time.monotonic() - failure.at,
        verb=failure.kind,
        model=failure.model,
        error=failure.error[:64],
        message=failure.message,
        blame=failure.blame,
        hint=failure.hint,
    )


_FAULTS: tuple[tuple[type[PenstockError], str], ...] = (
    (SourceStalled, "stalled"),
    (IntegrityError, "wrong bytes"),
    (StaleDescriptor, "stale"),
    (PermissionDenied, "refused"),
)
