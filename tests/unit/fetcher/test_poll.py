"""Time of the next request for upstreams: when the hub says so, or sooner when nothing is left to read."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.fetcher.hub_poller import HubPoller
from penstock.timing import Timing


def waited(idle_after_s: float, wait_s: float, *, wanted: bool = False) -> float:
    """Return how long a fetch waits if it has nothing to read after this time."""
    begun = time.monotonic()
    assignment = SimpleNamespace(is_idle=lambda: time.monotonic() - begun >= idle_after_s, can_read_storage=False)
    member: Any = SimpleNamespace(hub=SimpleNamespace(rest_s=0.0))
    hub = HubPoller(
        member,
        cast(Any, None),
        cast(Any, assignment),
        cast(Any, None),
        cast(Any, None),
        stall_s=30.0,
        timing=Timing(),
        away=None,
    )
    if wanted:
        hub.wanted.set()
    hub.wait_while_fed(wait_s)
    return time.monotonic() - begun


def test_poll_returns_soon_after_last_chunk() -> None:
    assert 4 * Timing().fetch_turn_s <= waited(4 * Timing().fetch_turn_s, 60.0) < 30.0


@pytest.mark.parametrize("wanted", [False, True])
def test_poll_returns_at_timeout_or_hub_request(wanted: bool) -> None:
    wait_s = 30.0 if wanted else 0.2
    found = waited(60.0, wait_s, wanted=wanted)
    assert found < 15.0 if wanted else found >= 0.2
