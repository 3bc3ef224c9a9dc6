"""Division of the work among several holders, and grouping of tensors into buckets.

In: bytes that receivers take of teams, and of tensors. Out: each team's `Lines`, cut among its ranks; bucket numbers.
Not here: who the teams are (`match`), the plan they become part of (`sync`).

    the line of team {4, 9}: what receivers 0, 1, 2 take of it, end to end; each rank gives a stretch of it, so none
    more than its share, and few receivers take from two
        0        1        2
    |--------|--------|--------|
    4           ^9
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.plan.intersect import Groups
from penstock.types import I64, MIB

BUCKET_BYTES = 256 * MIB
"""Most bytes a receiver takes in one bucket, but for a larger tensor: 5 ms at 50 GB/s, and two buckets a layer where
128 ranks take a trillion parameters, so that stages overlap. Source: docs/design/004-sync.md."""

_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Lines:
    """The bytes that each receiver takes of each team, as stretches of one line on which teams lie end to end.

    Receiver r's shares are `first[r]:first[r + 1]`, by team; its share of a team begins at `start`. A rank of a team
    gives what lies before its `stop` and not before the one's before it.
    """

    first: I64
    team: I64
    start: I64
    nbytes: I64
    stop: I64
    """Per rank of each team, in their order."""


def draw_lines(num_receivers: int, receiver: I64, team: I64, nbytes: I64, teams: Groups) -> Lines:
    """Return the lines of these demands (any order, several of a receiver and team), cut so that ranks give alike.

    Cost: a few microseconds a team of several ranks.
    """
    num_teams = len(teams.first) - 1
    # One number for receiver and team, so that a single sort finds equal demands.
    code, of = np.unique(receiver * num_teams + team, return_inverse=True)
    total = np.zeros(len(code), np.int64)
    np.add.at(total, of, nbytes)
    receiver, team = code // max(num_teams, 1), code % max(num_teams, 1)
    along = np.lexsort((receiver, team))
    start = np.zeros(len(code), np.int64)
    start[along] = np.cumsum(total[along]) - total[along]
    whole = np.zeros(num_teams, np.int64)
    np.add.at(whole, team, total)
    return Lines(
        first=np.searchsorted(receiver, np.arange(num_receivers + 1)),
        team=team,
        start=start,
        nbytes=total,
        stop=np.cumsum(_quotas(whole, teams)),
    )


def _quotas(whole: I64, teams: Groups) -> I64:
    """Return the bytes that each rank of each team gives, dealt to the ranks that have least so far."""
    quota = np.repeat(whole, teams.counts)
    load = np.zeros(int(teams.values.max(initial=-1)) + 1, np.int64)
    alone = np.repeat(teams.counts == 1, teams.counts)
    np.add.at(load, teams.values[alone], quota[alone])
    # Teams of few ranks first: they have the least choice, and larger teams can then fill what they left uneven.
    for t in np.argsort(teams.counts, kind="stable")[int((teams.counts == 1).sum()) :].tolist():
        span = slice(int(teams.first[t]), int(teams.first[t + 1]))
        ranks = teams.values[span]
        order = np.argsort(load[ranks], kind="stable")
        before = load[ranks[order]]
        # The level that all who are below it reach together: k of them, once it is not above the next one's load.
        # Floats lose less than a byte here; the bytes lost by rounding down go to the first rank below.
        levels = (np.cumsum(before) + int(whole[t])) / np.arange(1, len(before) + 1)
        k = int(np.argmax(np.append(levels[:-1] <= before[1:], True))) + 1
        fill = np.zeros(len(before), np.int64)
        fill[:k] = np.maximum(np.floor(levels[k - 1]).astype(np.int64) - before[:k], 0)
        # Shares must sum to the whole exactly: a byte given to no rank would be a hole in the plan.
        fill[0] += int(whole[t]) - int(fill.sum())
        quota[span][order] = fill
        load[ranks] += quota[span]
    return quota


def layer_order(names: Sequence[str]) -> tuple[I64, I64]:
    """Return tensors by layer (the first number between dots; those of none come first), and each one's layer."""
    layer = np.array([int(match[1]) if (match := _LAYER.search(name)) else -1 for name in names], np.int64)
    # Stable, so that equal inputs give equal plans, in the order of the layouts.
    order = np.argsort(layer, kind="stable")
    return order, layer[order]


def buckets(layer: I64, receiver: I64, place: I64, nbytes: I64, bucket_bytes: int) -> I64:
    """Return the bucket of each tensor: whole layers while they fit, else parts of one.

    Args:
        layer: of each tensor, ascending.
        receiver, place, nbytes: what receivers take of which tensor; sorted by receiver, then place.
        bucket_bytes: most that one receiver takes in a bucket, unless of one tensor.
    """
    num_tensors = len(layer)
    edges = np.flatnonzero(np.diff(receiver)) + 1
    takers = [(p, np.cumsum(n)) for p, n in zip(np.split(place, edges), np.split(nbytes, edges), strict=True)]
    layer_starts = np.append(np.flatnonzero(np.diff(layer, prepend=layer[:1] - 1)), num_tensors)
    starts, at = [], 0
    while at < num_tensors:
        starts.append(at)
        stop = num_tensors
        # The bucket ends where the first receiver is full: buckets are the same for all, so that a source makes each
        # once.
        for places, sums in takers:
            row = int(np.searchsorted(places, at))
            before = int(sums[row - 1]) if row else 0
            full = int(np.searchsorted(sums, before + bucket_bytes, side="right"))
            if full < len(places):
                stop = min(stop, int(places[full]))
        # A tensor larger than a bucket must still be in one, or the loop would not go on.
        stop = max(stop, at + 1)
        # Back to a layer's begin where that leaves anything: a bucket is ready once its layer is, and not before.
        edge = int(layer_starts[np.searchsorted(layer_starts, stop, side="right") - 1])
        at = edge if edge > at else stop
    return np.searchsorted(np.array(starts, np.int64), np.arange(num_tensors), side="right") - 1
