"""The thread of a fetch that asks the hub for upstreams and tracks the state of the hub.

Known upstreams stay in use while the hub is away, because running transfers do not need the hub.
"""

from __future__ import annotations

import math
import threading
import time
from enum import Enum, auto

import msgspec

from penstock.engine.run import RunState
from penstock.errors import HubUnavailable, PenstockError, PermissionDenied
from penstock.fetcher.assignment import Assignment
from penstock.fetcher.report import Provenance
from penstock.hub.messages import ClaimReply
from penstock.peer.local_weights import LocalWeights
from penstock.peer.member import Member
from penstock.timing import Timing
from penstock.transfer.blame import is_fault


class HubState(Enum):
    """The state of the hub for a fetch, which decides whether storage is read with claims."""

    UNKNOWN = auto()
    ANSWERS = auto()
    AWAY = auto()
    REFUSES = auto()
    """The hub refused this member permanently, so storage will be read without claims."""
    UNUSED = auto()
    """Storage is read without claims, until the hub names upstreams again."""


class HubPoller(msgspec.Struct, eq=False, dict=True):
    """Asks for upstreams until it is closed. If `away` is set, storage is read without claims from the start.

    The first reply, which contains the first claim, sets `answered`. Setting `wanted` triggers the next request.
    """

    member: Member
    weights: LocalWeights
    assignment: Assignment
    ticket: RunState
    provenance: Provenance
    stall_s: float
    timing: Timing
    away: HubUnavailable | None

    def __post_init__(self) -> None:
        self.state = HubState.UNKNOWN
        self.answer = "not asked yet"
        self.answered = threading.Event()
        self.wanted = threading.Event()
        self._closing = threading.Event()
        self._changing = threading.Lock()
        self._first_claim: ClaimReply | None = None
        self._others_read_until = 0.0
        if self.assignment.can_read_storage and self.away is not None and self.become(HubState.UNUSED):
            self.provenance.faults.append(f"hub: {self.away.message}; storage is read without the fleet")
            self.provenance.why_storage = f"no hub responded: {self.away.message}"

    def become(self, state: HubState) -> bool:
        """Change the state, and return whether it changed. Only a reply from the hub ends the state UNUSED."""
        with self._changing:
            is_kept = self.state is HubState.UNUSED and state is not HubState.ANSWERS
            if is_kept or state in {self.state, HubState.UNKNOWN}:
                return False
            self.state = state
            return True

    def run(self) -> None:
        """Ask for upstreams repeatedly, as the body of the polling thread."""
        while not self._closing.is_set():
            self.wanted.clear()
            for reader in self.assignment.pop_failed():
                assert reader.error is not None
                member = reader.upstream.member
                if is_fault(reader.error) and self.member.complain(member, self.weights.key, reader.error):
                    with self.assignment.held():
                        self.assignment.failed.reported.add(member)
                reader.close()
            wait_s, full_s = self._ask()
            self.answered.set()
            self._closing.wait(self.rest_s)
            if full_s < wait_s:
                # A holder that refuses a reader still uses up the grant, so request a new grant.
                self.wanted.wait(full_s)
            elif not self.wanted.wait(rest_s := max(wait_s / 4, self.timing.hub_pause_s)):
                self.wait_while_fed(wait_s - rest_s)

    def _ask(self) -> tuple[float, float]:
        is_first = not self.answered.is_set()
        try:
            reply = self.member.upstreams(
                self.weights, can_read_storage=self.assignment.can_read_storage, is_first=is_first
            )
            if is_first:
                self._first_claim = reply.claim
            self.become(HubState.ANSWERS)
            # While other members make progress with storage, waiting for their chunks is not a stall.
            is_alive = 0 <= reply.reader_silent_s < self.stall_s / 2
            valid_s = 2 * max(reply.ask_again_s, 1.0) + self.timing.hub_word_s
            self._others_read_until = time.monotonic() + valid_s if is_alive else 0.0
            if not self.assignment.can_read_storage:
                self.answer = f"named {len(reply.upstreams)} members to read from"
            return reply.ask_again_s, self.assignment.follow(reply)
        except PenstockError as error:
            self.note_failure(error)
            return self.timing.hub_retry_s, math.inf

    def wait_while_fed(self, wait_s: float) -> None:
        """Wait at most `wait_s` until `wanted` is set or no upstream has a chunk for this fetch."""
        # Members that start together know few upstreams at first, and soon have received all chunks of those upstreams.
        until = time.monotonic() + wait_s
        while not self.assignment.is_idle() and (left_s := until - time.monotonic()) > 0:
            if self.wanted.wait(min(self.timing.fetch_turn_s, left_s)):
                return

    @property
    def rest_s(self) -> float:
        """Seconds to pause before the next request to a slow hub, short enough to detect a stall in time."""
        return min(self.member.hub.rest_s, self.stall_s / 8)

    def note_failure(self, error: PenstockError) -> None:
        """Record that the hub did not respond or refused this member."""
        is_refused = isinstance(error, PermissionDenied)
        self.answer = f"it refused: {error.message}" if is_refused else error.message
        self.become(HubState.REFUSES if is_refused else HubState.AWAY)
        if is_refused and not self.assignment.can_read_storage and not self.assignment.readers:
            self.ticket.fail(error)

    def do_others_read(self) -> bool:
        """Return whether other members are reading the missing chunks from storage, according to the hub."""
        return time.monotonic() < self._others_read_until

    def pop_first_claim(self) -> ClaimReply | None:
        """Return the claim from the first reply, or None if it was already returned."""
        first, self._first_claim = self._first_claim, None
        return first

    def close(self) -> None:
        """Stop the thread and all waits for this object."""
        self._closing.set()
        self.wanted.set()
        self.answered.set()
