"""The registration of a member at the hub, and the check of the grants that the hub signs."""

from __future__ import annotations

import os
import time

from penstock.errors import HubUnavailable, without_frames
from penstock.hub import messages
from penstock.hub.client import HubClient
from penstock.hub.grants import GrantChecker, GrantSigner
from penstock.logs import log_named

log = log_named("penstock.fleet")
AWAY_BEAT_S, AWAY_TTL_S = 2.0, 10.0
"""Interval and TTL of heartbeats in seconds before a hub has responded. They equal the hub's defaults."""
JOIN_AGAIN_S = 0.1


class Registration:
    """The registration of one member.

    Attributes:
        hello: the message that registers the member.
        welcome: the hub's last response. `open` sets it.
        away: the error that kept this member from joining, or None once it has joined.
        hub_is_away: whether the last heartbeat failed.
    """

    welcome: messages.Welcome

    def __init__(self, hub: HubClient, hello: messages.Hello) -> None:
        self.hello = hello
        self.away: HubUnavailable | None = None
        self.hub_is_away = False
        self._hub = hub
        self._grants: GrantChecker | None = None
        self._grant_key = b""

    def open(self, join_s: float | None, *, stall_s: float, needs_hub: bool) -> None:
        """Register at the hub. Raise HubUnavailable if the hub does not respond.

        Args:
            join_s: timeout in seconds for a hub that is not this host's hub. None means the client's timeout.
            stall_s: timeout in seconds for this host's hub.
            needs_hub: if False, an unresponsive hub of another host is not an error.
        """
        # This process may just have started this host's hub, which takes time on a busy host.
        timeout_s = None if self._hub.is_local else join_s
        deadline = time.monotonic() + stall_s
        while True:
            try:
                return self.renew(timeout_s)
            except HubUnavailable as error:
                if not self._hub.is_local and not needs_hub:
                    self.away, self.hub_is_away = error, True
                    without_frames(error)
                    log.warning(
                        "the hub is away, so this process reads from its fallback and joins the fleet later: %s", error
                    )
                    # Accept no grant until a hub sends its public key.
                    self._grants = GrantChecker(GrantSigner(os.urandom(32)).public_key, self.hello.member)
                    self.welcome = messages.Welcome(ttl_s=AWAY_TTL_S, beat_s=AWAY_BEAT_S, grant_key=b"")
                    return None
                if not self._hub.is_local or time.monotonic() >= deadline:
                    raise
            time.sleep(JOIN_AGAIN_S)

    def renew(self, timeout_s: float | None = None) -> None:
        """Register again at a hub that does not know the member."""
        welcome = self._hub.hello(self.hello, timeout_s=timeout_s)
        if self.away is not None:
            log.warning("member %s has joined the fleet, because its hub answers now", self.hello.member)
            self.away = None
        if welcome.grant_key != self._grant_key:
            self._grant_key = welcome.grant_key
            if self._grants is None:
                self._grants = GrantChecker(welcome.grant_key, self.hello.member)
            else:
                # Another thread may be using the checker for the new hub right now, so do not replace the checker.
                self._grants.trust(welcome.grant_key)
        self.welcome = welcome

    @property
    def epoch(self) -> int:
        """Return the epoch of the grants that this member accepts."""
        assert self._grants is not None
        return self._grants.epoch()

    def check_grant(self, request: messages.LeaseRequest) -> str:
        """Validate and consume a grant. Return the reader's caller. Raise GrantRefused for an invalid grant."""
        assert self._grants is not None
        return self._grants.check(request.grant, key=request.key, reader=request.member)
