"""Claims on storage: one live member at a time reads each chunk, in pieces that shrink as more members join."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError
from penstock.hub.messages import ClaimRequest, HoldingState, Ranges
from penstock.plan.schedule import to_ranges
from penstock.types import Bools
from penstock.units import GIB, MIB

MIN_PIECE_BYTES = 64 * MIB
"""Smallest piece: four chunks, or tens of milliseconds at 10 Gb/s, so that a request is short compared with the read.
Source: docs/design/fetch.md."""
MAX_PIECE_BYTES = GIB
"""Largest piece. If a member dies, other members must reread at most this many bytes. Source: docs/design/fetch.md."""
PROGRESS_CHECK_S = 1.0
"""Interval between progress checks. It is well below `CLAIM_STALL_S`."""
CLAIM_STALL_S = 30.0
"""Seconds without received bytes after which a claimant's chunks become free. Source: `Settings.stall_s`."""


# The type of `Claims.owner`, little-endian because directories on several hosts share the table.
_OWNER = np.dtype("<u2")
# Owners are 16-bit numbers, and 0 means no owner.
_MAX_CLAIMANTS = (1 << 16) - 2


class Claims(msgspec.Struct, frozen=True, array_like=True):
    """The table of claims for one key, with the member to which each chunk is assigned."""

    members: tuple[str, ...] = ()
    num_have: tuple[int, ...] = ()
    """For each member, the number of chunks that it had at the last progress check."""
    since: tuple[float, ...] = ()
    """For each member, the time on the hub's clock at which it last got a chunk or received a byte."""
    looked: float = 0.0
    """Time of the last progress check."""
    owner: bytes = b""
    """A uint16 for each chunk: its owner's position in `members`, counted from 1, or 0 without an owner."""

    def owners(self, num_chunks: int) -> npt.NDArray[np.uint16]:
        """Return `owner` as a writable array."""
        # Most keys never have a claim, so an empty table is stored as no bytes.
        return np.frombuffer(self.owner, _OWNER).copy() if self.owner else np.zeros(num_chunks, _OWNER)


def chunk_mask(ranges: Iterable[tuple[int, int]], num_chunks: int) -> Bools:
    """Return ranges as a boolean array over all chunks. Chunks after the end are ignored."""
    mask = np.zeros(num_chunks, np.bool_)
    for start, stop in ranges:
        mask[start:stop] = True
    return mask


def check_ranges(name: str, ranges: Ranges, num_chunks: int) -> int:
    """Return the number of chunks in `ranges`. Raise PlanError unless the ranges are sorted, disjoint and in bounds."""
    end = total = 0
    for start, stop in ranges:
        if not end <= start < stop <= num_chunks:
            raise PlanError(f"the range [{start}, {stop}) in {name} must be non-empty and inside [{end}, {num_chunks})")
        end = stop
        total += stop - start
    return total


def piece_chunks(holding: HoldingState, num_sharing: int, num_free: int) -> int:
    """Return the number of chunks in a piece: a quarter of an equal share, within the limits, and at least one chunk.

    Towards the end a piece is a share of the remaining chunks, so that all readers finish at about the same time.
    """
    chunk_bytes = holding.nbytes / max(1, holding.num_chunks)
    fair = holding.nbytes / max(1, num_sharing)
    share = max(min(fair / 4, num_free * chunk_bytes / max(1, num_sharing)), fair / 64)
    piece_bytes = min(max(share, MIN_PIECE_BYTES), MAX_PIECE_BYTES)
    return max(1, round(piece_bytes / max(1.0, chunk_bytes)))


def drop_members(claims: Claims, gone: Collection[str], num_chunks: int) -> Claims:
    """Return the table without members that have left or died."""
    if not gone:
        return claims
    # Positions in the table change, so one lookup renumbers the owners of all chunks. The number of a removed member
    # becomes 0.
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
    """Return the table after a member's report of the chunks that it has and the chunks that it is reading.

    The member becomes the owner of the chunks that it is reading and that have no owner, for example after a restart of
    the hub. The member's other assigned chunks become free.
    """
    owner = claims.owners(holding.num_chunks)
    members, num_have, since = claims.members, claims.num_have, claims.since
    still = chunk_mask(holding.claims, holding.num_chunks)
    if member not in members:
        # A full table has no number for this member. The member still reads its chunks, but others may read them too.
        if not holding.claims or len(members) >= _MAX_CLAIMANTS:
            return claims
        members, num_have, since = (*members, member), (*num_have, 0), (*since, now)
    me = members.index(member) + 1
    mine = owner == me
    # The member gave up the other chunks, or failed to read them from storage.
    owner[mine & ~still & ~chunk_mask(holding.have, holding.num_chunks)] = 0
    owner[still & (owner == 0)] = me
    return Claims(members, num_have, since, claims.looked, owner.tobytes())


