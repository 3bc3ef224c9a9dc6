"""Which chunks a member reads from storage: each chunk one live member's at a time, in pieces that shrink as more join.

In: what was given so far, what the asker still reads, what members have. Out: the new table, the chunks given.
Not here: who is alive and who can be reached (`directory`), where the table is kept (`store`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError
from penstock.fleet.messages import HoldingState, Ranges
from penstock.plan.chunks import to_ranges
from penstock.types import GIB, MIB

Bools = npt.NDArray[np.bool_]

MIN_PIECE_BYTES = 64 * MIB
"""Smallest piece: four chunks, tens of milliseconds of a 10 Gb/s store, so that asking costs nothing beside reading.
Source: docs/design/003-fetch.md."""
MAX_PIECE_BYTES = GIB
"""Largest piece: what a member that dies has others read again, at most. Source: docs/design/003-fetch.md."""
CLAIM_STALL_S = 30.0
"""A claimant that gained no chunk for so long no longer keeps others from its chunks. Source: `Settings.stall_s`."""


class Claimed(msgspec.Struct, frozen=True, array_like=True):
    """What one member was given of one key: what it reads, and what it has read and others may not have seen yet."""

    ranges: Ranges
    num_have: int
    """When last looked at; it grows while the member gets on."""
    since: float
    """When it last grew, by the hub's clock."""


Claims = dict[str, Claimed]


def mask(ranges: Iterable[tuple[int, int]], num_chunks: int) -> Bools:
    """Ranges as a column of truth values; what lies past the end is left out."""
    found = np.zeros(num_chunks, np.bool_)
    for start, stop in ranges:
        found[start:stop] = True
    return found


def ranges_of(chunks: Bools) -> Ranges:
    """The reverse of `mask`."""
    return to_ranges(np.flatnonzero(chunks))


def check_ranges(name: str, ranges: Ranges, num_chunks: int) -> int:
    """Sorted, apart, inside; the number of chunks.

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


def piece_chunks(holding: HoldingState, num_sharing: int) -> int:
    """Chunks of one piece: a quarter of an equal share, within the bounds; at least one."""
    share = holding.nbytes / max(1, num_sharing) / 4
    wanted = min(max(share, MIN_PIECE_BYTES), MAX_PIECE_BYTES)
    return max(1, round(wanted * holding.num_chunks / max(1, holding.nbytes)))


def settle(
    claims: Claims, member: str, holding: HoldingState, *, gone: Iterable[str], progress: Mapping[str, int], now: float
) -> Claims:
    """The table once the dead are out of it, the asker's own is what it says, and progress is noted.

    Args:
        claims: the table so far.
        member: who asks.
        holding: what it has and still reads; of what it was given, the rest goes back.
        gone: members that live no more.
        progress: chunks that members have, of those known.
        now: the hub's clock.
    """
    settled: Claims = {}
    dead = set(gone)
    for name, claimed in claims.items():
        if name in dead or name == member:
            continue
        num_have = progress.get(name, claimed.num_have)
        settled[name] = claimed if num_have <= claimed.num_have else Claimed(claimed.ranges, num_have, now)
    mine = claims.get(member)
    total = holding.num_chunks
    still = mask(holding.claims, total)
    num_have = sum(stop - start for start, stop in holding.have)
    since = now
    if mine is not None:
        since = now if num_have > mine.num_have else mine.since
        still |= mask(mine.ranges, total) & mask(holding.have, total)
    for name, claimed in settled.items():
        if name != member:
            # After the hub's own restart two may say they read the same: who came first keeps it.
            still &= ~mask(claimed.ranges, total) | mask(holding.have, total)
    ranges = ranges_of(still)
    if ranges:
        settled[member] = Claimed(ranges, num_have, since)
    return settled


def give(
    claims: Claims,
    member: str,
    holding: HoldingState,
    *,
    had: Bools,
    unheard: Iterable[str],
    num_sharing: int,
    now: float,
) -> tuple[Claims, Ranges]:
    """One piece of what nobody has and nobody reads, from the front.

    Args:
        claims: the settled table.
        member: who asks.
        holding: what it has and reads.
        had: chunks of members it can take them from.
        unheard: members whose claims do not count for the asker, who cannot reach them.
        num_sharing: members that read from storage.
        now: the hub's clock.
    """
    taken = had | mask(holding.have, holding.num_chunks)
    skip = set(unheard)
    for name, claimed in claims.items():
        stalled = now - claimed.since > CLAIM_STALL_S and name != member
        if name not in skip and not stalled:
            taken |= mask(claimed.ranges, holding.num_chunks)
    free = np.flatnonzero(~taken)[: piece_chunks(holding, num_sharing)]
    if not len(free):
        return claims, ()
    given = to_ranges(free)
    mine = claims.get(member)
    before = mask(mine.ranges if mine else (), holding.num_chunks)
    num_have = sum(stop - start for start, stop in holding.have)
    after = Claimed(ranges_of(before | mask(given, holding.num_chunks)), num_have, now)
    return {**claims, member: after}, given


def check_holding(holding: HoldingState) -> None:
    """Nothing, if it is of one piece.

    Raises:
        PlanError: it contradicts itself.
    """
    if holding.key != holding.identity.key():
        raise PlanError(f"key {holding.key} is not of the identity given", hint="the key is `Identity.key()`")
    num_have = check_ranges("have", holding.have, holding.num_chunks)
    check_ranges("claims", holding.claims, holding.num_chunks)
    if holding.state == "whole" and num_have != holding.num_chunks:
        raise PlanError(f"whole, with {num_have} of {holding.num_chunks} chunks")
