"""Claims on storage: each chunk is read by one live member at a time, in pieces that shrink as more members join.

In: what was given so far, what the asker still reads, what members have. Out: the new table, the chunks given.
Not here: who is alive and who can be reached (`directory`), where the table is kept (`store`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError
from penstock.hub.messages import ClaimRequest, HoldingState, Ranges
from penstock.plan.chunks import to_ranges
from penstock.types import GIB, MIB

Bools = npt.NDArray[np.bool_]

MIN_PIECE_BYTES = 64 * MIB
"""Smallest piece: four chunks, tens of milliseconds of a 10 Gb/s store, so that asking costs nothing beside reading.
Source: docs/design/003-fetch.md."""
MAX_PIECE_BYTES = GIB
"""Largest piece: what a member that dies has others read again, at most. Source: docs/design/003-fetch.md."""
PROGRESS_CHECK_S = 1.0
"""How often it is noted who got on: well below `CLAIM_STALL_S`."""
CLAIM_STALL_S = 30.0
"""A claimant that received nothing for so long no longer keeps others from its chunks. Source: `Settings.stall_s`."""


_OWNER = np.dtype("<u2")
_MAX_CLAIMANTS = (1 << 16) - 2


class Claims(msgspec.Struct, frozen=True, array_like=True):
    """The table of claims of one key: the member that each chunk was assigned to."""

    members: tuple[str, ...] = ()
    num_have: tuple[int, ...] = ()
    """Per member, when last looked at; it grows while the member gets on."""
    since: tuple[float, ...] = ()
    """Per member, when it last grew or received a byte, by the hub's clock."""
    looked: float = 0.0
    """When that was last looked at, of all."""
    owner: bytes = b""
    """uint16 a chunk: 0 is nobody, else the place among `members`, from 1."""

    def owners(self, num_chunks: int) -> npt.NDArray[np.uint16]:
        """`owner` as a column to change."""
        if not self.owner:
            return np.zeros(num_chunks, _OWNER)
        return np.frombuffer(self.owner, _OWNER).copy()


def chunk_mask(ranges: Iterable[tuple[int, int]], num_chunks: int) -> Bools:
    """Return ranges as a boolean array over all chunks; chunks past the end are left out."""
    found = np.zeros(num_chunks, np.bool_)
    for start, stop in ranges:
        found[start:stop] = True
    return found


def check_ranges(name: str, ranges: Ranges, num_chunks: int) -> int:
    """Check that ranges are sorted, disjoint and inside the chunks; return their number of chunks.

    Raises:
        PlanError: they are not.
    """
    end = total = 0
    for start, stop in ranges:
        if not end <= start < stop <= num_chunks:
            raise PlanError(f"{name} has [{start}, {stop}) after {end}, of {num_chunks} chunks")
        end = stop
        total += stop - start
    return total


def piece_chunks(holding: HoldingState, num_sharing: int, num_free: int) -> int:
    """Return the number of chunks of one piece: a quarter of an equal share, within the bounds; at least one.

    Towards the end a share of what is left, so that all who read end at about the same time; but no crumbs.
    """
    chunk_bytes, fair = holding.nbytes / max(1, holding.num_chunks), holding.nbytes / max(1, num_sharing)
    share = max(min(fair / 4, num_free * chunk_bytes / max(1, num_sharing)), fair / 64)
    wanted = min(max(share, MIN_PIECE_BYTES), MAX_PIECE_BYTES)
    return max(1, round(wanted / max(1.0, chunk_bytes)))


def drop_members(claims: Claims, gone: Collection[str], num_chunks: int) -> Claims:
    """Return the table without members that have left or died."""
    if not gone:
        return claims
    rest = [place for place, member in enumerate(claims.members) if member not in gone]
    renamed = np.zeros(len(claims.members) + 1, _OWNER)
    renamed[np.array(rest, np.int64) + 1] = np.arange(1, len(rest) + 1)
    return Claims(
        tuple(claims.members[place] for place in rest),
        tuple(claims.num_have[place] for place in rest),
        tuple(claims.since[place] for place in rest),
        claims.looked,
        renamed[claims.owners(num_chunks)].tobytes(),
    )


