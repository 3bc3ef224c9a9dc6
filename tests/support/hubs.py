"""A hub's directory with a manual clock and minimal members, for tests of coordination.

Real members are in `peer.member`, and a hub's server is in `hub.server`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.hub.messages import (
    Beat,
    ClaimReply,
    ClaimRequest,
    Hello,
    HoldingState,
    Identity,
    Ranges,
    State,
    UpstreamsRequest,
)
from penstock.types import MIB
from penstock_hub.directory import Directory
from penstock_hub.limits import Capacity
from penstock_hub.store import MemoryStore, Store

CHUNK_BYTES = 16 * MIB
IDENTITY = Identity(model="llama", revision="w1-0", dtype="BF16")


def key_state(
    have: Ranges = (),
    *,
    claims: Ranges = (),
    num_chunks: int = 100,
    identity: Identity = IDENTITY,
    state: State | None = None,
    **more: object,
) -> HoldingState:
    """Return the state of a member with some chunks of 16 MiB. It is whole if it has all chunks."""
    num_have = sum(stop - start for start, stop in have)
    return HoldingState(
        key=identity.key(),
        identity=identity,
        num_chunks=num_chunks,
        nbytes=num_chunks * CHUNK_BYTES,
        have=have,
        claims=claims,
        state=state or ("whole" if num_have == num_chunks else "filling"),
        **more,  # type: ignore[arg-type]
    )


@dataclass(slots=True)
class HubBench:
    """A store, any number of directories on it, and a clock in `now`."""

    now: float = 1000.0
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self.store = MemoryStore(clock=lambda: self.now)

    def hub(self, *, fresh: bool = True, **capacity: int) -> Directory:
        """Return a directory with heartbeats every 2 s, which removes members after 10 s."""
        limits = Capacity(**capacity)
        return Directory(self.store, fresh=fresh, clock=lambda: self.now, timer=lambda: self.now, capacity=limits)

    def join(self, hub: Directory, *members: str, host: str = "", rack: str = "") -> None:
        """Send a hello for each member. Each has its own host if none is given."""
        for member in members:
            hub.hello(Hello(member=member, host=host or f"host-{member}", doors=(f"unix:///{member}",), rack=rack))

    def beat(self, hub: Directory, member: str, *holdings: HoldingState) -> None:
        """Send a heartbeat with everything that the member holds."""
        hub.beat(member, Beat(holdings=holdings))

    def claim(self, hub: Directory, member: str, state: HoldingState, *, ask: bool = True) -> ClaimReply:
        """Return the chunks that the member should read."""
        return hub.claim(ClaimRequest(member=member, holding=state, ask=ask))

    def parents(self, hub: Directory, states: Iterable[tuple[str, HoldingState]]) -> dict[str, tuple[str, ...]]:
        """Return the upstreams of each member. Each asks twice, so that all members are known."""
        asked = list(states)
        found = {}
        for _ in range(2):
            for member, state in asked:
                reply = hub.upstreams(UpstreamsRequest(member=member, holding=state))
                found[member] = tuple(upstream.member for upstream in reply.upstreams)
        return found


def chunks(ranges: Ranges) -> set[int]:
    """Return the chunk numbers in the ranges."""
    return {chunk for start, stop in ranges for chunk in range(start, stop)}
