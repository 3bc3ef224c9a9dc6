"""Fair rates: flows share each link evenly, and no link exceeds its capacity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_tools.links import fair_rates


def rates(links: list[list[int]], capacity: list[float], bound: list[float] | None = None) -> list[float]:
    found = fair_rates(np.array(links), np.array(capacity), None if bound is None else np.array(bound))
    return found.tolist()


def test_single_flow_uses_narrowest_link() -> None:
    assert rates([[0, 1]], [10.0, 4.0]) == [4.0]


def test_flows_share_link_evenly() -> None:
    assert rates([[0, 1], [0, 2]], [10.0, 99.0, 99.0]) == [5.0, 5.0]


def test_unused_rate_goes_to_other_flows() -> None:
    assert rates([[0, 1], [0, 2]], [10.0, 2.0, 99.0]) == [2.0, 8.0]


def test_limited_flow_leaves_remaining_bandwidth_to_others() -> None:
    assert rates([[0, 1], [0, 1]], [10.0, 99.0], [3.0, np.inf]) == [3.0, 7.0]


def test_infinite_link_does_not_limit_rates() -> None:
    assert rates([[0, 1]], [10.0, np.inf]) == [10.0]


def filled(links: np.ndarray, capacity: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Compute fair rates by progressive filling, the definition of max-min fairness."""
    got, open_flows = np.zeros(len(links)), set(range(len(links)))
    while open_flows:
        used = np.array([sum(got[f] for f in range(len(links)) if link in links[f]) for link in range(len(capacity))])
        users = np.array([sum(link in links[f] for f in open_flows) for link in range(len(capacity))])
        steps = [(capacity[link] - used[link]) / users[link] for link in range(len(capacity)) if users[link]]
        step = min(*steps, *(bound[f] - got[f] for f in open_flows), np.inf)
        for f in open_flows:
            got[f] += step
        used = used + users * step
        full = {link for link in range(len(capacity)) if used[link] >= capacity[link] * (1 - 1e-9)}
        open_flows -= {f for f in open_flows if full & set(links[f]) or got[f] >= bound[f] * (1 - 1e-9)}
    return got


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_rates_match_progressive_filling(data) -> None:
    num_links = data.draw(st.integers(2, 6))
    capacity = np.array(data.draw(st.lists(st.integers(1, 50), min_size=num_links, max_size=num_links)), float)
    pairs = st.tuples(*[st.integers(0, num_links - 1)] * 2).filter(lambda pair: pair[0] != pair[1])
    links = np.array(data.draw(st.lists(pairs, min_size=1, max_size=8)))
    bound = np.array(data.draw(st.lists(st.integers(1, 60), min_size=len(links), max_size=len(links))), float)
    found = fair_rates(links, capacity, bound)
    assert found == pytest.approx(filled(links, capacity, bound), rel=1e-6)
    carried = np.bincount(links.reshape(-1), weights=np.repeat(found, 2), minlength=num_links)
    assert (carried <= capacity * (1 + 1e-9)).all()
