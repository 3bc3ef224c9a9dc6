"""When a fetch asks the hub for upstreams again: when the hub says so, and sooner when nothing is left to read."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.fetcher.run import TURN_S, FetchRun


def waited(idle_after_s: float, wait_s: float, *, wanted: bool = False) -> float:
    """Return for how long a fetch waits that has nothing to read after so long."""
    begun, hub_now = time.monotonic(), threading.Event()
    if wanted:
        hub_now.set()
    fetch = SimpleNamespace(_is_idle=lambda: time.monotonic() - begun >= idle_after_s, _hub_now=hub_now)
    FetchRun._wait_while_fed(cast(FetchRun, fetch), wait_s)
    return time.monotonic() - begun


def test_it_ends_soon_after_the_last_chunk_that_upstreams_had() -> None:
    assert 4 * TURN_S <= waited(4 * TURN_S, 60.0) < 30.0


@pytest.mark.parametrize("wanted", [False, True])
def test_it_ends_when_the_time_is_over_or_the_hub_is_wanted(wanted: bool) -> None:
    wait_s = 30.0 if wanted else 0.2
    found = waited(60.0, wait_s, wanted=wanted)
    assert found < 15.0 if wanted else found >= 0.2