def update_member(claims: Claims, member: str, holding: HoldingState, now: float) -> Claims:
    """Return the table after a member reported the chunks that it has and still reads.

    Of what it was given, it keeps what it has and what it still reads; the rest goes back. What it reads and nobody was
    given (the hub is new) it is given; if two say they read the same, who came first keeps it.
    """
    owner = claims.owners(holding.num_chunks)
    members, num_have, since = claims.members, claims.num_have, claims.since
    still = chunk_mask(holding.claims, holding.num_chunks)
    if member not in members:
        if not holding.claims or len(members) >= _MAX_CLAIMANTS:
            return claims
        members, num_have, since = (*members, member), (*num_have, 0), (*since, now)
    me = members.index(member) + 1
    mine = owner == me
    owner[mine & ~still & ~chunk_mask(holding.have, holding.num_chunks)] = 0
    owner[still & (owner == 0)] = me
    return Claims(members, num_have, since, claims.looked, owner.tobytes())


def update_table(
    claims: Claims, request: ClaimRequest, *, gone: Collection[str], told: Mapping[str, HoldingState], now: float
) -> Claims:
    """Return the table without dead members, and with what the caller and the other readers report.

    Args:
        claims: the table before.
        request: of the asker.
        gone: members that live no more.
        told: what others say of themselves that read from storage; news where the table was lost.
        now: the hub's clock.
    """
    num_chunks = request.holding.num_chunks
    claims = drop_members(claims, gone, num_chunks)
    for member, holding in told.items():
        if member not in claims.members and holding.num_chunks == num_chunks:
            claims = update_member(claims, member, holding, now)
    return update_member(claims, request.member, request.holding, now)


def note_progress(claims: Claims, progress: Mapping[str, int], now: float, *, silent_s: Mapping[str, float]) -> Claims:
    """Record the members that made progress since the last check.

    Args:
        claims: the table.
        progress: chunks that members have.
        now: the hub's clock.
        silent_s: `HoldingState.silent_s` of those that read from storage.
    """
    found = [progress.get(member, before) for member, before in zip(claims.members, claims.num_have, strict=True)]
    since = []
    for member, after, before, then in zip(claims.members, found, claims.num_have, claims.since, strict=True):
        heard = now - silent_s[member] if member in silent_s else then
        since.append(now if after > before else max(then, heard))
    return Claims(claims.members, tuple(found), tuple(since), now, claims.owner)


def assign_piece(
    claims: Claims,
    member: str,
    holding: HoldingState,
    *,
    had: Bools,
    unheard: Collection[str],
    num_sharing: int,
    now: float,
) -> tuple[Claims, Ranges]:
    """Assign one piece of the chunks that no member has or reads, from the front.

    Args:
        claims: the settled table.
        member: who asks.
        holding: what it has and reads.
        had: chunks of members it can take them from.
        unheard: members whose claims do not count for the asker, who cannot reach them.
        num_sharing: members that read from storage.
        now: the hub's clock.
    """
    owner = claims.owners(holding.num_chunks)
    counts = np.ones(len(claims.members) + 1, np.bool_)
    counts[0] = False
    counts[1:] = np.array(claims.since, np.float64) >= now - CLAIM_STALL_S
    for name in unheard:
        if name in claims.members:
            counts[claims.members.index(name) + 1] = False
    if member in claims.members:
        counts[claims.members.index(member) + 1] = True
    taken = had | chunk_mask(holding.have, holding.num_chunks) | counts[owner]
    free = np.flatnonzero(~taken)
    free = free[: piece_chunks(holding, num_sharing, len(free))]
    members, num_have, since = claims.members, list(claims.num_have), list(claims.since)
    if not len(free) or len(members) >= _MAX_CLAIMANTS:
        return claims, ()
    if member not in members:
        members, num_have, since = (*members, member), [*num_have, 0], [*since, now]
    me = members.index(member)
    num_have[me], since[me] = sum(stop - start for start, stop in holding.have), now
    owner[free] = me + 1
    return Claims(members, tuple(num_have), tuple(since), claims.looked, owner.tobytes()), to_ranges(free)


def check_state(holding: HoldingState) -> None:
    """Check that a reported state is consistent.

    Raises:
        PlanError: it contradicts itself.
    """
    if holding.key != holding.identity.key():
        raise PlanError(f"key {holding.key} is not of the identity given", hint="the key is `Identity.key()`")
    num_have = check_ranges("have", holding.have, holding.num_chunks)
    check_ranges("claims", holding.claims, holding.num_chunks)
    if holding.state == "whole" and num_have != holding.num_chunks:
        raise PlanError(f"whole, with {num_have} of {holding.num_chunks} chunks")
