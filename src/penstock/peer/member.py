"""One life of a process in a fleet: known to the hub, with a door, transports, and what it holds.

In: a hub, holdings. Out: beats; upstreams, claims and followings for a fetch; a clean leave.
Not here: what a user calls (`fetch.join`), filling a holding (`fetch.run`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

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
from penstock.hub.client import HubClient
from penstock.hub.grants import GrantChecker
from penstock.hub.messages import (
    Beat,
    ClaimReply,
    ClaimRequest,
    Complaint,
    Hello,
    HoldingState,
    LeaseRequest,
    LogReply,
    Proof,
    SyncState,
    Upstream,
    UpstreamsReply,
    UpstreamsRequest,
    Welcome,
)
from penstock.hub.proof import PROVABLE, DigestSigner
from penstock.hub.sync_messages import SyncReply, SyncRequest
from penstock.hub.tls import MemberTls
from penstock.net.runtime_dir import RuntimeDir
from penstock.peer.client import PeerClient
from penstock.peer.local_weights import LocalWeights
from penstock.peer.server import PeerServer
from penstock.transport.choose import Links, open_links
from penstock.transport.generation_table import here
from penstock.transport.http import LOOPBACK, host_and_port
from penstock.types import GB

log = logging.getLogger("penstock.fleet")
T = TypeVar("T")
JOIN_AGAIN_S = 0.1
"""Pause before a hub of this host that could not be greeted is looked for again."""


def host_id() -> str:
    """What members have in common that can share memory: the boot and the PID namespace."""
    return here()


def host_links() -> int:
    """Links to other hosts that carry copies side by side: the RDMA devices, where there are any, else one."""
    try:
        return max(1, len(os.listdir("/sys/class/infiniband")))
    except OSError:
        return 1


class Member:
    """One process life. A context manager; leaving it leaves the fleet.

    Args:
        hub: the hub; closed by this. It can speak for one member: this.
        rack: a word that near hosts share.
        listen: `host:port` where other hosts reach this member, whose hub must then ask who members are, by tokens or
            certificates; None: this host only.
        transports: names allowed; None: all that work here.
        max_bytes_per_s: of all readers of this member together; 0: no cap.
        min_gb_per_s: upstreams that give less are not used; 0: any pace will do.
        stall_s: deadline by progress.

    Attributes:
        syncs: what is told of syncs with each beat.
        hub_is_away: the last beat was not answered: questions that can do without it need not wait for it.
        damaged: called with a holding whose verified bytes changed in memory, and why, once it is no longer served.
    """

    def __init__(
        self,
        hub: HubClient,
        *,
        rack: str = "",
        listen: str | None = None,
        transports: Sequence[str] | None = None,
        max_bytes_per_s: int = 0,
        min_gb_per_s: float = 0.0,
        stall_s: float = 30.0,
    ) -> None:
        self.id, self.host, self._pid = hub.member, host_id(), os.getpid()
        self._hub, self._stall_s, self._min_gb_per_s = hub, stall_s, min_gb_per_s
        self._weights: dict[str, LocalWeights] = {}
        self.syncs: list[Callable[[], SyncState]] = []
        self.hub_is_away = False
        self.on_damaged: Callable[[LocalWeights, IntegrityError], None] = lambda weights, error: None
        self._lock = threading.Lock()
        self._chance = random.Random(self.id)
        self._beat_now, self._closing = threading.Event(), threading.Event()
        self._grants: GrantChecker | None = None
        self._grant_key = b""
        self._runtime_dir = RuntimeDir()
        try:
            tls = MemberTls.read()
            self.trust = None if tls is None else tls.asking
            if listen is not None and not hub.has_token and tls is None:
                _check_loopback(listen)
            beside = None if listen is None else f"{listen.rpartition(':')[0]}:0"
            self.links: Links = open_links(
                only=transports,
                listen=beside,
                tls=None if tls is None or listen is None else tls.serving,
                trust=self.trust,
            )
            self.server = PeerServer(
                self._runtime_dir.path / "door.sock",
                self.check_grant,
                listen=listen,
                tls=None if tls is None else tls.serving,
                max_bytes_per_s=max_bytes_per_s,
            )
            self.server.recheck, self.server.sign = self.recheck, self._sign
            self._signer = DigestSigner(self.id, self._epoch)
            self._hello = Hello(
                member=self.id,
                host=self.host,
                doors=tuple(self.server.addresses),
                rack=rack,
                name=f"{socket.gethostname()}:{os.getpid()}",
                num_links=host_links(),
                digest_key=self._signer.public_key,
            )
            self.welcome = self._join(stall_s)
        except BaseException:
            self._free()
            raise
        self._beats = threading.Thread(target=self._beat, name="penstock-beat", daemon=True)
        self._beats.start()

    def _join(self, within_s: float) -> Welcome:
        """Greet the hub. Where it is this host's own, wait for another to host it: who did may be stopped."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                return self._greet()
            except HubUnavailable:
                if not self._hub.is_local or time.monotonic() >= deadline:
                    raise
            time.sleep(JOIN_AGAIN_S)

    def _greet(self) -> Welcome:
        welcome = self._hub.hello(self._hello)
        if welcome.grant_key != self._grant_key:
            self._grant_key = welcome.grant_key
            if self._grants is None:
                self._grants = GrantChecker(welcome.grant_key, self.id)
            else:
                # Another thread may be telling the new hub of the present epoch at this moment.
                self._grants.trust(welcome.grant_key)
        return welcome

    def check_grant(self, request: LeaseRequest) -> None:
        """GrantRefused unless the hub signed that the asker may read the key of us; passes once."""
        assert self._grants is not None
        self._grants.check(request.grant, key=request.key, reader=request.member)

    def _sign(self, weights: LocalWeights, reply: LogReply) -> LogReply:
        """Sign what a log says of digests, where a hub could tell that they are wrong."""
        if not reply.chunks or not weights.identity.revision.startswith(PROVABLE):
            return reply
        return self._signer.sign(reply, weights.key, weights.layout.chunks)

    # -- holdings

    def show(self, weights: LocalWeights) -> None:
        """Register it, let others read it, tell the hub at once."""
        weights.register(self.links)
        with self._lock:
            before = self._weights.get(weights.key)
            self._weights[weights.key] = weights
        self.server.show(weights)
        if before is not None and before is not weights:
            before.close()  # the same weights in other memory
        self.beat_now()

    def announce(self, weights: LocalWeights) -> None:
        """Tell the hub of one that rests; its door brings it back."""
        with self._lock:
            self._weights[weights.key] = weights
        self.beat_now()

    def hide(self, weights: LocalWeights, drain_s: float) -> None:
        """Give it up: no new readers, wait for those there are at most `drain_s`, then end its registrations."""
        weights.set_state("draining")
        self.beat_now()
        self.server.drain(weights.key, drain_s)
        with self._lock:
            if self._weights.get(weights.key) is weights:
                del self._weights[weights.key]
        weights.close()

    @property
    def weights(self) -> list[LocalWeights]:
        """Everything shown."""
        with self._lock:
            return list(self._weights.values())

    # -- the hub

    @property
    def hub(self) -> HubClient:
        """For questions that change nothing."""
        return self._hub

    def beat_now(self) -> None:
        """Tell the hub what changed without waiting for the next beat."""
        self._beat_now.set()

    def report_now(self) -> None:
        """Tell the hub what changed, and return once it knows; where it is away, the next beat tells it."""
        with contextlib.suppress(PenstockError):
            self._call_hub(lambda: self._hub.beat(self.id, self._state()))

    def _beat(self) -> None:
        while not self._closing.is_set():
            self._beat_now.wait(max(self.welcome.beat_s, min(self._hub.rest_s, self.welcome.ttl_s / 4)))
            self._beat_now.clear()
            if self._closing.is_set():
                return
            self._spot_check()
            self.links.sweep()
            self.server.expire()
            try:
                self._call_hub(lambda: self._hub.beat(self.id, self._state()))
                self.hub_is_away = False
            except PenstockError:
                self.hub_is_away = True
                # The hub is away; what is known stays usable, and the next beat tells all again.
                self._closing.wait(min(1.0, self.welcome.beat_s))

    def _spot_check(self) -> None:
        """Digest a chunk of each holding anew: one whose bytes changed unannounced is given up before it is read."""
        for weights in self.weights:
            chunk = weights.spot_check(self._chance)
            if chunk is not None:
                self._give_up(weights, chunk)

    def recheck(self, weights: LocalWeights, chunk: int) -> bool:
        """Digest a chunk that a reader found wrong; whether it is, and the holding therefore given up.

        A reader is not believed, only heard. The beats look at a chunk each: they come to one of 3,800 (60 GB) after up
        to two hours.
        """
        if weights.damage is None and 0 <= chunk < weights.layout.chunks.num_chunks and weights.has_changed(chunk):
            self._give_up(weights, chunk)
        return weights.damage is not None

    def _give_up(self, weights: LocalWeights, chunk: int) -> None:
        """Serve it no more: no new leases, descriptors stale. It stays in our beats, which say why."""
        with self._lock:
            if self._weights.get(weights.key) is not weights or weights.damage is not None:
                return
            error = weights.mark_damaged(chunk)
        self.server.hide(weights.key)
        if weights.state != "filling":
            weights.close()  # a fetch under way still reads into it; it fails at its end, and hides it
        log.error("member %s no longer serves %s: %s", self.id, weights.identity.model, error)
        self.on_damaged(weights, error)
        self.beat_now()

    def check(self) -> None:
        """Raise IntegrityError if bytes of a holding changed in memory after they were verified."""
        for weights in self.weights:
            if weights.damage is not None:
                raise weights.damage

    def _state(self) -> Beat:
        epoch = self._epoch()
        syncs = (msgspec.structs.replace(state(), grant_epoch=epoch) for state in self.syncs)
        return Beat(holdings=tuple(map(self._status, self.weights)), syncs=tuple(syncs))

    def _epoch(self) -> int:
        """What grants to read this member must name now."""
        assert self._grants is not None
        return self._grants.epoch()

    def _status(self, weights: LocalWeights) -> HoldingState:
        """What the hub is told of a holding."""
        return msgspec.structs.replace(weights.status(), grant_epoch=self._epoch())

    def _call_hub(self, call: Callable[[], T]) -> T:
        """Call the hub; where it does not know us (it started anew, or we were silent), greet and call again."""
        try:
            return call()
        except UnknownMember:
            self.welcome = self._greet()
            self._hub.beat(self.id, self._state())
            return call()

    def upstreams(self, weights: LocalWeights, *, can_read_storage: bool) -> UpstreamsReply:
        """Whom to read from. HubUnavailable when it is away."""
        request = UpstreamsRequest(member=self.id, holding=self._status(weights), can_read_storage=can_read_storage)
        return self._call_hub(lambda: self._hub.upstreams(request))

    def find_holders(self, asked: HoldingState, *, within_s: float) -> UpstreamsReply:
        """Who may be asked what the line of a key is: a holding of no chunks. HubUnavailable: not within so long."""
        request = UpstreamsRequest(member=self.id, holding=asked)
        return self._call_hub(lambda: self._hub.upstreams(request, within_s=within_s))

    def claim(self, weights: LocalWeights, *, ask: bool = True) -> ClaimReply:
        """What to read from storage, or with `ask=False` only give back. HubUnavailable when it is away."""
        request = ClaimRequest(member=self.id, holding=self._status(weights), ask=ask)
        return self._call_hub(lambda: self._hub.claim(request))

    def sync(self, name: str, grants: Sequence[str] = ()) -> SyncReply:
        """Who takes part in a sync, and the right to ask some of them. HubUnavailable when the hub is away."""
        request = SyncRequest(member=self.id, name=name, grants=tuple(grants))
        return self._call_hub(lambda: self._hub.sync(request))

    def complain(self, of: str, key: str, error: PenstockError, proof: Proof | None = None) -> None:
        """Tell the hub that a source could not be used; lost where the hub is away, or does not take it.

        Not for a source that is merely full (`SourceBusy`): the hub would no longer count what it has.
        """
        fault = "unreachable"
        for kind, word in _FAULTS:
            if isinstance(error, kind):
                fault = word
                break
        detail = error.message[:1024]
        complaint = Complaint(member=self.id, of=of, key=key, fault=fault, detail=detail, proof=proof)  # type: ignore[arg-type]
        with contextlib.suppress(PenstockError):
            self._call_hub(lambda: self._hub.complain(complaint))

    def peer(self, upstream: Upstream, key: str, *, stall_s: float | None = None) -> PeerClient:
        """A conversation with a member, about a key; `stall_s`: shorter than ours."""
        return PeerClient(
            upstream,
            member=self.id,
            key=key,
            same_host=upstream.host == self.host,
            stall_s=self._stall_s if stall_s is None else stall_s,
            trust=self.trust,
        )

    @property
    def min_bytes_per_s(self) -> float:
        """Pace below which an upstream is not used; 0: any pace will do."""
        return self._min_gb_per_s * GB

    # -- the end

    def leave(self, drain_s: float = 10.0) -> None:
        """Give no new leases, wait for readers at most `drain_s`, tell the hub, end. Idempotent.

        Does nothing in a forked child: the member is its parent.
        """
        if self._closing.is_set() or self._pid != os.getpid():
            return
        for weights in self.weights:
            weights.set_state("draining")
        self.beat_now()
        deadline = time.monotonic() + drain_s
        for weights in self.weights:
            self.hide(weights, max(0.0, deadline - time.monotonic()))
        self._closing.set()
        self._beat_now.set()
        self._beats.join()
        with contextlib.suppress(PenstockError):  # its lease runs out
            self._hub.leave(self.id)
        self._free()

    def _free(self) -> None:
        if hasattr(self, "server"):
            self.server.close()
        if hasattr(self, "links"):
            self.links.close()
        self._hub.close()
        self._runtime_dir.close()

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def _check_loopback(listen: str) -> None:
    """Check that only this host is listened to: a hub without tokens gives its grants to whoever reaches it.

    Raises:
        ConfigError: other hosts could reach it.
    """
    if host_and_port(listen)[0] not in LOOPBACK:
        message = f"a member at {listen} would be open to other hosts without a token"
        raise ConfigError(message, hint="give a token or certificates, or listen on 127.0.0.1")


_FAULTS: tuple[tuple[type[PenstockError], str], ...] = (
    (SourceStalled, "stalled"),
    (IntegrityError, "wrong bytes"),
    (StaleDescriptor, "stale"),
    (PermissionDenied, "refused"),
)