def update_table(
    claims: Claims, request: ClaimRequest, *, gone: Collection[str], reported: Mapping[str, HoldingState], now: float
) -> Claims:
    """Return the table without `gone` members, updated from the reports of the caller and other readers."""
    num_chunks = request.holding.num_chunks
    claims = drop_members(claims, gone, num_chunks)
    for member, holding in reported.items():
        if holding.num_chunks == num_chunks:
            claims = update_member(claims, member, holding, now)
    return update_member(claims, request.member, request.holding, now)


def note_progress(claims: Claims, progress: Mapping[str, int], now: float, *, silent_s: Mapping[str, float]) -> Claims:
    """Record which members have more chunks (`progress`) or received bytes (`silent_s`) since the last check."""
    num_have = [progress.get(member, before) for member, before in zip(claims.members, claims.num_have, strict=True)]
    since = []
    for member, after, before, then in zip(claims.members, num_have, claims.num_have, claims.since, strict=True):
        # A large chunk takes longer than the interval between checks, so received bytes also count as progress.
        heard = now - silent_s[member] if member in silent_s else then
        since.append(now if after > before else max(then, heard))
    return Claims(claims.members, tuple(num_have), tuple(since), now, claims.owner)


def assign_piece(
    claims: Claims,
    member: str,
    holding: HoldingState,
    *,
    readable: Bools,
    unreachable: Collection[str],
    num_sharing: int,
    now: float,
) -> tuple[Claims, Ranges]:
    """Assign a piece of the first chunks that no member has or is reading.

    Args:
        readable: chunks of the members from which the caller can read.
        unreachable: members that the caller cannot reach, whose claims therefore do not bind the caller.
        num_sharing: number of members that read from storage.
    """
    owner = claims.owners(holding.num_chunks)
    counts = np.ones(len(claims.members) + 1, np.bool_)
    counts[0] = False
    counts[1:] = np.array(claims.since, np.float64) >= now - CLAIM_STALL_S
    for name in unreachable:
        if name in claims.members:
            counts[claims.members.index(name) + 1] = False
    # Even a stalled caller must not get chunks that it is already reading.
    if member in claims.members:
        counts[claims.members.index(member) + 1] = True
    # The caller reads a reachable member's chunks from that member and not from storage.
    taken = readable | chunk_mask(holding.have, holding.num_chunks) | counts[owner]
    free = np.flatnonzero(~taken)
    free = free[: piece_chunks(holding, num_sharing, len(free))]
    if not len(free) or len(claims.members) >= _MAX_CLAIMANTS:
        return claims, ()
    members, num_have, since = claims.members, list(claims.num_have), list(claims.since)
    if member not in members:
        members, num_have, since = (*members, member), [*num_have, 0], [*since, now]
    me = members.index(member)
    num_have[me], since[me] = sum(stop - start for start, stop in holding.have), now
    owner[free] = me + 1
    return Claims(members, tuple(num_have), tuple(since), claims.looked, owner.tobytes()), to_ranges(free)


def check_state(holding: HoldingState) -> None:
    """Raise PlanError if a reported state contradicts itself."""
    if holding.key != holding.identity.key():
        message = f"key {holding.key} does not belong to the identity in the message"
        raise PlanError(message, hint="use the key from `Identity.key()`")
    num_have = check_ranges("have", holding.have, holding.num_chunks)
    check_ranges("claims", holding.claims, holding.num_chunks)
    if holding.state == "whole" and num_have != holding.num_chunks:
        raise PlanError(f"the state is `whole`, but the member has only {num_have} of {holding.num_chunks} chunks")
