"""Sharing of links by flows: max-min fair rates, with a bound on each flow of its own.

In: which links each flow crosses, capacities, bounds. Out: rates; bytes a link carried, as they add up.
Not here: which flows there are and when (`simulate`), which links a cluster has (`cluster`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.types import I64

F64 = npt.NDArray[np.float64]


def fair_rates(links: I64, capacity: F64, bound: F64 | None = None) -> F64:
    """Return bytes per second of each flow.

    Args:
        links: [num_flows, width] the links it crosses, a link at most once; a link of infinite capacity bounds nothing.
        capacity: of each link.
        bound: of each flow; None: none has one.

    A flow's share is the least of what its links have left for each of theirs. A link that gives all of its flows
    their least is full at those rates, whatever the others do; all such links are settled at once.
    Cost: linear in flows for each round; rounds are the levels of rates there are.
    """
    num_flows, num_links = len(links), len(capacity)
    rates = np.zeros(num_flows)
    open_flows = np.arange(num_flows)
    left = capacity.astype(np.float64).copy()
    while len(open_flows):
        mine = links[open_flows]
        users = np.bincount(mine.reshape(-1), minlength=num_links)
        share = np.full(num_links, np.inf)
        used = users > 0
        # Subtracting rates can leave a full link a rounding error below zero.
        share[used] = np.maximum(left[used], 0.0) / users[used]
        least = share[mine].min(axis=1)
        if bound is not None:
            least = np.minimum(least, bound[open_flows])
        assert np.isfinite(least).all(), "a flow that nothing bounds"
        # The least any flow of a link gets: where that is the link's own share, the link is settled.
        lowest = np.full(num_links, np.inf)
        # Column by column: `minimum.at` over a flat index would need the values repeated for each link.
        for column in mine.T:
            np.minimum.at(lowest, column, least)
        # With a tolerance: rounding must not leave a link a hair above its share, and the loop with a round for each
        # flow.
        settled = used & (lowest >= share * (1 - 1e-12))
        done = settled[mine].any(axis=1)
        if bound is not None:
            # A bound is a link of one flow: settled where no link would give less.
            done |= least >= bound[open_flows]
        fixed = open_flows[done]
        rates[fixed] = least[done]
        for column in mine[done].T:
            np.subtract.at(left, column, least[done])
        open_flows = open_flows[~done]
    return rates
